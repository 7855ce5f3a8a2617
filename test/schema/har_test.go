package schema_test

import (
	"bytes"
	"net/http"
	"net/netip"
	"os"
	"path/filepath"
	"testing"
	"time"

	validator "github.com/santhosh-tekuri/jsonschema/v6"

	"kubevpn/internal/api"
	"kubevpn/internal/inspect/exchanges"
)

// harSchema returns the schema of an HTTP Archive.
func harSchema(t *testing.T) *validator.Schema {
	t.Helper()
	files, err := filepath.Glob("testdata/har/*.json")
	if err != nil || len(files) == 0 {
		t.Fatal(files, err)
	}
	c := validator.NewCompiler()
	c.AssertFormat()
	for _, file := range files {
		data, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		if err := c.AddResource("http://har/"+filepath.Base(file), decode(t, data)); err != nil {
			t.Fatal(err)
		}
	}
	s, err := c.Compile("http://har/har.json")
	if err != nil {
		t.Fatal(err)
	}
	return s
}

func archive(t *testing.T, all ...*api.Exchange) any {
	t.Helper()
	var out bytes.Buffer
	h := exchanges.NewHAR(&out)
	for _, e := range all {
		if err := h.Add(e, e.Match); err != nil {
			t.Fatal(err)
		}
	}
	if err := h.Close("a comment"); err != nil {
		t.Fatal(err)
	}
	return decode(t, out.Bytes())
}

func TestHARCompliesWithItsSchema(t *testing.T) {
	s := harSchema(t)
	full := &api.Exchange{
		Began: time.Date(2026, 1, 2, 3, 4, 5, 678, time.FixedZone("", 3600)), Wait: 0.1, Seconds: 0.2, Namespace: "shop", Workload: "deployment/web",
		Pod: "web-1", Match: "x-user=me", To: api.ToLaptop, Mirrored: true, Redacted: []string{"Cookie"},
		Client: netip.MustParseAddrPort("10.244.1.1:1"), Server: netip.MustParseAddrPort("[fd00::7]:8080"),
		Request: api.ExchangeRequest{Method: "POST", Scheme: "https", Host: "web.shop:8443", Path: "/a?b=c", Proto: "HTTP/2.0",
			Headers: http.Header{"Cookie": {"a=b; c=d"}, "Content-Type": {"text/plain"}}, Body: api.ExchangeBody{Size: 5, Data: []byte("hello")}},
		Response: &api.ExchangeResponse{Status: 200, Headers: http.Header{"Set-Cookie": {"a=b; Expires=Wed, 21 Oct 2026 07:28:00 GMT"}, "Location": {"/x"}},
			Trailers: http.Header{"Grpc-Status": {"0"}}, Body: api.ExchangeBody{Size: 2, Data: []byte("\xff\xfe")}},
	}
	strange := &api.Exchange{Request: api.ExchangeRequest{Method: "\xff", Host: "[::1%25lo]:x", Path: "%zz \x00?%&=\x7f=é", Headers: http.Header{"": nil}}}
	absolute := &api.Exchange{Server: netip.MustParseAddrPort("10.0.0.1:80"), Request: api.ExchangeRequest{Host: "a b", Path: "http://x/y"}}
	for _, all := range [][]*api.Exchange{{}, {full}, {{}}, {strange, absolute, full}} {
		if err := s.Validate(archive(t, all...)); err != nil {
			t.Errorf("%d exchanges: %v", len(all), err)
		}
	}
	const bad = `{"log":{"version":"1.2","creator":{"name":"kubevpn","version":"1"},"entries":[{}]}}`
	if s.Validate(decode(t, []byte(bad))) == nil {
		t.Error("the schema accepts an empty entry")
	}
}
