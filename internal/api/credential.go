package api

import "time"

// Credential is the result of a credential plugin: a token, a client certificate with its key, or both. It is secret:
// kubevpn keeps it in memory only, and String hides it from logs.
type Credential struct {
	Token       string    `json:"token,omitempty"`
	Certificate string    `json:"certificate,omitempty"` // PEM
	Key         string    `json:"key,omitempty"`         // PEM
	Expires     time.Time `json:"expires,omitzero"`      // zero: when the API server rejects it
}

// String hides the secret.
func (Credential) String() string { return "(credential)" }

// GoString hides the secret from %#v.
func (Credential) GoString() string { return "(credential)" }
