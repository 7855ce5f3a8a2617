//go:build linux

package daemon

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	"net/http"
	"os"
	"strings"
	"testing"

	"kubevpn/internal/api"
)

// page asks the daemon for its page.
func (r *rig) page(req api.PageRequest) (p api.Page) {
	r.t.Helper()
	text, err := json.Marshal(req)
	if err != nil {
		r.t.Fatal(err)
	}
	resp, err := r.client.Post("http://daemon"+api.PathPage, "application/json", bytes.NewReader(text))
	if err != nil {
		r.t.Fatal(err)
	}
	defer resp.Body.Close()
	if err := json.NewDecoder(resp.Body).Decode(&p); err != nil || resp.StatusCode != http.StatusOK {
		r.t.Fatal(resp.Status, err)
	}
	return p
}

// fetchPage sends what the page sends.
func fetchPage(t *testing.T, p api.Page, method, path string, body any) (*http.Response, error) {
	t.Helper()
	text, err := json.Marshal(body)
	if err != nil {
		t.Fatal(err)
	}
	address, token, _ := strings.Cut(p.URL, "#token=")
	req, err := http.NewRequestWithContext(t.Context(), method, address+"api/"+path, bytes.NewReader(text))
	if err != nil {
		t.Fatal(err)
	}
	req.Header.Set("Authorization", "Bearer "+token)
	return (&http.Transport{DisableKeepAlives: true}).RoundTrip(req)
}

func mustFetch(t *testing.T, p api.Page, method, path string, body any) *http.Response {
	t.Helper()
	resp, err := fetchPage(t, p, method, path, body)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { resp.Body.Close() })
	if resp.StatusCode != http.StatusOK {
		text, _ := io.ReadAll(resp.Body)
		t.Fatalf("%s: %s %s", path, resp.Status, text)
	}
	return resp
}

func TestPageFollowsTheDaemon(t *testing.T) {
	r := start(t)
	p := r.page(api.PageRequest{})
	dec := json.NewDecoder(mustFetch(t, p, http.MethodGet, "updates", nil).Body)
	update := func() (u api.PageUpdate) {
		t.Helper()
		if err := dec.Decode(&u); err != nil {
			t.Fatal(err)
		}
		return u
	}
	if u := update(); len(u.Status.Connections) != 0 || len(u.Log) == 0 || !strings.Contains(u.Log[0], "daemon begins") || u.DNS == nil || u.Flows.Items == nil {
		t.Errorf("first update %+v", u)
	}
	r.connect("a")
	for u := update(); len(u.Status.Connections) != 1 || len(u.Flows.Items) != 1 || u.Flows.Items[0].Name.Name != "kube-dns"; u = update() {
		for _, line := range u.Log {
			if strings.Contains(line, "daemon begins") {
				t.Errorf("sent again: %s", line)
			}
		}
	}
	r.mustPost(api.PathDisconnect, api.DisconnectRequest{All: true})
	for len(update().Status.Connections) != 0 {
	}
}

func TestPageEndsOnRequest(t *testing.T) {
	r := start(t)
	p := r.page(api.PageRequest{})
	if again := r.page(api.PageRequest{}); again != p {
		t.Errorf("a second request gets %+v, want %+v", again, p)
	}
	text, err := os.ReadFile(p.File)
	if info, statErr := os.Stat(p.File); err != nil || statErr != nil || info.Mode() != 0o600 || !strings.Contains(string(text), p.URL) {
		t.Errorf("%s: %s, %v, %v", p.File, text, err, statErr)
	}
	updates := mustFetch(t, p, http.MethodGet, "updates", nil)
	if got := r.page(api.PageRequest{Stop: true}); got != (api.Page{}) {
		t.Errorf("after the end: %+v", got)
	}
	_, _ = io.Copy(io.Discard, updates.Body) // ends, perhaps with an error
	if resp, err := fetchPage(t, p, http.MethodGet, "updates", nil); err == nil {
		resp.Body.Close()
		t.Error("the page still answers")
	}
	if _, err := os.Stat(p.File); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("%s: %v", p.File, err)
	}
	if r.page(api.PageRequest{}).URL == p.URL {
		t.Error("a new page has the same token")
	}
}

func TestPageReachesNothingElse(t *testing.T) {
	r := start(t)
	p := r.page(api.PageRequest{})
	for _, path := range []string{api.PathQuit, api.PathDisconnect, api.PathConnect, api.PathLeave, api.PathPage, "/quit"} {
		for _, prefix := range []string{"", "../"} {
			resp, err := fetchPage(t, p, http.MethodPost, prefix+strings.TrimPrefix(path, "/"), map[string]any{"all": true})
			if err != nil {
				t.Fatal(err)
			}
			resp.Body.Close()
			if resp.StatusCode == http.StatusOK {
				t.Errorf("%s%s: %s", prefix, path, resp.Status)
			}
		}
	}
}

func TestPageShowsAndSavesRequests(t *testing.T) {
	r := start(t)
	r.connect("a")
	r.intercept(interceptRequest("a", "deployment/web"))
	p := r.page(api.PageRequest{Redact: []string{"X-Secret"}})
	var record api.Record
	if err := json.NewDecoder(mustFetch(t, p, http.MethodPost, "requests", api.RequestsRequest{Workload: "deployment/web", Follow: true}).Body).Decode(&record); err != nil || record.Exchange == nil {
		t.Fatalf("%+v, %v", record, err)
	}
	e := *record.Exchange
	e.Request = api.ExchangeRequest{Method: "GET", Scheme: "http", Host: "web", Path: "/a", Proto: "HTTP/1.1"}
	var curl string
	if err := json.NewDecoder(mustFetch(t, p, http.MethodPost, "curl", e).Body).Decode(&curl); err != nil || !strings.HasPrefix(curl, "curl ") {
		t.Errorf("%q, %v", curl, err)
	}
	har, err := io.ReadAll(mustFetch(t, p, http.MethodPost, "har", []api.Exchange{e, e}).Body)
	if err != nil || !json.Valid(har) || strings.Count(string(har), "http://web/a") != 2 {
		t.Errorf("%s, %v", har, err)
	}
}

func TestPageRunsTheChecks(t *testing.T) {
	r := start(t)
	p := r.page(api.PageRequest{KubeconfigError: api.Errorf(api.ExitKubeconfig, "no kubeconfig")})
	var d api.Diagnosis
	if err := json.NewDecoder(mustFetch(t, p, http.MethodPost, "doctor", struct{}{}).Body).Decode(&d); err != nil {
		t.Fatal(err)
	}
	if f := d.Failed(); f == nil || !strings.Contains(fmt.Sprint(d.Findings), "no kubeconfig") {
		t.Errorf("%+v", d)
	}
}

func TestRecentLogIsBounded(t *testing.T) {
	var l recentLog
	logger := slog.New(slog.NewTextHandler(&l, nil))
	for n := range 3 * maxLogLines / 2 {
		logger.Info(strings.Repeat("x", maxLogLine), "n", n)
		logger.Info("line", "n", n)
	}
	lines, next := l.since(0)
	if len(lines) != maxLogLines || next != 3*maxLogLines || !strings.HasSuffix(lines[maxLogLines-1], fmt.Sprint(3*maxLogLines/2-1)) {
		t.Errorf("%d lines, next %d, the last %q", len(lines), next, lines[len(lines)-1])
	}
	for _, line := range lines {
		if len(line) > maxLogLine {
			t.Errorf("a line of %d bytes", len(line))
		}
	}
	logger.Info("new")
	if lines, _ := l.since(next); len(lines) != 1 || !strings.Contains(lines[0], "new") {
		t.Errorf("since %d: %q", next, lines)
	}
}
