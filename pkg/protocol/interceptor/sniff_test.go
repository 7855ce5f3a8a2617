package interceptor

import (
	"strings"
	"testing"
)

func testProbe() *Probe {
	return &Probe{Prefix: "\x00probe\x00", Length: 11, Expected: func(b []byte) bool { return string(b[7:]) == "1234" }}
}

func TestClassifyRecognizesProtocols(t *testing.T) {
	tests := []struct {
		first          string
		kind, guessing kind // guessing: if no more bytes come
	}{
		{"", kindUnknown, kindRaw},
		{"GET / HTTP/1.1\r\n", kindHTTP1, kindHTTP1},
		{"GET / HTTP/1.0\n", kindHTTP1, kindHTTP1},
		{"PROPFIND /a%20b?c HTTP/1.1\r\nHost: x\r\n\r\n", kindHTTP1, kindHTTP1},
		{"GET http://a/ HTTP/1.1\r\n", kindHTTP1, kindHTTP1},
		{"OPTIONS * HTTP/1.1\r\n", kindHTTP1, kindHTTP1},
		{"GET /", kindUnknown, kindHTTP1},
		{"GE", kindUnknown, kindRaw},
		{"GET " + "/" + strings.Repeat("x", sniffLen), kindUnknown, kindHTTP1},
		{"GET /index.html\r\n", kindRaw, kindRaw}, // HTTP/0.9
		{"GET  HTTP/1.1\r\n", kindRaw, kindRaw},
		{" / HTTP/1.1\r\n", kindRaw, kindRaw},
		{"GET / HTTP/2.0\r\n", kindRaw, kindRaw},
		{"GET / HTTP/1.10\r\n", kindRaw, kindRaw},
		{"PING\r\n", kindRaw, kindRaw}, // Redis
		{"*1\r\n$4\r\nPING\r\n", kindRaw, kindRaw},
		{"get key\r\n", kindRaw, kindRaw}, // memcached
		{"get /key", kindUnknown, kindRaw},
		{"EHLO me", kindUnknown, kindRaw},
		{"SSH-2.0-OpenSSH_9.2\r\n", kindRaw, kindRaw},
		{"\x00\x00\x00\x08\x04\xd2\x16\x2f", kindRaw, kindRaw}, // PostgreSQL
		{strings.Repeat("X", maxMethod+1), kindRaw, kindRaw},
		{"PRI * HTTP/2.0\r\n", kindUnknown, kindRaw},
		{preface2, kindHTTP2, kindHTTP2},
		{preface2 + "\x00", kindHTTP2, kindHTTP2},
		{"PRI * HTTP/2.0\r\n\r\nXX", kindRaw, kindRaw},
		{"\x16\x03\x01\x02\x00\x01", kindTLS, kindTLS},
		{"\x16\x03\x01", kindUnknown, kindRaw},
		{"\x16\x03\x01\x02\x00\x02", kindRaw, kindRaw},
		{"\x16\x04", kindRaw, kindRaw},
		{"\x00pro", kindUnknown, kindRaw},
		{"\x00probe\x001234", kindProbe, kindProbe},
		{"\x00probe\x004321", kindRaw, kindRaw},
		{"\x00probe\x0012345", kindRaw, kindRaw},
	}
	for _, tt := range tests {
		got := classify([]byte(tt.first), testProbe())
		if got != tt.kind {
			t.Errorf("classify(%.40q) is %d, want %d", tt.first, got, tt.kind)
		}
		if got == kindUnknown {
			got = guess([]byte(tt.first))
		}
		if got != tt.guessing {
			t.Errorf("the guess for %.40q is %d, want %d", tt.first, got, tt.guessing)
		}
	}
}

// The kind of a connection does not depend on the pieces in which its bytes arrive.
func FuzzClassify(f *testing.F) {
	for _, s := range []string{"GET / HTTP/1.1\r\nHost: a\r\n\r\n", preface2, "\x16\x03\x01\x02\x00\x01\x00", "\x00probe\x001234", "SSH-2.0\r\n"} {
		f.Add([]byte(s))
	}
	c := testProbe()
	f.Fuzz(func(t *testing.T, b []byte) {
		known := kindUnknown
		for n := range len(b) + 1 {
			k := classify(b[:n], c)
			if known == kindProbe {
				break // a probe fills its connection
			}
			if known != kindUnknown && k != known {
				t.Fatalf("%q is %d, and %q is %d", b[:n-1], known, b[:n], k)
			}
			if known = k; k == kindUnknown {
				if g := guess(b[:n]); g != kindRaw && g != kindHTTP1 {
					t.Fatalf("the guess for %q is %d", b[:n], g)
				}
			}
		}
	})
}
