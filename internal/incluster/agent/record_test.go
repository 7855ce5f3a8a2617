//go:build linux

package agent

import (
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"net/netip"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/time/rate"

	"kubevpn/internal/api"
	"kubevpn/internal/testenv"
	"kubevpn/pkg/protocol/interceptor"
	"kubevpn/pkg/wakeup"
	"kubevpn/pkg/wire/transport"
)

// recordStream is a laptop's record stream.
type recordStream struct {
	t      *testing.T
	stream *transport.Stream
	in     *json.Decoder
}

// record opens a record stream for a claim.
func (m *testLaptop) record(claim string, body int) *recordStream {
	m.t.Helper()
	stream, err := m.session.Open(m.t.Context(), transport.Request{Proto: transport.ProtoRecord})
	if err != nil {
		m.t.Fatal(err)
	}
	m.t.Cleanup(func() { stream.Close() })
	stream.SetReadDeadline(time.Now().Add(20 * time.Second))
	r := &recordStream{m.t, stream, json.NewDecoder(stream)}
	r.order(claim, body)
	return r
}

func (r *recordStream) order(claim string, body int) {
	r.t.Helper()
	if err := json.NewEncoder(r.stream).Encode(api.RecordOrder{Claim: claim, Body: body}); err != nil {
		r.t.Fatal(err)
	}
}

func (r *recordStream) next() api.Record {
	r.t.Helper()
	var record api.Record
	if err := r.in.Decode(&record); err != nil {
		r.t.Fatal(err)
	}
	return record
}

// begins waits until the agent records.
func (r *recordStream) begins() *recordStream {
	r.t.Helper()
	if first := r.next(); first.Error != nil || first.Exchange != nil {
		r.t.Fatalf("first record %+v", first)
	}
	return r
}

func TestOwnerRecordsWhatItsMatchCovers(t *testing.T) {
	ann, bob := newPerson(t, "ann@laptop"), newPerson(t, "bob@desk")
	p := newPod(t, ann)
	ours, theirs := p.connect(ann), p.connect(p.standby(bob))
	if err := ours.claim("one", "x-user=ann"); err != nil {
		t.Fatal(err)
	}
	if err := theirs.claim("two", "x-user=bob"); err != nil {
		t.Fatal(err)
	}
	if refused := theirs.record("one", 0).next(); refused.Error == nil || refused.Error.Code != api.ExitWorkload {
		t.Errorf("another owner's claim: %+v", refused)
	}
	r := ours.record("one", 1000).begins()
	for _, header := range []string{"x-user=bob", "x-user=nobody", "x-user=ann"} {
		p.ask(header)
	}
	got := r.next().Exchange
	if got == nil || got.Request.Method != "GET" || got.Request.Path != "/" || got.Request.Scheme != "http" || got.Request.Host != "pod" ||
		got.Response == nil || got.Response.Status != http.StatusOK || string(got.Response.Body.Data) != "ann@laptop" ||
		got.To != api.ToLaptop || got.Mirrored || got.Request.Headers.Get("X-User") != "ann" || got.Seconds <= 0 || got.Wait > got.Seconds {
		t.Errorf("recorded %+v", got)
	}
	r.order("one", 0)
	testenv.Eventually(t, 20*time.Second, func() error { // the order is carried out
		p.ask("x-user=ann")
		if body := r.next().Exchange.Response.Body; body.Size != 10 || len(body.Data) != 0 {
			return fmt.Errorf("body %+v", body)
		}
		return nil
	})
	if err := ours.order(api.AgentOrder{Release: "one"}); err != nil {
		t.Fatal(err)
	}
	var record api.Record
	if err := r.in.Decode(&record); err == nil {
		t.Errorf("%+v after the end of the claim", record)
	}
}

func TestDestinationOfMirroredRequest(t *testing.T) {
	ann := newPerson(t, "ann@laptop")
	p := newPod(t, ann)
	laptop := p.connect(ann)
	order := claimOrder("copy")
	order.Mirror = true
	if err := laptop.order(api.AgentOrder{Claim: order}); err != nil {
		t.Fatal(err)
	}
	r := laptop.record("copy", 0).begins()
	if answer := p.ask(); answer != "application" {
		t.Error(answer)
	}
	if e := r.next().Exchange; e.To != api.ToApplication || !e.Mirrored {
		t.Errorf("recorded %+v", e)
	}
	if err := laptop.claim("all"); err != nil {
		t.Fatal(err)
	}
	p.ask()
	if e := r.next().Exchange; e.To != api.ToOther || !e.Mirrored {
		t.Errorf("recorded %+v", e)
	}
}

// newRecordQueue returns a queue that admits so many exchanges, and the bytes that it shares.
func newRecordQueue(body, burst int) (*recordQueue, *atomic.Int64) {
	shared := new(atomic.Int64)
	q := &recordQueue{shared: shared, rate: rate.NewLimiter(0, burst), more: wakeup.NewSignal(), cancel: func() {}}
	q.setBody(body)
	return q, shared
}

func exchange(size int) *interceptor.Exchange {
	return &interceptor.Exchange{Method: "GET", URI: "/", AnswerBody: interceptor.Body{Size: int64(size), Data: make([]byte, size)},
		Flow: interceptor.Flow{Client: netip.MustParseAddrPort("10.0.0.1:1"), Dst: netip.MustParseAddrPort("10.0.0.9:8080")}}
}

func TestRecordsThatNobodyReadsAreBounded(t *testing.T) {
	q, shared := newRecordQueue(1<<10, 1<<20)
	const all = 100_000
	taken := 0
	for range all {
		if end, body := q.begin(); end != nil {
			taken++
			end(exchange(body))
		}
	}
	if held := shared.Load(); held > maxOwnRecorded || held < maxOwnRecorded/2 || q.lost() != uint64(all-taken) {
		t.Errorf("%d bytes wait of %d exchanges, %d are dropped", held, taken, q.lost())
	}
	q.close()
	if held := shared.Load(); held != 0 || q.held != 0 {
		t.Errorf("%d bytes are held after the end", held)
	}
	if end, _ := q.begin(); end != nil {
		t.Error("a closed queue records")
	}
}

func TestRequestsInFlightAreBounded(t *testing.T) {
	q, shared := newRecordQueue(api.MaxRecordedBody, 1<<20)
	var ends []func(*interceptor.Exchange)
	for range 1000 {
		if end, _ := q.begin(); end != nil {
			ends = append(ends, end)
		}
	}
	if len(ends) == 0 || len(ends) > maxOwnRecorded/(2*api.MaxRecordedBody) || shared.Load() > maxOwnRecorded {
		t.Errorf("%d requests in flight hold %d bytes", len(ends), shared.Load())
	}
	q.close()
	for _, end := range ends {
		end(exchange(10))
	}
	if held := shared.Load(); held != 0 {
		t.Errorf("%d bytes are held after the end", held)
	}
}

func TestAllQueuesShareABound(t *testing.T) {
	q, shared := newRecordQueue(0, 1<<20)
	shared.Store(maxRecorded)
	if end, _ := q.begin(); end != nil || q.lost() != 1 || shared.Load() != maxRecorded {
		t.Errorf("recorded beyond the bound: %d bytes", shared.Load())
	}
}

func TestRateOfRecordsIsBounded(t *testing.T) {
	q, _ := newRecordQueue(0, 10)
	for range 100 {
		if end, _ := q.begin(); end != nil {
			end(exchange(0))
		}
	}
	if len(q.waiting) != 10 || q.lost() != 90 {
		t.Errorf("%d wait, %d are dropped", len(q.waiting), q.lost())
	}
}

// A laptop that does not read delays no request, and learns what it missed.
func TestSlowReaderDelaysNoRequest(t *testing.T) {
	ann := newPerson(t, "ann@laptop")
	p := newPod(t, ann)
	laptop := p.connect(ann)
	if err := laptop.claim("one"); err != nil {
		t.Fatal(err)
	}
	r := laptop.record("one", api.MaxRecordedBody).begins()
	const requests = 300
	long := strings.Repeat("x", 30<<10)
	for range requests {
		if answer := p.ask("x-long=" + long); answer != "ann@laptop" {
			t.Fatal(answer)
		}
	}
	seen, dropped := 0, uint64(0)
	for uint64(seen)+dropped < requests {
		record := r.next()
		if record.Exchange != nil {
			seen++
		}
		dropped = max(dropped, record.Dropped)
	}
	if seen == 0 {
		t.Error("the laptop got no exchange")
	}
	t.Logf("%d recorded, %d dropped", seen, dropped)
}

func TestLongHeadsAreShortened(t *testing.T) {
	q, _ := newRecordQueue(0, 1)
	e := exchange(0)
	e.URI = "/" + strings.Repeat("a", maxTextSent)
	e.Status, e.Header = 200, http.Header{"X-Long": {strings.Repeat("b", maxHeadSent)}, "X-None": nil}
	e.Err = fmt.Errorf("bad \xff bytes: %w", context.Canceled)
	d := q.describe(e)
	if len(d.Request.Path) != maxTextSent || len(d.Request.Headers) != 0 || !d.Truncated || d.Error != "bad  bytes: context canceled" {
		t.Errorf("%d bytes of path, headers %v, %v, %q", len(d.Request.Path), d.Request.Headers, d.Truncated, d.Error)
	}
	line, err := json.Marshal(api.Record{Exchange: d})
	if err != nil || len(line) > 2<<20 {
		t.Error(len(line), err)
	}
}

func FuzzRecordOrder(f *testing.F) {
	f.Add(`{"claim":"one","body":100}`)
	f.Add(`{"claim":"one","body":-1}`)
	f.Fuzz(func(t *testing.T, line string) {
		var o api.RecordOrder
		if api.NewLines(strings.NewReader(line), maxRecordOrder).Next(&o) != nil {
			return
		}
		q, _ := newRecordQueue(o.Body, 1)
		if _, body := q.begin(); body < 0 || body > api.MaxRecordedBody {
			t.Errorf("records %d bytes of a body", body)
		}
	})
}
