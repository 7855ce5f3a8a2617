package api

import (
	"crypto/ecdsa"
	"crypto/rand"
	"crypto/sha256"
	"crypto/tls"
	"crypto/x509"
	"encoding/base64"
	"fmt"
	"math/big"
	"time"
)

// KeyHash returns the SHA-256 of a public key in base64url without padding: 43 bytes. publicKey is the DER of a
// SubjectPublicKeyInfo, as in x509.Certificate.RawSubjectPublicKeyInfo. The hash is not secret.
func KeyHash(publicKey []byte) string {
	sum := sha256.Sum256(publicKey)
	return base64.RawURLEncoding.EncodeToString(sum[:])
}

// PeerKeyHash returns the KeyHash of the key that the peer has proved to have, or "" if it has sent none.
func PeerKeyHash(state tls.ConnectionState) string {
	if len(state.PeerCertificates) == 0 {
		return ""
	}
	return KeyHash(state.PeerCertificates[0].RawSubjectPublicKeyInfo)
}

// SelfSigned returns a TLS certificate for the key, and the key's KeyHash. The certificate only carries the key: it
// names nobody, and is always valid, because the clocks of laptop and pod may differ. Peers compare the hash.
func SelfSigned(key *ecdsa.PrivateKey) (certificate tls.Certificate, hash string, err error) {
	template := &x509.Certificate{
		SerialNumber: big.NewInt(1), NotBefore: time.Unix(0, 0),
		NotAfter: time.Date(9999, 12, 31, 23, 59, 59, 0, time.UTC),
	}
	der, err := x509.CreateCertificate(rand.Reader, template, template, &key.PublicKey, key)
	if err != nil {
		return tls.Certificate{}, "", fmt.Errorf("cannot create the key's certificate: %w", err)
	}
	leaf, err := x509.ParseCertificate(der)
	if err != nil {
		return tls.Certificate{}, "", fmt.Errorf("cannot read the key's certificate: %w", err)
	}
	return tls.Certificate{Certificate: [][]byte{der}, PrivateKey: key, Leaf: leaf},
		KeyHash(leaf.RawSubjectPublicKeyInfo), nil
}
