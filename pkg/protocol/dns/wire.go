package dns

import (
	"encoding/binary"
	"errors"

	"github.com/miekg/dns"
)

// Offsets and bits of the DNS header (RFC 1035 section 4.1.1).
const (
	headerLen = 12
	maxName   = 255 // bytes on the wire, with the root label (RFC 1035 section 2.3.4)

	bitQR = 1 << 7 // in byte 2
	bitTC = 1 << 1 // in byte 2
	bitRD = 1 << 0 // in byte 2
	bitRA = 1 << 7 // in byte 3
	bitCD = 1 << 4 // in byte 3
)

// Errors of parseQuery. The server drops the first kind of message and answers the others.
var (
	errNotQuery = errors.New("not a DNS query")
	errFormat   = errors.New("malformed DNS query")
	errOpcode   = errors.New("DNS operation other than QUERY")
)

// question is the question of one query, in the form in which names are compared.
type question struct {
	// key is the name in lower case, labels joined by dots, without a final dot; "" is the root. A dot
	// inside of a label becomes 0xff, so that splitting at dots gives the labels.
	key    string
	qtype  uint16
	qclass uint16
	end    int // offset of what follows the question
}

// parseQuery reads the header and the question of a query, and ignores the bytes behind them: the resolver may forward
// the message, and then only the upstream reads those.
func parseQuery(m []byte) (question, error) {
	if len(m) < headerLen || m[2]&bitQR != 0 {
		return question{}, errNotQuery
	}
	if m[2]>>3&0xf != dns.OpcodeQuery {
		return question{}, errOpcode
	}
	if binary.BigEndian.Uint16(m[4:]) != 1 {
		return question{}, errFormat
	}
	key, off, ok := parseName(m, headerLen)
	if !ok || len(m) < off+4 {
		return question{}, errFormat
	}
	return question{
		key:    key,
		qtype:  binary.BigEndian.Uint16(m[off:]),
		qclass: binary.BigEndian.Uint16(m[off+2:]),
		end:    off + 4,
	}, nil
}

// parseName reads an uncompressed name at off (nothing precedes a question's name that it could point at) and
// returns its key and the offset behind it.
func parseName(m []byte, off int) (key string, end int, ok bool) {
	var buf [maxName]byte
	n, start := 0, off
	for {
		if off >= len(m) {
			return "", 0, false
		}
		l := int(m[off])
		off++
		if l == 0 {
			break
		}
		if l > 63 || off+l >= len(m) || off+l+1-start > maxName {
			return "", 0, false
		}
		if n > 0 {
			buf[n] = '.'
			n++
		}
		for _, c := range m[off : off+l] {
			if c = lower(c); c == '.' {
				c = 0xff
			}
			buf[n] = c
			n++
		}
		off += l
	}
	return string(buf[:n]), off, true
}

// keyOf returns the key of a name in presentation form ("Web.Default", "a\.b.example.").
func keyOf(name string) (string, error) {
	var buf [maxName + 1]byte
	end, err := dns.PackDomainName(dns.Fqdn(name), buf[:], 0, nil, false)
	if err != nil {
		return "", err
	}
	key, _, ok := parseName(buf[:end], 0)
	if !ok {
		return "", errFormat
	}
	return key, nil
}

// udpSize returns the largest UDP reply, in bytes, that the sender of query m accepts: the size in its OPT record
// (RFC 6891), or 512 without one. end is the offset behind the question.
func udpSize(m []byte, end int) int {
	if binary.BigEndian.Uint16(m[6:]) != 0 || binary.BigEndian.Uint16(m[8:]) != 0 {
		return dns.MinMsgSize // a query has no answer or authority; do not look behind them
	}
	off := end
	for range binary.BigEndian.Uint16(m[10:]) {
		// Only records owned by the root (OPT, TSIG with a short key name aside) are skipped; others end the search.
		if len(m) < off+11 || m[off] != 0 {
			break
		}
		if binary.BigEndian.Uint16(m[off+1:]) == dns.TypeOPT {
			return max(dns.MinMsgSize, int(binary.BigEndian.Uint16(m[off+3:])))
		}
		off += 11 + int(binary.BigEndian.Uint16(m[off+9:]))
	}
	return dns.MinMsgSize
}

// replyTo returns a reply to the query m that consists of a header and the question. end is the offset behind the
// question; with 0 the reply has no question, which may not be readable.
func replyTo(m []byte, end, rcode int) []byte {
	r := make([]byte, max(headerLen, end))
	copy(r, m[:len(r)])
	r[2] = bitQR | m[2]&(0xf<<3) | m[2]&bitRD
	r[3] = bitRA | m[3]&bitCD | byte(rcode)
	clear(r[4:headerLen])
	if end > 0 {
		r[5] = 1
	}
	return r
}

// rcodeOf returns the result code in a reply's header, without the bits of an OPT record.
func rcodeOf(reply []byte) int { return int(reply[3] & 0xf) }

// answers reports whether reply is a reply to query, whose question ends at end: the same ID, the same question but
// for the case of letters. Servers that cannot read a query may leave the question out.
func answers(reply, query []byte, end int) bool {
	if len(reply) < headerLen || reply[2]&bitQR == 0 ||
		reply[0] != query[0] || reply[1] != query[1] || (reply[2]^query[2])>>3&0xf != 0 {
		return false
	}
	switch binary.BigEndian.Uint16(reply[4:]) {
	case 0:
		return rcodeOf(reply) != dns.RcodeSuccess
	case 1:
	default:
		return false
	}
	if len(reply) < end {
		return false
	}
	for i := headerLen; i < end-4; i++ { // length bytes are below 'A', so that folding all bytes is safe
		if lower(reply[i]) != lower(query[i]) {
			return false
		}
	}
	return string(reply[end-4:end]) == string(query[end-4:end])
}

func lower(c byte) byte {
	if 'A' <= c && c <= 'Z' {
		c += 'a' - 'A'
	}
	return c
}
