//go:build linux

package agent

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"errors"
	"fmt"

	"kubevpn/internal/api"
)

// errUnauthorized rejects a key that belongs to no owner.
var errUnauthorized = errors.New("not the key of an owner")

// newKey creates the key of a leader, which is never stored, and returns its certificate and hash.
func newKey() (tls.Certificate, string, error) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return tls.Certificate{}, "", fmt.Errorf("cannot create the agent's key: %w", err)
	}
	return api.SelfSigned(key)
}

// tlsConfig accepts clients for whose key's hash knows returns true.
func tlsConfig(own tls.Certificate, knows func(hash string) bool) *tls.Config {
	return &tls.Config{
		MinVersion:   tls.VersionTLS13,
		Certificates: []tls.Certificate{own},
		ClientAuth:   tls.RequireAnyClientCert, // the handshake proves that the client has the key; no CA signs it
		VerifyConnection: func(state tls.ConnectionState) error {
			if !knows(api.PeerKeyHash(state)) {
				return errUnauthorized
			}
			return nil
		},
		SessionTicketsDisabled:      true, // each conn proves its key
		DynamicRecordSizingDisabled: true, // frames inside wait for whole writes anyway
	}
}
