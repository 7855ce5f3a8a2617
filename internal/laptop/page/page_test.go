package page

import (
	"io"
	"log/slog"
	"net/http"
	"net/url"
	"path/filepath"
	"strings"
	"testing"

	"go.uber.org/goleak"

	"kubevpn/internal/testenv"
)

func TestMain(m *testing.M) {
	// net/http waits half a second after it has rejected a header, although the conn is closed.
	goleak.VerifyTestMain(m, goleak.IgnoreAnyFunction("net/http.(*conn).closeWriteAndWait"))
}

// secret is what only the page of this user may read.
const secret = "shop.example"

func listen(t *testing.T) *Server {
	t.Helper()
	s, err := Listen(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		_, _ = io.WriteString(w, secret+" "+r.URL.Path)
	}), slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(s.Close)
	return s
}

// ask sends a request as a page with the token does, and as change leaves it.
func ask(t *testing.T, s *Server, method, path string, change func(*http.Request)) (int, string, http.Header) {
	t.Helper()
	r, err := http.NewRequestWithContext(t.Context(), method, "http://"+s.address+path, http.NoBody)
	if err != nil {
		t.Fatal(err)
	}
	r.Header.Set("Authorization", "Bearer "+s.token)
	r.Header.Set("Sec-Fetch-Site", "same-origin")
	change(r)
	transport := &http.Transport{DisableKeepAlives: true}
	resp, err := transport.RoundTrip(r)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	body, err := io.ReadAll(resp.Body)
	if err != nil {
		t.Fatal(err)
	}
	return resp.StatusCode, string(body), resp.Header
}

func set(name, value string) func(*http.Request) {
	return func(r *http.Request) { r.Header.Set(name, value) }
}

func TestOnlyThePageReachesTheDaemon(t *testing.T) {
	s := listen(t)
	_, port, _ := strings.Cut(s.address, ":")
	host := func(name string) func(*http.Request) { return func(r *http.Request) { r.Host = name } }
	for name, test := range map[string]struct {
		change func(*http.Request)
		want   int
	}{
		"the page":                       {func(*http.Request) {}, http.StatusOK},
		"the page, with its origin":      {set("Origin", "http://"+s.address), http.StatusOK},
		"another user without the token": {func(r *http.Request) { r.Header.Del("Authorization") }, http.StatusUnauthorized},
		"no browser, no token": {func(r *http.Request) {
			r.Header = http.Header{}
		}, http.StatusUnauthorized},
		"a wrong token":                   {set("Authorization", "Bearer "+strings.Repeat("A", len(s.token))), http.StatusUnauthorized},
		"a part of the token":             {set("Authorization", "Bearer "+s.token[:10]), http.StatusUnauthorized},
		"an empty token":                  {set("Authorization", "Bearer "), http.StatusUnauthorized},
		"the token as a password":         {set("Authorization", "Basic "+s.token), http.StatusUnauthorized},
		"another site":                    {set("Origin", "https://evil.example"), http.StatusForbidden},
		"a document without an origin":    {set("Origin", "null"), http.StatusForbidden},
		"another port of this machine":    {set("Origin", "http://127.0.0.1:1"), http.StatusForbidden},
		"https at the same address":       {set("Origin", "https://"+s.address), http.StatusForbidden},
		"a cross-site request":            {set("Sec-Fetch-Site", "cross-site"), http.StatusForbidden},
		"another port, by Sec-Fetch-Site": {set("Sec-Fetch-Site", "same-site"), http.StatusForbidden},
		"the address bar":                 {set("Sec-Fetch-Site", "none"), http.StatusForbidden},
		"a second origin":                 {func(r *http.Request) { r.Header["Origin"] = []string{"http://" + s.address, "http://evil.example"} }, http.StatusForbidden},
		"DNS rebinding":                   {host("evil.example:" + port), http.StatusMisdirectedRequest},
		"DNS rebinding, with its origin": {func(r *http.Request) {
			r.Host = "evil.example:" + port
			r.Header.Set("Origin", "http://"+r.Host)
		}, http.StatusMisdirectedRequest},
		"a host without the port": {host("127.0.0.1"), http.StatusMisdirectedRequest},
		"localhost":               {host("localhost:" + port), http.StatusMisdirectedRequest},
	} {
		t.Run(name, func(t *testing.T) {
			for _, method := range []string{http.MethodGet, http.MethodPost} {
				status, body, header := ask(t, s, method, "/api/updates", test.change)
				if status != test.want || strings.Contains(body, secret) != (test.want == http.StatusOK) {
					t.Errorf("%s: %d %s, want %d", method, status, body, test.want)
				}
				if header.Get("Access-Control-Allow-Origin") != "" || header.Get("Set-Cookie") != "" {
					t.Errorf("%v", header)
				}
			}
		})
	}
}

// A link from another site may open the page, which contains nothing of the user, but nothing may embed it.
func TestAnotherSiteOnlyOpensThePage(t *testing.T) {
	s := listen(t)
	fetch := func(mode, dest string) func(*http.Request) {
		return func(r *http.Request) {
			r.Header = http.Header{"Sec-Fetch-Site": {"cross-site"}, "Sec-Fetch-Mode": {mode}, "Sec-Fetch-Dest": {dest}}
		}
	}
	for _, test := range []struct {
		method, path, mode, dest string
		want                     int
	}{
		{http.MethodGet, "/", "navigate", "document", http.StatusOK},
		{http.MethodGet, "/", "navigate", "iframe", http.StatusForbidden},
		{http.MethodGet, "/", "no-cors", "script", http.StatusForbidden},
		{http.MethodGet, "/main.js", "no-cors", "script", http.StatusForbidden},
		{http.MethodGet, "/api/updates", "navigate", "document", http.StatusForbidden},
		{http.MethodPost, "/", "navigate", "document", http.StatusForbidden},
	} {
		status, body, _ := ask(t, s, test.method, test.path, fetch(test.mode, test.dest))
		if status != test.want || strings.Contains(body, s.token) {
			t.Errorf("%v: %d %s", test, status, body)
		}
	}
}

func TestPageServesItsAssetsAndNothingElse(t *testing.T) {
	s := listen(t)
	page, err := url.Parse(s.URL())
	if err != nil || page.Host != s.address || !strings.HasPrefix(s.address, "127.0.0.1:") || page.RawQuery != "" ||
		page.Fragment != "token="+s.token || len(s.token) != 43 {
		t.Errorf("%s, %v", s.URL(), err)
	}
	names, err := filepath.Glob("assets/*")
	if err != nil || len(names) < 5 {
		t.Fatal(names, err)
	}
	for _, name := range append(names, "assets/") {
		status, body, header := ask(t, s, http.MethodGet, strings.TrimPrefix(filepath.ToSlash(name), "assets"), func(r *http.Request) { r.Header = http.Header{} })
		if status != http.StatusOK || body == "" || !strings.Contains(header.Get("Content-Type"), "/") {
			t.Errorf("%s: %d %v", name, status, header)
		}
		for name, want := range headers {
			if got := header.Get(name); got != want {
				t.Errorf("%s is %q, want %q", name, got, want)
			}
		}
		for _, word := range []string{"innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", " style=", "onclick=", "<script>", "//cdn"} {
			if strings.Contains(body, word) {
				t.Errorf("%s contains %s", name, word)
			}
		}
	}
	for path, want := range map[string]int{"/page.go": http.StatusNotFound, "/../page.go": http.StatusNotFound, "/assets": http.StatusNotFound, "/api": http.StatusNotFound} {
		if status, body, _ := ask(t, s, http.MethodGet, path, func(*http.Request) {}); status != want {
			t.Errorf("%s: %d %s", path, status, body)
		}
	}
	if status, _, _ := ask(t, s, http.MethodPost, "/", func(*http.Request) {}); status != http.StatusMethodNotAllowed {
		t.Errorf("POST /: %d", status)
	}
}

func TestEachPageHasItsOwnToken(t *testing.T) {
	a, b := listen(t), listen(t)
	if a.token == b.token {
		t.Fatal(a.token)
	}
	if status, _, _ := ask(t, b, http.MethodGet, "/api/updates", set("Authorization", "Bearer "+a.token)); status != http.StatusUnauthorized {
		t.Errorf("the token of another page: %d", status)
	}
}

// Another user of this machine cannot keep the browser out, nor end its conns.
func TestPageIsBounded(t *testing.T) {
	release := make(chan struct{})
	s, err := Listen(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		w.WriteHeader(http.StatusOK)
		if r.URL.Path == "/events" {
			http.NewResponseController(w).Flush()
			<-release
			_, _ = io.WriteString(w, secret)
		}
	}), slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(s.Close)
	r, err := http.NewRequestWithContext(t.Context(), http.MethodGet, "http://"+s.address+"/api/events", http.NoBody)
	if err != nil {
		t.Fatal(err)
	}
	r.Header.Set("Authorization", "Bearer "+s.token)
	transport := &http.Transport{DisableKeepAlives: true}
	events, err := transport.RoundTrip(r)
	if err != nil {
		t.Fatal(err)
	}
	defer events.Body.Close()
	testenv.Flood(t, s.address, "GET / HTTP/1.1\r\nHost: a\r\n",
		testenv.Get("http://"+s.address+"/api/status", "Authorization", "Bearer "+s.token))
	close(release)
	if got, err := io.ReadAll(events.Body); string(got) != secret || err != nil {
		t.Errorf("the events of the page end with %q, %v", got, err)
	}
}
