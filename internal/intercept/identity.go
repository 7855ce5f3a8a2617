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

// identity is who gives orders to the agents: they know the hash of its key from their environment, and it knows the hash
// of theirs from their log. So neither needs an authority, and certificates are nothing but a key's envelope.
type identity struct {
	certificate tls.Certificate
	hash        string
}

var errOtherAgent = errors.New("whoever answers does not have the key of the agent's greeting")

func newIdentity(key *ecdsa.PrivateKey) (identity, error) {
	template := &x509.Certificate{
		SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: "kubevpn"},
		NotBefore: time.Unix(0, 0), NotAfter: time.Date(9999, 12, 31, 23, 59, 59, 0, time.UTC), // nobody looks: the clocks may differ
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

// towards is the laptop's end of TLS with the agent whose key has that hash.
func (i identity) towards(agent string) *tls.Config {
	return &tls.Config{
		MinVersion:   tls.VersionTLS13,
		Certificates: []tls.Certificate{i.certificate},
		// The first records of a connection would be small ones, and a carrier carries much from the beginning.
		DynamicRecordSizingDisabled: true,
		InsecureSkipVerify:          true, // nobody signed the agent's certificate: it has to be of the very key that its greeting names
		VerifyConnection: func(state tls.ConnectionState) error {
			if len(state.PeerCertificates) == 0 || api.KeyHash(state.PeerCertificates[0].RawSubjectPublicKeyInfo) != agent {
				return errOtherAgent
			}
			return nil
		},
	}
}
