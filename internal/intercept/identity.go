package intercept

import (
	"crypto/ecdsa"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"errors"
	"fmt"
	"math/big"
	"time"

	"kubevpn/internal/api"
)

// identity authenticates the laptop to its agents. An agent reads the hash of the laptop's key from its environment;
// the laptop reads the hash of the agent's key from the agent's log. Neither needs a CA: a certificate only carries the
// public key.
type identity struct {
	certificate tls.Certificate
	hash        string
}

var errOtherAgent = errors.New("the peer does not have the agent's key")

func newIdentity(key *ecdsa.PrivateKey) (identity, error) {
	template := &x509.Certificate{
		SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: "kubevpn"},
		// the agent ignores the validity: the clocks may differ
		NotBefore: time.Unix(0, 0), NotAfter: time.Date(9999, 12, 31, 23, 59, 59, 0, time.UTC),
		KeyUsage: x509.KeyUsageDigitalSignature, ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth},
	}
	der, err := x509.CreateCertificate(rand.Reader, template, template, &key.PublicKey, key)
	if err != nil {
		return identity{}, fmt.Errorf("signing with the owner's key: %w", err)
	}
	leaf, err := x509.ParseCertificate(der)
	if err != nil {
		return identity{}, fmt.Errorf("reading the owner's certificate: %w", err)
	}
	return identity{
		certificate: tls.Certificate{Certificate: [][]byte{der}, PrivateKey: key, Leaf: leaf},
		hash:        api.KeyHash(leaf.RawSubjectPublicKeyInfo),
	}, nil
}

// tlsConfig returns the laptop's TLS configuration for the agent whose key has that hash.
func (i identity) tlsConfig(agent string) *tls.Config {
	return &tls.Config{
		MinVersion:   tls.VersionTLS13,
		Certificates: []tls.Certificate{i.certificate},
		// Small first records would slow down a conn, which carries much data from the start.
		DynamicRecordSizingDisabled: true,
		// the agent's certificate is self-signed: VerifyConnection compares its key with the key in the agent's info
		InsecureSkipVerify: true,
		VerifyConnection: func(state tls.ConnectionState) error {
			if len(state.PeerCertificates) == 0 ||
				api.KeyHash(state.PeerCertificates[0].RawSubjectPublicKeyInfo) != agent {
				return errOtherAgent
			}
			return nil
		},
	}
}
