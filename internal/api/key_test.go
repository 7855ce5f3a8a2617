package api

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"testing"
)

func TestKeyHashIsSHA256(t *testing.T) {
	const abc = "ungWv48Bz-pBQUDeXa4iI7ADYaOWF3qctBD_YfIAFa0" // FIPS 180-2, B.1
	if got := KeyHash([]byte("abc")); got != abc {
		t.Errorf("got %s, want %s", got, abc)
	}
}

func TestPeerComparesTheHashOfASelfSignedKey(t *testing.T) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	certificate, hash, err := SelfSigned(key)
	if err != nil {
		t.Fatal(err)
	}
	peer := tls.ConnectionState{PeerCertificates: []*x509.Certificate{certificate.Leaf}}
	if got := PeerKeyHash(peer); got != hash || got == "" {
		t.Errorf("the peer sees %q, the owner %q", got, hash)
	}
	if got := PeerKeyHash(tls.ConnectionState{}); got != "" {
		t.Errorf("a peer without a certificate has the hash %q", got)
	}
}
