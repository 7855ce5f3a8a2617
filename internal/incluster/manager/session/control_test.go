package session

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"reflect"
	"runtime"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"kubevpn/internal/api"

	"kubevpn/internal/incluster/manager/managertest"
	"kubevpn/internal/process/version"
	"kubevpn/pkg/wire/transport"
)

func TestManagerRefusesIncompatibleLaptop(t *testing.T) {
	tests := []struct {
		name, hint string
		hello      api.ClientHello
		code       api.ExitCode
	}{
		{"newer", "kubevpn connect --upgrade", api.ClientHello{Protocol: api.Protocol + 1, Version: "99"}, api.ExitIncompatible},
		{"older", "install kubevpn " + version.String(), api.ClientHello{Version: "0"}, api.ExitIncompatible},
		{"scheduler", "", api.ClientHello{Protocol: api.Protocol, Scheduler: "wrr"}, api.ExitUsage},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			r := start(t, testConfig{})
			c := managertest.Hello(t, r.laptop, tt.hello)
			m := c.Next()
			if m.Error == nil || m.Error.Code != tt.code || !strings.Contains(m.Error.Hint, tt.hint) {
				t.Fatalf("got %+v", m)
			}
			c.Stream.Close()
			select {
			case <-r.laptop.Done():
			case <-time.After(managertest.Timeout):
				t.Error("the session has not ended")
			}
		})
	}
}

func TestManagerAnswersHello(t *testing.T) {
	r := start(t, testConfig{PodName: "tm-1", NodeName: "n1"})
	c := managertest.Hello(t, r.laptop, helloV1)
	m := c.Next()
	if m.Hello == nil || m.Hello.Pod != "tm-1" || m.Hello.Node != "n1" || m.Hello.Version != version.String() || m.Hello.Protocol != api.Protocol {
		t.Fatalf("got %+v", m)
	}
	want := []string{"list services", "watch services", "list endpointslices", "watch endpointslices", "list nodes", "watch nodes", "list servicecidrs", "watch servicecidrs"}
	if got := m.Hello.State.Missing; len(got) < 8 || !reflect.DeepEqual(got[:8], want) {
		t.Errorf("missing: %v", got)
	}
	if m.Hello.State.ResolvesVIPs || m.Hello.State.Sessions != 1 {
		t.Errorf("state: %+v", m.Hello.State)
	}
	// The first laptop learns that a second one has connected, and later disconnected.
	t.Run("second", func(t *testing.T) {
		managertest.Hello(t, managertest.Connect(t, r.addr), helloV1).Next()
		c.Until("two sessions", func(s *api.ManagerState) bool { return s.Sessions == 2 })
	})
	c.Until("one session", func(s *api.ManagerState) bool { return s.Sessions == 1 })
}

func FuzzHello(f *testing.F) {
	f.Add([]byte(`{"protocol":1,"version":"1","client":"x","namespace":"default","scheduler":"rr"}` + "\n"))
	f.Add([]byte(`{"protocol":"1"}`))
	f.Add(bytes.Repeat([]byte("["), 100_000))
	f.Fuzz(func(t *testing.T, line []byte) {
		h, err := readHello(bytes.NewReader(line))
		if err != nil {
			return
		}
		parseCaller(h)
		if refusal := incompatible(h); refusal != nil {
			if _, err := json.Marshal(refusal); err != nil {
				t.Error(err)
			}
		}
	})
}

func TestManagerRefusesLongHello(t *testing.T) {
	endless := strings.NewReader(`{"version":"` + strings.Repeat("x", 1<<20))
	if _, err := readHello(endless); err == nil || errors.Is(err, nil) || endless.Len() < 1<<19 {
		t.Errorf("error %v, %d bytes left", err, endless.Len())
	}
}

// A client's identity allows taking over its lease, and more people can read the log than the manager's memory.
func TestLogHoldsNoClientIdentity(t *testing.T) {
	said := make(managertest.LogLines, 256)
	r := start(t, testConfig{Logger: slog.New(slog.NewTextHandler(said, nil))})
	const secret = "0123456789abcdef0123456789abcdef"
	if managertest.Hello(t, r.laptop, api.ClientHello{Protocol: api.Protocol, Client: secret}).Next().Hello == nil {
		t.Fatal("no Hello")
	}
	for found := false; !found; { // the laptop is logged before it gets the Hello
		select {
		case line := <-said:
			found = strings.Contains(line, "msg=laptop")
			if strings.Contains(line, secret) {
				t.Errorf("the log contains %s", line)
			}
		default:
			t.Fatal("the log does not contain the laptop")
		}
	}
}

// A session has one control stream, which identifies its laptop once. The first one continues.
func TestSecondControlStreamIsRejected(t *testing.T) {
	r := start(t, testConfig{PodName: "tm-1"})
	c := managertest.Hello(t, r.laptop, helloV1)
	if c.Next().Hello == nil {
		t.Fatal("no Hello")
	}
	for range 3 {
		st, err := r.laptop.Open(t.Context(), transport.Request{Proto: transport.ProtoControl})
		if !errors.Is(err, syscall.EACCES) {
			t.Errorf("a second control stream: %v, %v", st, err)
		}
	}
	managertest.Hello(t, managertest.Connect(t, r.addr), helloV1)
	c.Until("two sessions", func(s *api.ManagerState) bool { return s.Sessions == 2 })
}

// laptopThatDoesNotRead blocks the writer at its second piece until it is closed.
type laptopThatDoesNotRead struct {
	pieces  int
	blocked chan<- struct{}
	closed  <-chan struct{}
}

func (l *laptopThatDoesNotRead) Write(b []byte) (int, error) {
	if l.pieces++; l.pieces > 1 {
		l.blocked <- struct{}{}
		<-l.closed
		return 0, net.ErrClosed
	}
	return len(b), nil
}

// Names of a large cluster for 200 laptops that do not read them occupy little memory.
func TestUnreadNamesTakeLittleMemory(t *testing.T) {
	const laptops = 200
	all := manyNames()
	before := liveHeap()
	blocked, closed := make(chan struct{}), make(chan struct{})
	var senders sync.WaitGroup
	for range laptops {
		senders.Go(func() {
			err := send(&laptopThatDoesNotRead{blocked: blocked, closed: closed}, api.ControlMessage{Names: &api.NameDelta{Reset: true, Add: all}})
			if !errors.Is(err, net.ErrClosed) {
				t.Errorf("sending ended with %v", err)
			}
		})
	}
	for range laptops {
		<-blocked
	}
	grown := liveHeap() - before
	close(closed)
	senders.Wait()
	t.Logf("%d kB for each laptop", grown/laptops>>10)
	if grown > laptops*64<<10 {
		t.Errorf("%d laptops that do not read occupy %d kB", laptops, grown>>10)
	}
}

// liveHeap returns the bytes of live objects after a garbage collection.
func liveHeap() int64 {
	var m runtime.MemStats
	runtime.GC()
	runtime.GC() // the second collection empties the pools
	runtime.ReadMemStats(&m)
	return int64(m.HeapAlloc)
}

// manyNames returns 10 000 Services in two namespaces.
func manyNames() map[string][]string {
	all := make(map[string][]string)
	for i := range 10_000 {
		namespace := fmt.Sprintf("team-%d", i/9_000)
		all[namespace] = append(all[namespace], fmt.Sprintf("a-service-with-a-name-of-usual-length-%05d", i))
	}
	return all
}

// Names that are written in pieces are the line that a laptop of any version reads.
func TestNamesInPiecesAreOneLine(t *testing.T) {
	some := map[string][]string{"a": {"x", "y"}, "b": {"z"}}
	for _, d := range []*api.NameDelta{
		{Reset: true}, {Reset: true, Add: manyNames()}, {Add: some, Remove: some, Changed: some}, {Remove: some}, {Changed: some},
	} {
		var line bytes.Buffer
		if err := send(&line, api.ControlMessage{Names: d}); err != nil {
			t.Fatal(err)
		}
		var got api.ControlMessage
		if err := api.NewLines(&line, 8<<20).Next(&got); err != nil {
			t.Fatal(err)
		}
		if !reflect.DeepEqual(got.Names, d) || line.Len() != 0 {
			t.Errorf("got %d namespaces, want %d", len(got.Names.Add), len(d.Add))
		}
	}
}

// A client's identity is a secret that entitles it to its address.
func TestClientIdentityIsNotLogged(t *testing.T) {
	said := make(managertest.LogLines, 1000)
	r := start(t, testConfig{Logger: slog.New(slog.NewTextHandler(said, &slog.HandlerOptions{Level: slog.LevelDebug}))})
	const secret = "5ecre7-1den7i7y"
	c := managertest.Hello(t, r.laptop, api.ClientHello{Protocol: api.Protocol, Client: secret})
	first := c.Next()
	if first.Hello == nil || len(first.Hello.Lease.Addrs) == 0 {
		t.Fatalf("no lease: %+v", first)
	}
	other := managertest.Connect(t, r.addr)
	d := managertest.Hello(t, other, api.ClientHello{Protocol: api.Protocol, Client: "other", Lease: first.Hello.Lease.Addrs}).Next()
	if d.Hello == nil || len(d.Hello.Lease.Addrs) == 0 || d.Hello.Lease.Addrs[0] == first.Hello.Lease.Addrs[0] {
		t.Errorf("another client that asks for the address gets %+v", d.Hello)
	}
	for len(said) > 0 {
		if line := <-said; strings.Contains(line, secret) {
			t.Errorf("the log contains the identity: %s", line)
		}
	}
	long := managertest.Hello(t, managertest.Connect(t, r.addr), api.ClientHello{Protocol: api.Protocol, Client: strings.Repeat("x", maxClient+1)}).Next()
	if long.Error == nil {
		t.Errorf("an identity of %d bytes got %+v", maxClient+1, long)
	}
}
