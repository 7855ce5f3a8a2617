package redact

import (
	"bytes"
	"encoding/base64"
	"encoding/json"
	"fmt"
	"net/url"
	"strconv"
	"strings"
	"testing"
	"unicode/utf8"
)

func TestTextMasksPatterns(t *testing.T) {
	tests := []struct{ text, want string }{
		{"Authorization: Basic YW5uOnB3\nnext", "Authorization: [redacted]\nnext"},
		{`{"Cookie":["a=b; c=d","e=f"],"Host":["web"]}`, `{"Cookie":[redacted],"Host":["web"]}`},
		{"Set-Cookie: sid=1; Path=/\r\n", "Set-Cookie: [redacted]\n"},
		{"map[Cookie:[sid=1] Host:[web]]", "map[Cookie:[redacted] Host:[web]]"},
		{"X-Auth-Token: abc def", "X-Auth-Token: [redacted]"},
		{`request sent bearer="Bearer abc.def-1"`, `request sent bearer="Bearer [redacted]"`},
		{"got eyJhbGciOiJFUzI1NiJ9.eyJzdWIiOiJhbm4ifQ.c2ln!", "got [redacted]!"},
		{"dial http://ann:p/w@proxy:3128: refused", "dial http://[redacted]proxy:3128: refused"},
		{"password=hunter2 level=INFO", "password=[redacted] level=INFO"},
		{`"db_password": "a \"b\" c", "x": 1`, `"db_password": [redacted], "x": 1`},
		{"kubectl --token abc get pods", "kubectl --token [redacted] get pods"},
		{"- name: DB_PASSWORD\n  value: hunter2\n- name: A", "- name: DB_PASSWORD\n  value: [redacted]\n- name: A"},
		{`{"name":"Cookie","value":"a=b"}`, `{"name":"Cookie","value":[redacted]}`},
		{"clientKey: abcdef", "clientKey: [redacted]"},
		{"AKIAIOSFODNN7EXAMPLE.", "[redacted]."},
		{"a\n-----BEGIN EC PRIVATE KEY-----\nAAAA\n-----END EC PRIVATE KEY-----\nb", "a\n[redacted]\nb"},
		{"a\n-----BEGIN EC PRIVATE KEY-----\nAAAA\n", "a\n[redacted]"},
		{"QUJDREVGR0hJSktMTU5PUFFS\nQUJD\n-----END EC PRIVATE KEY-----\nb", "[redacted]\nb"},
		{"id 9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08", "id [redacted]"},
		{"secret32 dGhpcyBpcyBub3QgYSBzZWNyZXQsIG9yIGlzIGl0Pz8", "secret32 [redacted]"},
	}
	var r Redactor
	for _, tt := range tests {
		if got := r.Text(tt.text); got != tt.want {
			t.Errorf("%q: got %q, want %q", tt.text, got, tt.want)
		}
	}
}

func TestTextKeepsOrdinaryText(t *testing.T) {
	var r Redactor
	r.Add("", "abc", "   ")
	for _, text := range []string{
		"", "\n", "abc %zz \\q \\u12 %",
		`time=2026-11-23T18:00:00Z level=INFO msg="conn opened" session=42 transport=api-proxy addr=10.96.0.1:443`,
		"image registry.example/kubevpn@sha256:9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08",
		"GET https://10.0.0.1:6443/api/v1/namespaces/kubevpn/pods/kubevpn-traffic-manager-6d4f9c7b8-x2x9z/portforward",
		"10.96.0.0/12 dev kubevpn0 proto static scope link src 198.19.0.2 metric 50",
		"nameserver 127.0.0.53\nsearch corp.example\noptions edns0 trust-ad",
		`{"cidrs": ["10.244.0.0/16"], "clusterID": "0123456789ab"}`,
		"kubevpn/internal/connection.(*Connection).handshake(0xc000123456, 0x1)",
	} {
		if got := r.Text(text); got != text {
			t.Errorf("%q became %q", text, got)
		}
	}
}

func TestTextMasksKnownValues(t *testing.T) {
	const secret = `p%41ss "wörd" \n&/+<x>`
	for name, text := range encoded(secret, "ann:", " and more") {
		var r Redactor
		r.Add(secret, "another")
		if got := r.Text("before " + text + " after"); got != "before "+Mark+" after" &&
			(!strings.HasPrefix(got, "before ") || !strings.HasSuffix(got, " after") || holds(got, secret)) {
			t.Errorf("%s: %q became %q", name, text, got)
		}
	}
}

func TestTextMasksPatternsInBase64(t *testing.T) {
	var r Redactor
	for _, secret := range []string{"Authorization: Bearer abcdef", "password=correct-horse", "-----BEGIN KEY-----\nAAAA"} {
		for n := range 3 {
			text := base64.StdEncoding.EncodeToString([]byte("{xyz"[:n+1] + secret))
			twice := base64.URLEncoding.EncodeToString([]byte(text))
			for _, text := range []string{text, twice, url.QueryEscape(text), strings.ReplaceAll(text, "/", `\/`)} {
				if got := r.Text("data: " + text + "\n"); strings.Contains(got, text[:16]) {
					t.Errorf("%q in %q became %q", secret, text, got)
				}
			}
		}
	}
}

// encoded returns the text with a secret in each encoding that the Redactor decodes.
func encoded(secret, before, after string) map[string]string {
	all := map[string]string{"raw": before + secret + after}
	add := func(name string, encode func(string) string) { all[name] = encode(before + secret + after) }
	quote := func(html bool) func(string) string {
		return func(s string) string {
			var b bytes.Buffer
			enc := json.NewEncoder(&b)
			enc.SetEscapeHTML(html)
			enc.Encode(s)
			return strings.TrimSuffix(b.String(), "\n")
		}
	}
	lower := func(s string) string {
		var b strings.Builder
		for _, c := range []byte(s) {
			fmt.Fprintf(&b, "%%%02x", c)
		}
		return b.String()
	}
	add("percent", lower)
	add("query", url.QueryEscape)
	add("path", url.PathEscape)
	if utf8.ValidString(secret) {
		add("JSON", quote(true))
		add("JSON without HTML", quote(false))
		add("JSON in JSON", func(s string) string { return quote(true)(quote(true)(s)) })
		add("query in JSON", func(s string) string { return quote(true)(url.QueryEscape(s)) })
		add("JSON in a query", func(s string) string { return url.QueryEscape(quote(true)(s)) })
	}
	add("Go", strconv.Quote)
	add("ASCII of Go", strconv.QuoteToASCII)
	for n := range 3 {
		before := before + "xyz"[:n]
		for name, e := range map[string]*base64.Encoding{"standard": base64.StdEncoding, "URL": base64.RawURLEncoding} {
			text := e.EncodeToString([]byte(before + secret + after))
			all[fmt.Sprintf("base64 %s %d", name, n)] = text
			all[fmt.Sprintf("base64 %s %d in a query", name, n)] = url.QueryEscape(text)
			all[fmt.Sprintf("base64 %s %d in JSON", name, n)] = strings.ReplaceAll(text, "/", `\/`)
		}
	}
	return all
}

// holds reports whether the text contains a secret in an encoding, with any neighbors.
func holds(text, secret string) bool {
	for _, e := range encoded(secret, "", "") {
		if strings.Contains(text, e) {
			return true
		}
	}
	for _, e := range encodings(secret) {
		if strings.Contains(text, e) {
			return true
		}
	}
	return false
}

// FuzzText checks that no encoding of a known value remains, whatever surrounds the value.
func FuzzText(f *testing.F) {
	f.Add("hunter2!", "user=ann&pw=", "\nnext")
	f.Add("p%41ss \"w\\u00f6rd", "\\", "%")
	f.Add("\x00\xff\xfe\x80", "{", "}")
	f.Add("aaaaaaa", "aaa", "a")
	f.Add("%%%%41", "%", "41")
	f.Fuzz(func(t *testing.T, secret, before, after string) {
		secret = strings.TrimSpace(secret)
		if len(secret) < 6 || len(secret)+len(before)+len(after) > 1<<10 || strings.ContainsAny(secret, "[]") ||
			strings.Contains(Mark, secret) {
			t.Skip("short values are found too, but occur in other text by chance")
		}
		var r Redactor
		r.Add(secret)
		for name, text := range encoded(secret, before, after) {
			if got := r.Text("{ " + text + " }"); holds(got, secret) {
				t.Errorf("%s: %q became %q", name, text, got)
			}
		}
	})
}

func BenchmarkText(b *testing.B) {
	var r Redactor
	for n := range 200 {
		r.Add(fmt.Sprintf("value-of-variable-%d", n))
	}
	line := `time=2026-11-23T18:00:00.000Z level=INFO msg="conn opened" session=42 url="https://10.0.0.1/api?x=%20" err="\"x\""` + "\n"
	text := strings.Repeat(line, 1<<20/len(line))
	b.SetBytes(int64(len(text)))
	for b.Loop() {
		r.Text(text)
	}
}
