package config

import (
	"encoding/json"
	"errors"
	"io/fs"
	"os"

	"kubevpn/internal/api"
)

// Trusted is the stored consent for one cluster.
type Trusted struct {
	Cluster string      `json:"cluster"` // its name in the kubeconfig when it was stored
	Server  string      `json:"server"`
	Consent api.Consent `json:"consent"`
}

// LoadTrust returns the trusted clusters by ID. The result is empty if the file does not exist. Errors are *api.Error.
func (p Paths) LoadTrust() (map[string]Trusted, error) {
	all := map[string]Trusted{}
	text, err := os.ReadFile(p.TrustFile())
	if err == nil {
		err = json.Unmarshal(text, &all)
	}
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, api.Errorf(api.ExitUsage, "cannot read the trusted clusters: %w", err).
			WithHint("the file is %s; remove it, and kubevpn asks you again", p.TrustFile())
	}
	if all == nil { // the file contains null
		all = map[string]Trusted{}
	}
	return all, nil
}

// SaveTrust calls change with the stored clusters, stores the result with mode 0600, and returns when it is on disk. It
// replaces the file atomically. If two processes call it at the same time, one change may be lost, and kubevpn asks the
// user again. Errors are *api.Error.
func (p Paths) SaveTrust(change func(all map[string]Trusted)) error {
	all, err := p.LoadTrust()
	if err != nil {
		return err
	}
	change(all)
	if err := p.MakeStateDir(); err != nil {
		return err
	}
	text, err := json.MarshalIndent(all, "", "  ")
	if err == nil {
		err = WriteFile(p.TrustFile(), append(text, '\n'))
	}
	if err != nil {
		return api.Errorf(api.ExitUnexpected, "cannot store the trusted clusters: %w", err)
	}
	return nil
}
