//go:build linux

// Package page_test checks the page of `kubevpn ui` in Chromium, with states that a fake daemon invents. The suite page
// of test/e2e checks it with a real one.
package page_test

import (
	"context"
	"encoding/json"
	"flag"
	"fmt"
	"log/slog"
	"math"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/chromedp/cdproto/cdp"
	"github.com/chromedp/chromedp"
	"github.com/chromedp/chromedp/kb"

	"kubevpn/internal/api"
	"kubevpn/internal/laptop/page"
	"kubevpn/test/browser"
)

// With -update, TestScreenshots writes: go test -C test -run Screenshots ./page -args -update
var update = flag.Bool("update", false, "write the screenshots of docs/how-to/images")

// fake is a daemon. Tests change its state under mu.
type fake struct {
	*page.Server
	mu      sync.Mutex
	update  api.PageUpdate
	hostile bool          // a path of a request has markup
	changed chan struct{} // closed by change
}

func newFake(t *testing.T) *fake {
	t.Helper()
	f := &fake{update: empty(), changed: make(chan struct{})}
	mux := http.NewServeMux()
	mux.HandleFunc("GET /updates", f.updates)
	mux.HandleFunc("POST /requests", f.requests)
	mux.HandleFunc("POST /curl", func(w http.ResponseWriter, r *http.Request) {
		var e api.Exchange
		if json.NewDecoder(r.Body).Decode(&e) == nil {
			_ = json.NewEncoder(w).Encode("curl http://web.default" + e.Request.Path)
		}
	})
	mux.HandleFunc("POST /har", func(w http.ResponseWriter, _ *http.Request) { _, _ = w.Write([]byte("{}")) })
	mux.HandleFunc("POST /doctor", func(w http.ResponseWriter, _ *http.Request) { _ = json.NewEncoder(w).Encode(diagnosis()) })
	var err error
	f.Server, err = page.Listen(mux, slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(f.Close)
	return f
}

// change changes the state and sends it to the pages. It sends events since the previous line once.
func (f *fake) change(do func(*api.PageUpdate)) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.update.DNS, f.update.Log = []api.DNSQuery{}, []string{}
	do(&f.update)
	f.update.Flows.Time = f.update.Flows.Time.Add(time.Second)
	close(f.changed)
	f.changed = make(chan struct{})
}

func (f *fake) updates(w http.ResponseWriter, r *http.Request) {
	for {
		f.mu.Lock()
		line, err := json.Marshal(f.update)
		changed := f.changed
		f.mu.Unlock()
		if err != nil {
			panic(err)
		}
		_, _ = w.Write(append(line, '\n'))
		w.(http.Flusher).Flush()
		select {
		case <-changed:
		case <-r.Context().Done():
			return
		}
	}
}

// requests answers one exchange, and waits if the page follows.
func (f *fake) requests(w http.ResponseWriter, r *http.Request) {
	var req api.RequestsRequest
	if err := json.NewDecoder(r.Body).Decode(&req); err != nil {
		panic(err)
	}
	enc := json.NewEncoder(w)
	if !req.Follow {
		w.WriteHeader(http.StatusInternalServerError)
		_ = enc.Encode(api.Errorf(api.ExitUsage, "nothing is kept"))
		return
	}
	_ = enc.Encode(api.Record{Pods: 2})
	for n := range 3 {
		e := exchange(n)
		if f.hostile && n == 1 {
			e.Request.Path += hostile
		}
		_ = enc.Encode(api.Record{Exchange: &e})
	}
	w.(http.Flusher).Flush()
	<-r.Context().Done()
}

// tab is a tab of a browser with the page.
type tab struct{ *browser.Tab }

// open opens a page of f.
func open(t *testing.T, f *fake) tab {
	t.Helper()
	return tab{browser.Start(t, f.URL())}
}

func (b tab) size(width, height int64) {
	b.Run(chromedp.EmulateViewport(width, height, chromedp.EmulateScale(1)))
}

// views are the fragments of the views, with a text that each shows for state.
var views = map[string][]string{
	"connections": {"kind-shop", "port-forward", "10.96.0.1", "Round trip", "connected"},
	"flows":       {"curl (4711)", "service shop/web", "program does not read"},
	"names":       {"web.shop.svc.cluster.local", "A 10.96.101.1"},
	"intercepts":  {"shop/deployment/web", "x-user=ann", "the pod is not ready", "/home/ann/cart", "synced"},
	"checks":      {"Run the checks", "kubevpn doctor"},
	"log":         {"daemon begins"},
}

func TestPageShowsTheState(t *testing.T) {
	f := newFake(t)
	b := open(t, f)
	b.Shows("not connected", "kubevpn connect")
	if hash := browser.Eval[string](b.Tab, "location.href"); strings.Contains(hash, "token") {
		t.Errorf("the token is in the address bar: %s", hash)
	}
	f.change(state)
	for name, texts := range views {
		b.View(name)
		b.Shows(texts...)
	}
	b.Run(chromedp.Reload())
	b.View("connections") // the tab remembers the token
	b.Shows(views["connections"]...)
	f.change(func(u *api.PageUpdate) { u.Status.Connections = []api.Connection{} })
	b.Shows("not connected", "kubevpn connect")
	f.Close()
	b.Shows("Run `kubevpn ui`")
}

func TestPageWithoutTheTokenShowsNothing(t *testing.T) {
	f := newFake(t)
	f.change(state)
	address, _, _ := strings.Cut(f.URL(), "#")
	for _, url := range []string{address, address + "#token=wrong"} {
		b := tab{browser.Start(t, url)}
		b.Shows("kubevpn ui")
		if text := browser.Eval[string](b.Tab, "document.body.innerText"); strings.Contains(text, "kind-shop") {
			t.Errorf("%s shows %s", url, text)
		}
	}
}

// hostile is text that a pod or a client may choose as a name, a path or a header.
const hostile = `<img src=x onerror="document.title='owned'"><script>document.title='owned'</script>`

func TestTextOfTheClusterIsNoMarkup(t *testing.T) {
	f := newFake(t)
	b := open(t, f)
	f.change(func(u *api.PageUpdate) {
		state(u)
		c := &u.Status.Connections[0]
		c.Cluster, c.ManagerPod, c.Warnings, c.Context = hostile, hostile, []string{hostile}, "a\u202eb\x1b[2J"
		u.Flows.Items[0].Program, u.Flows.Items[0].Name.Name = hostile, hostile
		u.DNS[0].Name, u.DNS[0].Answers = hostile, []string{hostile}
		u.Log = append(u.Log, hostile)
		u.Status.Intercepts[0].Workload, u.Status.Intercepts[0].Pods[0].Name = hostile, hostile
	})
	for name := range views {
		b.View(name)
		if name == "checks" {
			continue // TestChecksAreShown
		}
		b.Shows("<img src=x")
		if found := browser.Eval[int](b.Tab, "document.querySelectorAll('img, main script').length"); found != 0 || browser.Eval[string](b.Tab, "document.title") == "owned" {
			t.Errorf("%s: the text of the cluster became %d elements", name, found)
		}
	}
	b.View("connections")
	b.Shows("ab[2J")
}

func TestPageFitsANarrowScreen(t *testing.T) {
	f := newFake(t)
	b := open(t, f)
	b.size(400, 800)
	for _, change := range []func(*api.PageUpdate){func(*api.PageUpdate) {}, state} {
		f.change(change)
		for name := range views {
			b.View(name)
			if width := browser.Eval[int](b.Tab, "document.documentElement.scrollWidth"); width > 400 {
				t.Errorf("%s is %d pixels wide: %s", name, width, browser.Eval[string](b.Tab,
					"[...document.querySelectorAll('body *')].filter(e => e.getBoundingClientRect().right > 401 && !e.closest('.scroll')).map(e => e.tagName + '.' + e.className).join()"))
			}
		}
	}
}

func TestPageWorksByKeyboard(t *testing.T) {
	f := newFake(t)
	b := open(t, f)
	f.change(state)
	b.Shows("kind-shop")
	focus := `(e => (e.id || e.hash || e.tagName) + " " + (getComputedStyle(e).outlineStyle !== "none"))(document.activeElement)`
	var walked []string
	for range 8 {
		b.Run(chromedp.KeyEvent(kb.Tab))
		walked = append(walked, browser.Eval[string](b.Tab, focus))
	}
	want := "#main true,pause true,#connections true,#flows true,#names true,#intercepts true,#checks true,#log true"
	if got := strings.Join(walked, ","); got != want {
		t.Errorf("Tab walks\n%s, want\n%s", got, want)
	}
	b.Run(chromedp.KeyEvent(kb.Enter))
	b.Shows("daemon begins")
	if got := browser.Eval[string](b.Tab, "document.activeElement.id"); got != "log-title" {
		t.Errorf("the focus is at %q after Enter", got)
	}
}

// TestPageTellsScreenReaders reads the accessibility tree, which screen readers get.
func TestPageTellsScreenReaders(t *testing.T) {
	f := newFake(t)
	b := open(t, f)
	f.change(state)
	for name, texts := range views {
		b.View(name)
		b.Shows(texts...)
		found := map[string]int{}
		for _, n := range b.tree() {
			if n.Ignored {
				continue
			}
			role, label := fmt.Sprint(n.Role.Value), fmt.Sprint(n.Name.Value)
			found[role]++
			switch role {
			case "button", "link", "table", "searchbox", "textbox", "checkbox", "image", "region", "navigation", "columnheader", "heading":
				if label == "" {
					t.Errorf("%s: a %s without a name", name, role)
				}
			}
		}
		for _, role := range []string{"main", "navigation", "banner", "contentinfo", "heading", "status"} {
			if found[role] == 0 {
				t.Errorf("%s: nothing has the role %s: %v", name, role, found)
			}
		}
		if name != "log" && name != "checks" && (found["table"] == 0 || found["columnheader"] == 0 || found["rowheader"] == 0) {
			t.Errorf("%s: no table with headers: %v", name, found)
		}
	}
	b.View("connections")
	f.change(func(u *api.PageUpdate) { u.Status.Connections[0].Status = api.StatusReconnecting })
	b.Until(`document.querySelector("[aria-live=polite]").textContent.includes("reconnecting")`)
	if got := browser.Eval[string](b.Tab, `document.querySelector("svg[role=img]").getAttribute("aria-label")`); !strings.Contains(got, "at most") {
		t.Errorf("the plot is described as %q", got)
	}
}

// node is a node of the accessibility tree, with the fields that the test reads. The type of cdproto rejects reasons
// that a newer Chromium has.
type node struct {
	Ignored bool  `json:"ignored"`
	Role    value `json:"role"`
	Name    value `json:"name"`
}

type value struct {
	Value any `json:"value"`
}

// tree returns the accessibility tree.
func (b tab) tree() []node {
	var out struct {
		Nodes []node `json:"nodes"`
	}
	b.Run(chromedp.ActionFunc(func(ctx context.Context) error {
		return cdp.Execute(ctx, "Accessibility.getFullAXTree", nil, &out)
	}))
	return out.Nodes
}

func TestRequestsAreRecordedOnDemand(t *testing.T) {
	f := newFake(t)
	f.hostile = true
	b := open(t, f)
	f.change(state)
	b.View("intercepts")
	b.Shows("No request is shown", "kubevpn proxy --record 500")
	b.Click("Record requests")
	b.Shows("Recording in 2 pods", "GET /cart", "GET /price", "GET /checkout", "500")
	const filter = "#intercepts .card:first-child input[type=search]"
	b.Run(chromedp.SendKeys(filter, "checkout", chromedp.ByQuery))
	b.Gone("GET /cart")
	b.Run(chromedp.Evaluate("document.querySelector('"+filter+"').value = ''", nil), chromedp.SendKeys(filter, "price", chromedp.ByQuery))
	b.Shows("GET /price?sku=4711" + hostile)
	b.Click("GET /price")
	b.Shows("X-User: ann", "Cookie: [redacted]", "The same with cURL", "curl http://web.default/price")
	if found := browser.Eval[int](b.Tab, "document.querySelectorAll('img, main script').length"); found != 0 {
		t.Errorf("the path became %d elements", found)
	}
	b.Run(chromedp.Evaluate(`Object.defineProperty(navigator, "clipboard", {value: {writeText: async (s) => { window.copied = s; }}})`, nil))
	b.Click("Copy as cURL")
	b.Shows("Copied")
	if got := browser.Eval[string](b.Tab, "window.copied"); !strings.HasPrefix(got, "curl http://web.default/price") {
		t.Errorf("copied %q", got)
	}
	b.Click("Save as HAR")
	b.Shows("Saved")
	b.Click("Close")
	if got := browser.Eval[string](b.Tab, "document.activeElement.textContent"); !strings.HasPrefix(got, "GET /price") {
		t.Errorf("the focus is at %q after the detail was closed", got)
	}
	b.Click("Stop recording")
	b.Shows("Recording ended")
}

func TestChecksAreShown(t *testing.T) {
	b := open(t, newFake(t))
	b.View("checks")
	b.Click("Run the checks")
	b.Shows("1 failed, 1 warnings, 2 ok, 1 skipped", "/dev/net/tun does not exist", "sudo modprobe tun", "patch pods/ephemeralcontainers")
}

// TestScreenshots writes the screenshots of docs/how-to/images with -update.
func TestScreenshots(t *testing.T) {
	f := newFake(t)
	b := open(t, f)
	f.change(state)
	for n := range 120 { // two minutes of traffic
		f.change(func(u *api.PageUpdate) {
			wave := 1 + math.Sin(float64(n)/9)
			c := &u.Status.Connections[0]
			c.Transports[0].Received += uint64(1.2e6 * wave)
			c.Transports[0].Sent += uint64(2.4e5 * (2 - wave))
			c.Seconds = 0.0118 + 0.0007*math.Sin(float64(n)/3)
		})
		b.Until(fmt.Sprintf("(document.querySelector('svg .line')?.getAttribute('d') ?? '').split('L').length >= %d", n))
	}
	for _, shot := range []struct {
		file, scheme, view string
		width, height      int64
	}{
		{"page-connections", "light", "connections", 1000, 1000},
		{"page-intercepts", "dark", "intercepts", 1000, 1000},
		{"page-narrow", "dark", "flows", 400, 700},
	} {
		b.size(shot.width, shot.height)
		b.scheme(shot.scheme)
		b.View(shot.view)
		if shot.view == "intercepts" {
			b.Click("Record requests")
			b.Shows("GET /checkout")
		}
		var png []byte
		b.Run(chromedp.CaptureScreenshot(&png))
		if len(png) < 1000 {
			t.Errorf("%s has %d bytes", shot.file, len(png))
		}
		if *update {
			if err := os.WriteFile(filepath.Join("../../docs/how-to/images", shot.file+".png"), png, 0o644); err != nil {
				t.Fatal(err)
			}
		}
	}
}
