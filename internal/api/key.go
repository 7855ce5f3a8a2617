package api

import (
	"crypto/sha256"
	"encoding/base64"
)

// KeyHash names a public key, given as DER of its SubjectPublicKeyInfo (x509.Certificate.RawSubjectPublicKeyInfo): base64url,
// without padding, of its SHA-256. It is 43 letters, and no secret.
func KeyHash(publicKey []byte) string {
	sum := sha256.Sum256(publicKey)
	return base64.RawURLEncoding.EncodeToString(sum[:])
}
