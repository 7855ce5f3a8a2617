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

// errStranger is what a key is met with that is no owner's.
var errStranger = errors.New("not the key of an owner")

// newKey makes the key of a primary, which lives and dies with it, and its hash. The certificate is only the key's envelope:
// it names nobody, and who looks compares the key.
func newKey() (tls.Certificate, string, error) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return tls.Certificate{}, "", fmt.Errorf("making the agent's key: %w", err)
	}
	template := &x509.Certificate{
		SerialNumber: big.NewInt(1), NotBefore: time.Unix(0, 0), NotAfter: time.Date(9999, 12, 31, 23, 59, 59, 0, time.UTC),
	}
	der, err := x509.CreateCertificate(rand.Reader, template, template, &key.PublicKey, key)
	if err != nil {
		return tls.Certificate{}, "", fmt.Errorf("making the agent's certificate: %w", err)
	}
	leaf, err := x509.ParseCertificate(der)
	if err != nil {
		return tls.Certificate{}, "", fmt.Errorf("reading the agent's certificate: %w", err)
	}
	return tls.Certificate{Certificate: [][]byte{der}, PrivateKey: key, Leaf: leaf}, api.KeyHash(leaf.RawSubjectPublicKeyInfo), nil
}

// tlsConfig lets in whose key's hash is one that knows knows, and nobody else.
func tlsConfig(own tls.Certificate, knows func(hash string) bool) *tls.Config {
	return &tls.Config{
		MinVersion:   tls.VersionTLS13,
		Certificates: []tls.Certificate{own},
		ClientAuth:   tls.RequireAnyClientCert, // it has the key: the handshake shows that. Nobody signs for it.
		VerifyConnection: func(state tls.ConnectionState) error {
			if !knows(keyHash(state)) {
				return errStranger
			}
			return nil
		},
		SessionTicketsDisabled:      true, // each carrier shows its key
		DynamicRecordSizingDisabled: true, // what is inside waits for whole writes anyway
	}
}

// keyHash is that of the other end's key, or "" if it has shown none.
func keyHash(state tls.ConnectionState) string {
	if len(state.PeerCertificates) == 0 {
		return ""
	}
	return api.KeyHash(state.PeerCertificates[0].RawSubjectPublicKeyInfo)
}
