package api

import (
	"encoding/base64"
	"encoding/hex"
	"errors"
	"strings"
	"time"
)

const (
	// TicketHeader is the header of the HTTP request of a conn that contains the ticket.
	TicketHeader = "Kubevpn-Ticket"
	// UpgradeProtocol is the protocol to which that request switches: a conn in TLS.
	UpgradeProtocol = "kubevpn"
)

// TicketRequest asks for the right to open conns through the API server's pod proxy. It is one JSON line on a separate
// stream. The private key stays on the laptop. Each request may use another key.
type TicketRequest struct {
	PublicKey []byte `json:"publicKey"` // PKIX, ASN.1 DER; ECDSA P-256
}

// Ticket is the answer to a TicketRequest, one JSON line. It is valid until the session ends, at most until NotAfter.
// Open conns continue after that.
type Ticket struct {
	Port uint16 `json:"port"` // of the manager's pod
	// follows .../proxy in the URL: "/"; not secret, because audit logs contain it
	Path   string `json:"path"`
	Secret []byte `json:"secret"` // 32 random bytes
	// DER: of the laptop, for its PublicKey; the CommonName is the session ID in hex
	Certificate []byte    `json:"certificate"`
	Server      []byte    `json:"server"`          // DER: of the manager; the laptop compares it byte by byte
	NotAfter    time.Time `json:"notAfter"`        // by the clock of the manager
	Error       *Error    `json:"error,omitempty"` // set if there is no ticket; then nothing else is set
}

// HeaderValue returns the value of TicketHeader: the session ID in hex, a dot, and the secret in base64url without
// padding.
func (t *Ticket) HeaderValue(session [16]byte) string {
	return hex.EncodeToString(session[:]) + "." + base64.RawURLEncoding.EncodeToString(t.Secret)
}

var errTicketHeader = errors.New("malformed " + TicketHeader)

// ParseTicketHeader parses the result of HeaderValue.
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
