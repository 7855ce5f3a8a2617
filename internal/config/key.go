package config

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"

	"k8s.io/client-go/util/keyutil"

	"kubevpn/internal/api"
)

const maxKey = 4 << 10 // bytes of the file

// ClientKey returns the ECDSA P-256 key of this user on this machine. It identifies the owner of agents and clones, and
// the identity towards traffic managers is derived from it. The first call creates the key, and the state
// directory if it does not exist. Concurrent callers get the same key. ClientKey fails if other users can read the
// file, or if another user owns it. Errors are *api.Error.
func (p Paths) ClientKey() (*ecdsa.PrivateKey, error) {
	if err := p.MakeStateDir(); err != nil {
		return nil, err
	}
	path := p.KeyFile()
	key, err := readKey(path)
	if errors.Is(err, fs.ErrNotExist) {
		if err := createKey(path); err != nil { // removing files does not help, and could lose a key
			return nil, api.Errorf(api.ExitDaemon, "cannot store the key of this user: %w", err).
				WithHint("it belongs into %s", path)
		}
		key, err = readKey(path)
	}
	if err != nil {
		return nil, api.Errorf(api.ExitDaemon, "cannot use the key of this user: %w", err).
			WithHint("remove %s; kubevpn then creates a new key. Agents keep intercepts of the old key for one minute.",
				path)
	}
	return key, nil
}

func readKey(path string) (*ecdsa.PrivateKey, error) {
	if info, err := os.Stat(path); err != nil {
		return nil, err
	} else if !info.Mode().IsRegular() { // opening a FIFO blocks
		return nil, fmt.Errorf("%s is not a regular file", path)
	}
	f, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	info, err := f.Stat() // of the open file: the path may name another one by now
	if err != nil {
		return nil, err
	}
	if err := errors.Join(checkOwner(path, info), checkMode(path, info, 0o600)); err != nil {
		return nil, err
	}
	text, err := io.ReadAll(io.LimitReader(f, maxKey))
	if err != nil {
		return nil, err
	}
	parsed, err := keyutil.ParsePrivateKeyPEM(text) // older versions stored PKCS #8
	if err != nil {
		return nil, fmt.Errorf("%s does not contain a private key: %w", path, err)
	}
	key, is := parsed.(*ecdsa.PrivateKey)
	if !is || key.Curve != elliptic.P256() {
		return nil, fmt.Errorf("%s does not contain an ECDSA P-256 key", path)
	}
	return key, nil
}

// createKey stores a new key at path, unless another process has stored one.
func createKey(path string) error {
	text, err := keyutil.MakeEllipticPrivateKeyPEM()
	if err != nil {
		return fmt.Errorf("cannot create the key: %w", err)
	}
	// Link is atomic and never replaces a file, so the first process wins.
	if err := viaTemp(path, text, os.Link); err != nil && !errors.Is(err, fs.ErrExist) {
		return err
	}
	return nil
}
