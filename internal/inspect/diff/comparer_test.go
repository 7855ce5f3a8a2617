package diff

import (
	"context"
	"fmt"
	"net/http"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"kubevpn/internal/api"
	"kubevpn/internal/testenv"
)

// rig is a Comparer with a fake program.
type rig struct {
	*Comparer
	results *Results
	sent    atomic.Int64
	groups  []api.DiffGroup
}

// newRig returns a Comparer whose program answers with what answer returns.
func newRig(answer func(n int, e *api.Exchange) *api.Exchange, change func(*Config)) *rig {
	r := new(rig)
	r.results = NewResults([]string{"Set-Cookie"}, func(g api.DiffGroup) { r.groups = append(r.groups, g) })
	cfg := Config{Results: r.results, Ignored: new(Ignored), Send: func(_ context.Context, e *api.Exchange) *api.Exchange {
		return answer(int(r.sent.Add(1)), e)
	}}
	if change != nil {
		change(&cfg)
	}
	r.Comparer = New(cfg)
	return r
}

// recorded returns an exchange that the workload answered with this JSON.
func recorded(method, path, body string) *api.Exchange {
	e := answered("application/json", body)
	e.Request.Method, e.Request.Path = method, path
	return e
}

// compareAll offers the exchanges and runs until all that are queued were compared.
func (r *rig) compareAll(t *testing.T, all ...*api.Exchange) api.Diff {
	t.Helper()
	queued := 0
	for _, e := range all {
		if r.unfit(e) == "" {
			queued++
		}
	}
	return r.compareOffered(t, queued, all...)
}

// compareOffered offers the exchanges and runs until so many requests were compared.
func (r *rig) compareOffered(t *testing.T, want int, all ...*api.Exchange) api.Diff {
	t.Helper()
	for _, e := range all {
		r.Offer(e)
	}
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan struct{})
	go func() {
		defer close(done)
		r.Run(ctx)
	}()
	testenv.Eventually(t, time.Minute, func() error {
		if n, _ := r.results.Counts(); n != want {
			return fmt.Errorf("%d requests compared, want %d", n, want)
		}
		return nil
	})
	cancel()
	<-done
	return r.results.Summary()
}

func TestDifferencesAreGroupedByRouteAndPlace(t *testing.T) {
	r := newRig(func(_ int, e *api.Exchange) *api.Exchange {
		return recorded(e.Request.Method, e.Request.Path, `{"total":10.50}`)
	}, nil)
	var all []*api.Exchange
	for n := range 20 {
		all = append(all, recorded("GET", fmt.Sprint("/orders/", n, "?q=1"), `{"total":10.5}`))
	}
	all = append(all, recorded("GET", "/same", `{"total":10.50}`),
		recorded("HEAD", "/carts/3f2504e0-4f89-11d3-9a0c-0305e82c3301/5f0c1bdeadbeef/cafe", ""))
	d := r.compareAll(t, all...)
	if d.Requests != 22 || d.Differ != 20 || len(d.Differences) != 1 || r.sent.Load() != 44 {
		t.Fatalf("%+v, %d sent", d, r.sent.Load())
	}
	g := d.Differences[0]
	if g.Route != "GET /orders/{id}" || g.Where != "body $.total" || g.Requests != 20 || len(g.Examples) != maxExamples ||
		g.Examples[0].From != "10.5" || g.Examples[0].To != "10.50" || !strings.HasPrefix(g.Examples[0].Path, "/orders/") {
		t.Errorf("%+v", g)
	}
	if len(r.groups) != 1 || r.groups[0].Where != g.Where {
		t.Errorf("told of %+v", r.groups)
	}
	if route := Route(all[21]); route != "HEAD /carts/{id}/{id}/cafe" {
		t.Error(route)
	}
}

func TestRequestWithoutAProgramOnItsPortIsNotCompared(t *testing.T) {
	r := newRig(func(n int, e *api.Exchange) *api.Exchange {
		if n == 1 {
			return nil
		}
		return recorded(e.Request.Method, e.Request.Path, "{}")
	}, func(cfg *Config) { cfg.Unsafe = true }) // one after the other
	r.Offer(recorded("GET", "/early", "{}"))
	d := r.compareOffered(t, 1, recorded("GET", "/later", "{}"))
	if d.Requests != 1 || d.Differ != 0 || len(d.NotCompared) != 1 || d.NotCompared[0].Reason != unlistened {
		t.Errorf("%+v", d)
	}
}

func TestOnlySafeRequestsAreSent(t *testing.T) {
	methods := []string{"GET", "HEAD", "OPTIONS", "POST", "PUT", "DELETE", "PATCH", "get", ""}
	var all []*api.Exchange
	for _, m := range methods {
		all = append(all, recorded(m, "/", "{}"))
	}
	var mu sync.Mutex
	var sent []string
	answer := func(_ int, e *api.Exchange) *api.Exchange {
		mu.Lock()
		defer mu.Unlock()
		sent = append(sent, e.Request.Method)
		return recorded(e.Request.Method, "/", "{}")
	}
	d := newRig(answer, nil).compareAll(t, all...)
	for _, m := range sent {
		if !Safe(m) {
			t.Errorf("sent %s", m)
		}
	}
	if d.Requests != 3 || !slices.Contains(d.NotCompared, api.DiffSkipped{Reason: NotSafe, Requests: 6}) {
		t.Errorf("%+v", d)
	}
	sent = nil
	if d := newRig(answer, func(c *Config) { c.Unsafe = true }).compareAll(t, all...); d.Requests != len(methods) || len(d.NotCompared) > 0 {
		t.Errorf("%+v", d)
	}
	if want := []string{"GET", "GET", "HEAD", "HEAD", "OPTIONS", "OPTIONS", "POST", "PUT", "DELETE", "PATCH", "get", ""}; !slices.Equal(sent, want) {
		t.Errorf("unsafe requests are sent once, and in their order: %q", sent)
	}
}

// The comparer ignores places that vary between two answers of the program or of the workload, also in earlier requests.
func TestVaryingPlacesAreIgnored(t *testing.T) {
	body := func(id, day, total int) string {
		return fmt.Sprintf(`{"items":[{"id":%d}],"day":%d,"total":%d}`, id, day, total)
	}
	r := newRig(func(n int, e *api.Exchange) *api.Exchange { return recorded("GET", e.Request.Path, body(n, 3, 7)) }, nil)
	d := r.compareAll(t, recorded("GET", "/price/1", body(-1, 1, 5)), recorded("GET", "/price/2", body(-2, 2, 5)),
		recorded("GET", "/price/1", body(-1, 2, 5)))
	if len(d.Differences) != 1 || d.Differences[0].Where != "body $.total" || d.Differ != 3 {
		t.Errorf("%+v", d.Differences)
	}
	if len(d.Ignored) != 2 || d.Ignored[0].Where != "body $.day" || !strings.Contains(d.Ignored[0].Reason, "workload") || d.Ignored[0].Times != 1 ||
		d.Ignored[1].Where != "body $.items[*].id" || !strings.Contains(d.Ignored[1].Reason, "program") || d.Ignored[1].Route != "GET /price/{id}" {
		t.Errorf("%+v", d.Ignored)
	}

	r = newRig(func(n int, e *api.Exchange) *api.Exchange { return recorded("GET", e.Request.Path, body(n, 3, 7)) },
		func(c *Config) { c.NoDetect = true })
	if d := r.compareAll(t, recorded("GET", "/", body(-1, 1, 5))); r.sent.Load() != 1 || len(d.Differences) != 3 || len(d.Ignored) > 0 {
		t.Errorf("%+v, %d sent", d, r.sent.Load())
	}
}

// A place is ignored with all below it, and lines if their number varies. A status never varies.
func TestVaryingPlaceIsIgnoredWithAllBelowIt(t *testing.T) {
	r := NewResults(nil, nil)
	e := recorded("GET", "/", "")
	r.vary(e, []Difference{{Where: "body $.a"}, {Where: "body lines"}, {Where: "header Etag"}, {Where: "status"}, {Where: "answer"}}, "x")
	for where, want := range map[string]bool{"body $.a": true, "body $.a.b": true, "body $.a[*]": true, "body $.ab": false, "body $": false,
		"body line 7": true, "body lines": true, "body bytes": false, "header Etag": true, "header Etag.x": false, "status": false, "answer": false} {
		if got := r.varies("GET /", where); got != want {
			t.Errorf("%s: %v", where, got)
		}
		if r.varies("GET /other", where) {
			t.Errorf("%s varies on another route", where)
		}
	}
}

// Offer does not block while the program hangs. Exchanges that are dropped are counted.
func TestSlowProgramDropsExchanges(t *testing.T) {
	release := make(chan struct{})
	r := newRig(func(_ int, e *api.Exchange) *api.Exchange {
		<-release
		return recorded("GET", "/", "{}")
	}, nil)
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan struct{})
	go func() {
		defer close(done)
		r.Run(ctx)
	}()
	const offered = 10 * maxQueued
	for range offered {
		r.Offer(recorded("GET", "/", "{}")) // returns, although nothing answers
	}
	if n := r.Dropped(); n < offered-maxQueued-workers {
		t.Errorf("%d dropped", n)
	}
	cancel()
	close(release)
	<-done
	d := r.results.Summary()
	left := 0
	for _, s := range d.NotCompared {
		left += s.Requests
	}
	if d.Requests+left+int(r.Dropped()) != offered {
		t.Errorf("%d of %d are accounted for: %+v", d.Requests+left+int(r.Dropped()), offered, d)
	}
}

func TestRunEndsAfterEnoughRequests(t *testing.T) {
	r := newRig(func(_ int, e *api.Exchange) *api.Exchange { return recorded("GET", "/", "{}") }, func(c *Config) { c.Requests = 5 })
	for range 100 {
		r.Offer(recorded("GET", "/", "{}"))
	}
	r.Run(t.Context())
	if d := r.results.Summary(); d.Requests != 5 || len(d.NotCompared) != 1 || d.NotCompared[0] != (api.DiffSkipped{Reason: late, Requests: 95}) {
		t.Errorf("%+v", d)
	}
}

func TestUnfitExchangesAreCounted(t *testing.T) {
	r := newRig(func(int, *api.Exchange) *api.Exchange { panic("sent") }, nil)
	for _, change := range []func(*api.Exchange){
		func(e *api.Exchange) { e.To = api.ToOther },
		func(e *api.Exchange) { e.Response = nil },
		func(e *api.Exchange) { e.Error = "reset" },
		func(e *api.Exchange) { e.Response.Status = http.StatusSwitchingProtocols },
		func(e *api.Exchange) { e.Truncated = true },
		func(e *api.Exchange) { e.Request.Body.Size = 1 },
	} {
		e := recorded("GET", "/", "{}")
		change(e)
		r.Offer(e)
	}
	if d := r.results.Summary(); len(d.NotCompared) != 5 || d.Requests != 0 || len(r.queue) != 0 {
		t.Errorf("%+v", d)
	}
}

func TestValuesOfRedactedHeadersAreHidden(t *testing.T) {
	from, to := recorded("GET", "/", "{}"), recorded("GET", "/", "{}")
	from.Response.Headers["Set-Cookie"], to.Response.Headers["Set-Cookie"] = []string{"session=secret1"}, []string{"session=secret2"}
	r := newRig(func(int, *api.Exchange) *api.Exchange { return to }, func(c *Config) {
		c.Differ = func(_, _ *api.Exchange, all []Difference) {
			if strings.Contains(fmt.Sprint(all), "secret") {
				t.Errorf("%+v", all)
			}
		}
	})
	d := r.compareAll(t, from)
	if d.Differ != 1 || strings.Contains(fmt.Sprint(d, r.groups), "secret") {
		t.Errorf("%+v", d)
	}
}

// The answers are compared as they are, and shown without their secrets.
func TestSecretsInPathsAndBodiesAreHidden(t *testing.T) {
	path := "/x?access_token=S3CRET0"
	from := recorded("GET", path, `{"token":"S3CRET1","note":"see ?sig=S3CRET1","user":"ann"}`)
	to := recorded("GET", path, `{"token":"S3CRET2","note":"see ?sig=S3CRET2","user":"bob"}`)
	r := newRig(func(int, *api.Exchange) *api.Exchange { return to }, nil)
	d := r.compareAll(t, from)
	text := fmt.Sprint(d, r.groups)
	if d.Differ != 1 || len(d.Differences) != 3 || strings.Contains(text, "S3CRET") || !strings.Contains(text, "bob") {
		t.Errorf("%+v", d)
	}
}

func TestResultsAreBounded(t *testing.T) {
	r := NewResults(nil, nil)
	for n := range 3 * maxKinds {
		path := fmt.Sprintf("/x%dy\x1b[2J%s", n, strings.Repeat("z", maxRouteShown))
		e := recorded("GET", path, "{}")
		r.Add(e, []Difference{{Where: fmt.Sprint("header X-", n)}, {Where: fmt.Sprint("header Y-", n%7)}}, false)
		r.vary(e, []Difference{{Where: fmt.Sprint("header Z-", n)}}, "x")
	}
	if len(r.groups) > maxGroups+1 || len(r.kinds) > maxKinds+maxGroups+1 || len(r.varying) > maxIgnored {
		t.Errorf("%d groups, %d kinds, %d varying places", len(r.groups), len(r.kinds), len(r.varying))
	}
	d := r.Summary()
	if d.Requests != 3*maxKinds || d.Differ != d.Requests {
		t.Errorf("%d requests, %d differ", d.Requests, d.Differ)
	}
	for _, g := range d.Differences {
		if len(g.Route) > maxRouteShown+8 || api.Clean(g.Route) != g.Route {
			t.Fatalf("route %q", g.Route)
		}
	}
}

func TestAnswersOfTheWorkloadAreBounded(t *testing.T) {
	b := newBefore()
	for n := range 10 * maxBefore {
		if b.swap(recorded("GET", fmt.Sprint("/", n), strings.Repeat("x", 100<<10))) != nil {
			t.Fatal("another request is the same")
		}
	}
	weight := 0
	for _, e := range b.answers.Values() {
		weight += e.Weight()
	}
	if b.answers.Len() > maxBefore || b.bytes > maxBytes || b.bytes != weight {
		t.Errorf("%d answers, %d bytes, which weigh %d", b.answers.Len(), b.bytes, weight)
	}
	one, two := recorded("GET", "/again", ""), recorded("GET", "/again", "")
	one.Request.Headers, two.Request.Headers = http.Header{"X-Request-Id": {"1"}}, http.Header{"X-Request-Id": {"2"}}
	if b.swap(one); b.swap(two) != one {
		t.Error("a request that differs in its ID is another one")
	}
	three := recorded("GET", "/again", "")
	three.Request.Headers = http.Header{"Authorization": {"other"}}
	if b.swap(three) != nil {
		t.Error("a request with other credentials is the same")
	}
}
