package agent

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"math/big"
	"time"

	"kubevpn/internal/api"
)

// errUnauthorized rejects a key that belongs to no owner.
var errUnauthorized = errors.New("not the key of an owner")

// newKey creates the key of a leader, which is never stored, and its hash. The certificate only carries the key: it
// names nobody, and laptops compare the key.
func newKey() (tls.Certificate, string, error) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return tls.Certificate{}, "", fmt.Errorf("cannot create the agent's key: %w", err)
	}
	template := &x509.Certificate{
		SerialNumber: big.NewInt(1), NotBefore: time.Unix(0, 0),
		NotAfter: time.Date(9999, 12, 31, 23, 59, 59, 0, time.UTC),
	}
	der, err := x509.CreateCertificate(rand.Reader, template, template, &key.PublicKey, key)
	if err != nil {
		return tls.Certificate{}, "", fmt.Errorf("cannot create the agent's certificate: %w", err)
	}
	leaf, err := x509.ParseCertificate(der)
	if err != nil {
		return tls.Certificate{}, "", fmt.Errorf("cannot read the agent's certificate: %w", err)
	}
	return tls.Certificate{Certificate: [][]byte{der}, PrivateKey: key, Leaf: leaf},
		api.KeyHash(leaf.RawSubjectPublicKeyInfo), nil
}

// tlsConfig accepts clients for whose key's hash knows returns true.
func tlsConfig(own tls.Certificate, knows func(hash string) bool) *tls.Config {
	return &tls.Config{
		MinVersion:   tls.VersionTLS13,
		Certificates: []tls.Certificate{own},
		ClientAuth:   tls.RequireAnyClientCert, // the handshake proves that the client has the key; no CA signs it
		VerifyConnection: func(state tls.ConnectionState) error {
			if !knows(keyHash(state)) {
				return errUnauthorized
			}
			return nil
		},
		SessionTicketsDisabled:      true, // each conn proves its key
		DynamicRecordSizingDisabled: true, // frames inside wait for whole writes anyway
	}
}

// keyHash returns the hash of the peer's key, or "" if it has sent none.
func keyHash(state tls.ConnectionState) string {
	if len(state.PeerCertificates) == 0 {
		return ""
	}
	return api.KeyHash(state.PeerCertificates[0].RawSubjectPublicKeyInfo)
}
