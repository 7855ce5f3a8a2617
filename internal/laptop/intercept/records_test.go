package intercept

import (
	"context"
	"errors"
	"fmt"
	"io"
	"strings"
	"testing"
	"time"

	"kubevpn/internal/api"
	"kubevpn/internal/inspect/exchanges"
	"kubevpn/internal/testenv"
	"kubevpn/pkg/redact"
)

func exchange(path string) *api.Exchange {
	return &api.Exchange{Request: api.ExchangeRequest{Method: "GET", Path: path}}
}

// paths returns the paths of the exchanges that the records have from n on.
func (r *records) paths(n uint64) (paths string, missed uint64) {
	all, _, missed, _, _ := r.from(n)
	for _, e := range all {
		paths += e.Request.Path
	}
	return paths, missed
}

func TestLastExchangesAreKept(t *testing.T) {
	r := newRecords(3)
	if w := r.options.Load(); !w.on || w.body != 0 {
		t.Errorf("options %+v", w)
	}
	for n := range 5 {
		r.add(exchange(fmt.Sprint("/", n)), 0)
	}
	at, _ := r.position()
	if got, missed := r.paths(at); got != "/2/3/4" || missed != 0 {
		t.Errorf("kept %s, %d missed", got, missed)
	}
	if _, missed := r.paths(0); missed != 2 {
		t.Errorf("%d missed, want 2", missed)
	}
}

func TestNothingIsKeptWithoutFollowers(t *testing.T) {
	r := newRecords(0)
	r.add(exchange("/early"), 0)
	leave, more := r.join(10), r.join(100)
	if w := r.options.Load(); !w.on || w.body != 100 {
		t.Errorf("options %+v", w)
	}
	at, _ := r.position()
	r.add(exchange("/now"), 0)
	if got, _ := r.paths(at); got != "/now" {
		t.Errorf("recorded %s", got)
	}
	late, _ := r.position()
	more()
	if w := r.options.Load(); !w.on || w.body != 10 {
		t.Errorf("options %+v", w)
	}
	r.add(exchange("/late"), 0)
	if got, _ := r.paths(late); got != "/late" {
		t.Errorf("a second reader gets %s", got)
	}
	leave()
	if w := r.options.Load(); w.on || len(r.ring) != 0 || r.bytes != 0 {
		t.Errorf("options %+v, %d kept", w, len(r.ring))
	}
}

func TestKeptBytesAreBounded(t *testing.T) {
	r := newRecords(api.MaxKept)
	for range 100 {
		e := exchange("/")
		e.Request.Body.Data = make([]byte, 1<<20)
		r.add(e, 0)
	}
	if r.bytes > maxKeptBytes || len(r.ring) == 0 || r.first+uint64(len(r.ring)) != 100 {
		t.Errorf("the ring has %d bytes in %d exchanges", r.bytes, len(r.ring))
	}
}

// follow follows an intercept until the test ends.
func follow(t *testing.T, i *Intercept, req api.RequestsRequest) <-chan api.Record {
	t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	all, done := make(chan api.Record, 64), make(chan struct{})
	go func() {
		defer close(done)
		if err := i.Requests(ctx, req, func(r api.Record) { all <- r }); err != nil {
			t.Error(err)
		}
	}()
	t.Cleanup(func() {
		cancel()
		<-done
	})
	return all
}

func await[T any](t *testing.T, c <-chan T) T {
	t.Helper()
	select {
	case v := <-c:
		return v
	case <-time.After(20 * time.Second):
		t.Fatal("nothing comes")
		panic("unreachable")
	}
}

func TestFollowersGetWhatAgentsRecord(t *testing.T) {
	w := newWorld(t, "web-1")
	i, _, err := begin(t, w, api.InterceptSpec{})
	if err != nil {
		t.Fatal(err)
	}
	if err := i.Requests(t.Context(), api.RequestsRequest{}, func(api.Record) {}); err == nil || api.AsError(err).Code != api.ExitUsage ||
		!strings.Contains(api.AsError(err).Hint, "-f") {
		t.Errorf("without a record: %v", err)
	}
	a := w.agent("web-1")
	all := follow(t, i, api.RequestsRequest{Follow: true, Body: 5, Redact: []string{"cookie"}})
	if o := await(t, a.ordered); o.Body != 5 || o.Claim != i.claim.ID {
		t.Errorf("order %+v", o)
	}
	if r := await(t, all); r.Pods != 1 {
		t.Errorf("first record %+v", r)
	}
	sent := exchange("/a")
	sent.Request.Headers = map[string][]string{"Cookie": {"secret"}, "X-User": {"me"}}
	sent.Wait, sent.Request.Body.Data = -1, []byte("hello")
	a.records <- api.Record{Exchange: sent, Dropped: 7}
	r := await(t, all)
	e := r.Exchange
	if r.Dropped != 7 || e.Pod != "web-1" || e.Workload != "deployment/web" || e.Match != "everything" || e.Wait != 0 || e.Request.Body.Size != 5 ||
		e.Request.Headers.Get("Cookie") != redact.Mark || e.Request.Headers.Get("X-User") != "me" || len(e.Redacted) != 1 {
		t.Errorf("record %+v of %+v", r, e)
	}
	open := follow(t, i, api.RequestsRequest{Follow: true, Body: 9, Redact: []string{api.ShowAll}})
	if o := await(t, a.ordered); o.Body != 9 {
		t.Errorf("order %+v", o)
	}
	await(t, open)
	a.records <- api.Record{Exchange: sent, Dropped: 8}
	if r := await(t, open); r.Dropped != 1 || r.Exchange.Request.Headers.Get("Cookie") != "secret" {
		t.Errorf("the second follower gets %+v", r)
	}
}

func TestRecordingEndsWithItsFollower(t *testing.T) {
	w := newWorld(t, "web-1")
	i, _, err := begin(t, w, api.InterceptSpec{})
	if err != nil {
		t.Fatal(err)
	}
	for range 2 {
		ctx, cancel := context.WithCancel(t.Context())
		err := i.Requests(ctx, api.RequestsRequest{Follow: true}, func(r api.Record) { cancel() })
		if err != nil {
			t.Fatal(err)
		}
		await(t, w.agent("web-1").ordered)
		if o := await(t, w.agent("web-1").ordered); o.Claim != "ended" {
			t.Errorf("order %+v", o)
		}
	}
}

func TestPodsThatComeLaterRecord(t *testing.T) {
	w := newWorld(t, "web-1")
	i, _, err := begin(t, w, api.InterceptSpec{Record: 10})
	if err != nil {
		t.Fatal(err)
	}
	w.addPod("web-2")
	testenv.Until(t, "both pods have agents", func() bool { return w.agent("web-2") != nil })
	for _, pod := range []string{"web-1", "web-2"} {
		await(t, w.agent(pod).ordered)
		w.agent(pod).records <- api.Record{Exchange: exchange("/" + pod)}
	}
	testenv.Until(t, "both pods have recorded", func() bool {
		var all []api.Record
		if err := i.Requests(t.Context(), api.RequestsRequest{}, func(r api.Record) { all = append(all, r) }); err != nil {
			t.Fatal(err)
		}
		return len(all) == 2
	})
}

// An agent can send anything. The laptop must be able to print each exchange that it accepts.
func FuzzRecord(f *testing.F) {
	f.Add(`{"exchange":{"request":{"method":"GET","path":"/","host":"web"},"client":"","server":"10.0.0.1:80"}}`)
	f.Add(`{"exchange":{"seconds":-1,"waitSeconds":1e300,"response":{"status":-5,"headers":{"":[]}}},"dropped":18446744073709551615}`)
	f.Add(`{"exchange":{"request":{"headers":{"Cookie":["a=b"],"X\n":["'; reboot"]},"body":{"size":-1,"data":"/w=="}}}}`)
	f.Fuzz(func(t *testing.T, line string) {
		var r api.Record
		if err := api.NewLines(strings.NewReader(line), maxRecord).Next(&r); err != nil || r.Exchange == nil {
			return
		}
		new(agentSession).complete(r.Exchange)
		e := *r.Exchange
		if e.Wait < 0 || e.Wait > e.Seconds || e.Request.Body.Size < int64(len(e.Request.Body.Data)) {
			t.Errorf("%+v", e)
		}
		e.Redact([]string{"cookie"})
		for name := range e.Request.Headers {
			if strings.EqualFold(name, "cookie") && e.Request.Headers[name][0] != redact.Mark {
				t.Errorf("shows %s", name)
			}
		}
		exchanges.Curl(&e)
		h := exchanges.NewHAR(io.Discard)
		if err := errors.Join(h.Add(&e, ""), h.Close("")); err != nil {
			t.Error(err)
		}
	})
}
