package trip

import (
	"bytes"
	"encoding/json"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"strings"
	"testing"
)

func TestErrandCrossesToAPodAndBack(t *testing.T) {
	s := httptest.NewServer(http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) {
		if r.Header.Get("X-User") != "me" || r.URL.RawQuery != "b=c" {
			t.Errorf("got %v %v", r.URL, r.Header)
		}
	}))
	defer s.Close()
	at, err := netip.ParseAddrPort(s.Listener.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	req, err := http.NewRequest(http.MethodGet, "http://"+at.String()+"/a?b=c", http.NoBody)
	if err != nil {
		t.Fatal(err)
	}
	req.Header.Set("X-User", "me")
	Mark(req)
	e := NewErrand(req)
	e.Dial = []netip.AddrPort{at}
	in, err := json.Marshal(e)
	if err != nil {
		t.Fatal(err)
	}
	var out bytes.Buffer
	if err := serve(t.Context(), bytes.NewReader(in), &out); err != nil {
		t.Fatal(err)
	}
	r, err := ReadReport(&out)
	if err != nil || r.Result.Status != http.StatusOK || !r.Dials[at].Done || r.Result.TakenAt.IsValid() {
		t.Errorf("%+v, %v", r, err)
	}
}

func TestReportIsBounded(t *testing.T) {
	many := strings.Repeat(`"10.0.0.1:1": {}, `, maxDials)
	for name, text := range map[string]string{
		"nothing":           "",
		"no JSON":           "exec failed",
		"another type":      `{"result": {"to": {"a": 1}}}`,
		"one without end":   `{"result": {"body": "` + strings.Repeat("x", maxReport) + `"}}`,
		"a list of strings": `[` + many + `]`,
	} {
		if _, err := ReadReport(strings.NewReader(text)); err == nil {
			t.Errorf("%s is a report", name)
		}
	}
}
