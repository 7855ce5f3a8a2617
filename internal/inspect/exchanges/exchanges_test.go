package exchanges

import (
	"bytes"
	"encoding/json"
	"net/http"
	"net/netip"
	"os/exec"
	"runtime"
	"slices"
	"strings"
	"testing"
	"time"

	"kubevpn/internal/api"
)

func sample() *api.Exchange {
	return &api.Exchange{
		Began: time.Date(2026, 1, 2, 3, 4, 5, 6e6, time.UTC), Wait: 0.25, Seconds: 0.5, Pod: "web-1", To: api.ToLaptop,
		Server: netip.MustParseAddrPort("10.244.1.7:8080"),
		Request: api.ExchangeRequest{Method: "POST", Scheme: "http", Host: "web.default", Path: "/a b?c=d&c=e", Proto: "HTTP/1.1",
			Headers: http.Header{"Content-Type": {"text/plain"}, "Cookie": {"a=b"}, "X-Empty": {""}},
			Body:    api.ExchangeBody{Size: 12, Data: []byte("it's\n\"$HOME\"")}},
		Response: &api.ExchangeResponse{Status: 302, Headers: http.Header{"Location": {"/next"}, "Set-Cookie": {"s=1; Path=/"}},
			Body: api.ExchangeBody{Size: 3, Data: []byte("\xff\x00a")}},
	}
}

// shell returns the words with which a shell calls curl, and curl's standard input. The shell runs nothing else.
func shell(t *testing.T, script string) (words []string, input string) {
	t.Helper()
	if runtime.GOOS == "windows" {
		t.Skip("needs a POSIX shell")
	}
	cmd := exec.Command("/bin/sh", "-c", `curl() { printf '%s\0' "$@" END; case "$*" in *@-*) cat;; esac; }; `+"\n"+script)
	cmd.Env = []string{"PATH=/usr/bin:/bin", "HOME=/root"}
	var errout bytes.Buffer
	cmd.Stderr = &errout
	out, err := cmd.Output()
	if err != nil || errout.Len() > 0 {
		t.Fatalf("%q: %v %s", script, err, &errout)
	}
	all := strings.Split(string(out), "\x00")
	end := slices.Index(all, "END")
	if end < 0 {
		t.Fatalf("%q printed %q", script, out)
	}
	return all[:end], strings.Join(all[end+1:], "\x00")
}

func TestCurlRepeatsTheRequest(t *testing.T) {
	e := sample()
	words, _ := shell(t, Curl(e))
	want := []string{"--globoff", "--path-as-is", "--connect-to", "::10.244.1.7:8080", "--request", "POST", "--header", "Content-Type: text/plain",
		"--header", "Cookie: a=b", "--header", "X-Empty;", "--header", "Accept:", "--header", "User-Agent:", "--data-raw", "it's\n\"$HOME\"",
		"http://web.default/a%20b?c=d&c=e"}
	if !slices.Equal(words, want) {
		t.Errorf("words %q\n want %q", words, want)
	}
}

func TestCurlOfOtherRequests(t *testing.T) {
	for name, test := range map[string]struct {
		change func(*api.Exchange)
		want   string // contained
	}{
		"head":      {func(e *api.Exchange) { e.Request.Method, e.Request.Body = "HEAD", api.ExchangeBody{} }, "--head"},
		"h2c":       {func(e *api.Exchange) { e.Request.Proto = "HTTP/2.0" }, "--http2-prior-knowledge"},
		"tls":       {func(e *api.Exchange) { e.Request.Scheme = "https" }, "https://web.default/"},
		"ipv6":      {func(e *api.Exchange) { e.Server = netip.MustParseAddrPort("[fd00::7]:8080") }, "'::[fd00::7]:8080'"},
		"host":      {func(e *api.Exchange) { e.Request.Host = "a b" }, "'Host: a b'"},
		"options":   {func(e *api.Exchange) { e.Request.Path = "*" }, "--request-target '*'"},
		"truncated": {func(e *api.Exchange) { e.Request.Body.Size = 100 }, "# the body has 100 bytes, of which 12 were recorded\n"},
		"redacted":  {func(e *api.Exchange) { e.Redact([]string{"cookie", "set-cookie"}) }, "# without Cookie: redacted\n"},
		"path":      {func(e *api.Exchange) { e.Request.Path = "/?sig=x"; e.Redact(nil) }, "# the path has [redacted] in place of secrets\n"},
		"body": {func(e *api.Exchange) { e.Request.Body.Data = []byte(`{"token":"x"}`); e.Redact(nil) },
			"# the request body has [redacted] in place of secrets\n"},
	} {
		t.Run(name, func(t *testing.T) {
			e := sample()
			test.change(e)
			got := Curl(e)
			if !strings.Contains(got, test.want) {
				t.Errorf("%s\nwant %s", got, test.want)
			}
			shell(t, got)
		})
	}
}

func TestCurlPipesBytes(t *testing.T) {
	e := sample()
	e.Request.Body = api.ExchangeBody{Size: 4, Data: []byte("\x00\xff'\n")}
	words, input := shell(t, Curl(e))
	if !slices.Contains(words, "@-") || input != "\x00\xff'\n" {
		t.Errorf("%q reads %q", words, input)
	}
}

// For any request, the shell runs only curl, with one URL, and curl reads no file.
func FuzzCurl(f *testing.F) {
	f.Add("GET", "web", "/", "X-User", "me", []byte(nil))
	f.Add("PO'ST; reboot", "$(reboot)", "/`reboot`\n#", "@/etc/passwd", "'; reboot #", []byte("@/etc/passwd"))
	f.Add("--upload-file", "-K/etc/passwd", "//x y", "-K", "\x1b[2J\u202e", []byte("\xff"))
	f.Fuzz(func(t *testing.T, method, host, path, name, value string, body []byte) {
		e := sample()
		e.Request = api.ExchangeRequest{Method: method, Host: host, Path: path, Headers: http.Header{name: {value}},
			Body: api.ExchangeBody{Size: int64(len(body)), Data: body}}
		text := Curl(e)
		if api.Clean(text) != text {
			t.Errorf("%q contains control characters", text)
		}
		words, _ := shell(t, text)
		for n, word := range words {
			if n > 0 && strings.HasPrefix(words[n-1], "--") && !slices.Contains([]string{"--globoff", "--path-as-is", "--head", "--http2-prior-knowledge"}, words[n-1]) {
				if words[n-1] == "--header" && strings.HasPrefix(word, "@") {
					t.Errorf("reads a file: %q", word)
				}
				continue // the value of an option
			}
			if last := n == len(words)-1; strings.HasPrefix(word, "http") != last {
				t.Errorf("word %d of %q: want one URL, as the last word", n, words)
			}
		}
	})
}

// harEntry is what the test reads of an entry.
type harEntry struct {
	Time    float64
	Timings struct{ Send, Wait, Receive float64 }
	Request struct {
		URL      string
		Cookies  []harPair
		Query    []harPair `json:"queryString"`
		PostData struct{ Text string }
	}
	Response struct {
		Status   int
		Redirect string `json:"redirectURL"`
		Cookies  []harPair
		Content  struct{ Encoding string }
		Error    string `json:"_error"`
	}
	ServerIP string `json:"serverIPAddress"`
}

type harPair struct{ Name, Value string }

func TestHARHasTheExchange(t *testing.T) {
	var out bytes.Buffer
	h := NewHAR(&out)
	e := sample()
	redacted := sample()
	redacted.Redact([]string{"Cookie", "Set-Cookie"})
	for _, e := range []*api.Exchange{e, redacted, {Error: "the client gave up"}} {
		if err := h.Add(e, ""); err != nil {
			t.Fatal(err)
		}
	}
	if err := h.Close("2 requests were not recorded"); err != nil {
		t.Fatal(err)
	}
	var got struct {
		Log struct {
			Version, Comment string
			Entries          []json.RawMessage
		}
	}
	if err := json.Unmarshal(out.Bytes(), &got); err != nil {
		t.Fatalf("%s: %v", &out, err)
	}
	if got.Log.Version != "1.2" || got.Log.Comment != "2 requests were not recorded" || len(got.Log.Entries) != 3 {
		t.Fatalf("%s", &out)
	}
	var entries [3]harEntry
	for n := range entries {
		if err := json.Unmarshal(got.Log.Entries[n], &entries[n]); err != nil {
			t.Fatal(err)
		}
	}
	first := entries[0]
	if first.Time != 500 || first.Timings != struct{ Send, Wait, Receive float64 }{0, 250, 250} || first.Request.URL != "http://web.default/a%20b?c=d&c=e" ||
		len(first.Request.Query) != 2 || first.Request.Cookies[0] != (harPair{"a", "b"}) || first.Request.PostData.Text != "it's\n\"$HOME\"" ||
		first.Response.Redirect != "/next" || first.Response.Content.Encoding != "base64" || first.Response.Cookies[0] != (harPair{"s", "1"}) ||
		first.ServerIP != "10.244.1.7" {
		t.Errorf("%+v", first)
	}
	for _, secret := range []string{"a=b", "s=1"} {
		if text := string(got.Log.Entries[1]); strings.Contains(text, secret) {
			t.Errorf("shows %s: %s", secret, text)
		}
	}
	if last := entries[2]; last.Response.Status != 0 || last.Response.Error != "the client gave up" {
		t.Errorf("%+v", last)
	}
}

func TestEmptyHAR(t *testing.T) {
	var out bytes.Buffer
	if err := NewHAR(&out).Close(""); err != nil || !json.Valid(out.Bytes()) {
		t.Errorf("%s: %v", &out, err)
	}
}
