package api

import (
	"encoding/base64"
	"encoding/hex"
	"errors"
	"strings"
	"time"
)

const (
	// TicketHeader is the header of a carrier's HTTP request that shows the ticket.
	TicketHeader = "Kubevpn-Ticket"
	// UpgradeProtocol is what that request wants to switch to: TLS, and a carrier inside.
	UpgradeProtocol = "kubevpn"
)

// TicketRequest asks for the right to open carriers by way of the API server's pod proxy: one JSON line on a stream
// of its own. The laptop keeps the private key; each request may have another.
type TicketRequest struct {
	PublicKey []byte `json:"publicKey"` // PKIX, ASN.1 DER; ECDSA P-256
}

// Ticket is that right, one JSON line. It ends with the session, and at NotAfter at the latest. A carrier that is
// open then goes on.
type Ticket struct {
	Port        uint16    `json:"port"`            // of the manager's pod
	Path        string    `json:"path"`            // what follows .../proxy in the URL, "/"; no secret, audit logs show it
	Secret      []byte    `json:"secret"`          // 32 random bytes
	Certificate []byte    `json:"certificate"`     // DER: the laptop's, for its PublicKey; the CommonName is the session's ID in hex
	Server      []byte    `json:"server"`          // DER: the manager's, to be compared byte by byte
	NotAfter    time.Time `json:"notAfter"`        // of the manager's clock
	Error       *Error    `json:"error,omitempty"` // why there is none; nothing else is set then
}

// HeaderValue is the value of TicketHeader: the session's ID in hex, a dot, and the secret in base64url without
// padding.
func (t *Ticket) HeaderValue(session [16]byte) string {
	return hex.EncodeToString(session[:]) + "." + base64.RawURLEncoding.EncodeToString(t.Secret)
}

var errTicketHeader = errors.New("malformed " + TicketHeader)

// ParseTicketHeader reads what HeaderValue gives.
func ParseTicketHeader(value string) (session [16]byte, secret [32]byte, err error) {
	id, text, ok := strings.Cut(value, ".")
	if !ok || len(id) != hex.EncodedLen(len(session)) || len(text) != base64.RawURLEncoding.EncodedLen(len(secret)) {
		return session, secret, errTicketHeader
	}
	if _, err := hex.Decode(session[:], []byte(id)); err != nil {
		return session, secret, errTicketHeader
	}
	if n, err := base64.RawURLEncoding.Strict().Decode(secret[:], []byte(text)); err != nil || n != len(secret) {
		return session, secret, errTicketHeader
	}
	return session, secret, nil
}
