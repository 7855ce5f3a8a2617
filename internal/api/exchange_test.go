package api

import (
	"encoding/json"
	"fmt"
	"net/http"
	"slices"
	"strings"
	"testing"
)

// recorded returns an exchange with "S3CRET" wherever credentials are, and "shown" elsewhere.
func recorded() *Exchange {
	h := http.Header{
		"Accept": {"shown"}, "X-User": {"shown"}, "Traceparent": {"00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"},
		"Referer": {"https://x.example/shown?access_token=S3CRET"}, "X-Custom": {"Bearer S3CRET"}, "My-Pin": {"1234"},
	}
	for _, name := range []string{
		"Authorization", "Cookie", "Proxy-Authorization", "X-Api-Key", "X-Auth-Token", "X-Amz-Security-Token", "X-Vault-Token",
		"X-Forwarded-Access-Token", "X-Auth-Request-Access-Token", "X-Goog-Iap-Jwt-Assertion", "Api-Key", "Private-Token", "Dpop",
		"X-Csrf-Token", "X-Forwarded-Client-Cert", "Sec-Websocket-Protocol", "Session-Id-Bin",
	} {
		h[name] = []string{"S3CRET", "S3CRET two"}
	}
	return &Exchange{
		Request: ExchangeRequest{Method: "POST", Path: "/shown/7?X-Amz-Signature=S3CRET&sig=S3CRET&access_token=S3CRET&x=shown", Headers: h,
			Body: ExchangeBody{Size: 60, Data: []byte(`{"user":"shown","password":"S3CRET","n":1}`)}},
		Response: &ExchangeResponse{
			Headers: http.Header{"Set-Cookie": {"a=S3CRET"}, "Location": {"https://ann:S3CRET@shown.example/"}}, Trailers: http.Header{"X-Token": {"S3CRET"}},
			Body: ExchangeBody{Data: []byte("client_secret=S3CRET&user=shown")}},
	}
}

func text(e *Exchange) string {
	return fmt.Sprint(e.Request, *e.Response, string(e.Request.Body.Data), string(e.Response.Body.Data))
}

func TestRedactHidesCredentialsByDefault(t *testing.T) {
	for _, names := range [][]string{nil, {"My-Pin"}, {"x-api-key"}} {
		e := *recorded()
		shared := text(recorded())
		original := e
		e.Redact(names)
		got := text(&e)
		if strings.Contains(got, "S3CRET") || strings.Count(got, "shown") < 6 {
			t.Errorf("%v: %s", names, got)
		}
		if text(&original) != shared {
			t.Error("the recorded exchange changed")
		}
		if hidden := slices.Contains(e.Redacted, "My-Pin"); hidden != slices.Equal(names, []string{"My-Pin"}) {
			t.Errorf("%v: redacted %v", names, e.Redacted)
		}
		if !slices.Contains(e.Redacted, "path") || !slices.Contains(e.Redacted, "request body") || slices.Contains(e.Redacted, "Traceparent") {
			t.Errorf("redacted %v", e.Redacted)
		}
		if lost := e.Request.Body.Size - int64(len(e.Request.Body.Data)); lost != original.Request.Body.Size-int64(len(original.Request.Body.Data)) {
			t.Errorf("%d bytes seem not to be recorded", lost)
		}
		if !json.Valid(e.Request.Body.Data) {
			t.Errorf("the body is not JSON any more: %s", e.Request.Body.Data)
		}
	}
}

func TestOnlyNoneShowsCredentials(t *testing.T) {
	e := *recorded()
	e.Redact([]string{"X-Api-Key", ShowAll})
	if got, want := text(&e), text(recorded()); got != want || len(e.Redacted) > 0 {
		t.Errorf("got %s, redacted %v", got, e.Redacted)
	}
}

func TestRedactSearchesBodiesThatAreNotUTF8(t *testing.T) {
	for _, rest := range []string{" K\xc3", " K\xf6ln"} { // a limit cut it within a character; ISO 8859-1
		e := *recorded()
		e.Request.Body.Data = []byte("client_secret=S3CRET" + rest)
		e.Redact(nil)
		if got, want := string(e.Request.Body.Data), "client_secret=[redacted]"+rest; got != want {
			t.Errorf("got %q, want %q", got, want)
		}
	}
}
