package api

import (
	"crypto/sha256"
	"encoding/base64"
)

// KeyHash returns the SHA-256 of a public key in base64url without padding: 43 bytes. publicKey is the DER of a
// SubjectPublicKeyInfo, as in x509.Certificate.RawSubjectPublicKeyInfo. The hash is not secret.
func KeyHash(publicKey []byte) string {
	sum := sha256.Sum256(publicKey)
	return base64.RawURLEncoding.EncodeToString(sum[:])
}
