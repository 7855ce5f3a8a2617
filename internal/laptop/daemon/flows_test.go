//go:build linux

package daemon

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"net/netip"
	"testing"
	"time"

	"kubevpn/internal/api"
	"kubevpn/internal/laptop/connection"
	"kubevpn/pkg/host/sockets"
)

// listed is a Connection with the flows that a test sets.
type listed struct {
	Connection
	flows []api.Flow
	local connection.LocalSockets // as Flows got it
}

func (l *listed) Status() api.Connection {
	return api.Connection{Addresses: []netip.Addr{netip.MustParseAddr("198.19.0.2")}}
}

func (l *listed) Flows(local connection.LocalSockets) []api.Flow {
	l.local = local
	return append([]api.Flow{}, l.flows...)
}

func (l *listed) NameOf(a netip.Addr) api.ObjectName {
	return api.ObjectName{Kind: "pod", Name: a.String()}
}

func samplerOf(l *listed) *flowSampler {
	return &flowSampler{
		sources: func() map[string]Connection { return map[string]Connection{"east": l} },
		list:    func(func(netip.Addr) bool) ([]sockets.Socket, error) { return nil, nil },
		owners:  func(map[uint32]bool) (map[uint32]sockets.Process, error) { return nil, nil },
	}
}

func TestSamplerComputesRatesAndStalls(t *testing.T) {
	flow := func(sent, received uint64, stall api.Stall) api.Flow {
		return api.Flow{Protocol: "tcp", Counted: true, Sent: sent, Received: received, Stall: stall}
	}
	l := &listed{}
	s, now := samplerOf(l), time.Unix(1000, 0)
	for n, step := range []struct {
		flow         api.Flow
		rate         float64
		stall        api.Stall
		stallSeconds float64
	}{
		{flow(100, 0, api.StallDestination), 0, "", 0},
		{flow(300, 0, api.StallDestination), 100, "", 0},
		{flow(300, 50, api.StallDestination), 25, api.StallDestination, 2}, // it answers, but does not read
		{flow(300, 50, api.StallDestination), 0, api.StallDestination, 4},
		{flow(300, 50, api.StallProgram), 0, "", 0},
		{flow(400, 50, api.StallProgram), 50, api.StallProgram, 2},
		{flow(400, 50, ""), 0, "", 0},
		{flow(10, 0, ""), 0, "", 0}, // another flow
	} {
		l.flows = []api.Flow{step.flow}
		list := s.sample(now, 0)
		f := list.Items[0]
		if f.SentRate+f.ReceivedRate != step.rate || f.Stall != step.stall || f.StallSeconds != step.stallSeconds {
			t.Errorf("step %d: %+v, want %+v", n, f, step)
		}
		if stalled := list.Total.Stalled == 1; stalled != (step.stall != "") || list.Total.Flows != 1 || f.Connection != "east" {
			t.Errorf("step %d: %+v", n, list)
		}
		now = now.Add(2 * time.Second)
	}
}

func TestSamplerShowsTheFastestAndSumsUpAll(t *testing.T) {
	l := &listed{}
	at := func(i, second int) api.Flow {
		return api.Flow{Protocol: "udp", Source: netip.AddrPortFrom(netip.IPv4Unspecified(), uint16(i)), Received: uint64(i * second)}
	}
	s := samplerOf(l)
	for second := range 2 {
		l.flows = nil
		for i := range 5000 {
			l.flows = append(l.flows, at(i, second))
		}
		list := s.sample(time.Unix(int64(second), 0), 3)
		if len(list.Items) != 3 || list.Total.Flows != 5000 {
			t.Fatalf("%d items, %+v", len(list.Items), list.Total)
		}
		if second == 1 && (list.Items[0].ReceivedRate != 4999 || list.Total.ReceivedRate != 4999*5000/2 || list.Items[0].Name.Kind != "pod") {
			t.Errorf("%+v\n%+v", list.Items, list.Total)
		}
	}
}

func TestSamplerAsksForEachProgramOnce(t *testing.T) {
	l, asked := &listed{}, []string{}
	s := samplerOf(l)
	own := netip.MustParseAddrPort("198.19.0.2:1")
	var found []sockets.Socket
	s.list = func(keep func(netip.Addr) bool) ([]sockets.Socket, error) {
		if !keep(own.Addr()) || !keep(netip.IPv6Unspecified()) || keep(netip.MustParseAddr("192.0.2.1")) {
			t.Error("other sockets than those of the tunnel are listed")
		}
		return found, nil
	}
	s.owners = func(inodes map[uint32]bool) (map[uint32]sockets.Process, error) {
		asked = append(asked, fmt.Sprint(inodes))
		return map[uint32]sockets.Process{2: {PID: 22, Name: "two"}}, nil
	}
	for _, inodes := range [][]uint32{{0, 1, 2}, {1, 2}, {2, 3}} {
		found = nil
		for _, i := range inodes {
			found = append(found, sockets.Socket{Local: own, Inode: i})
		}
		s.sample(time.Now(), 0)
		if p := l.local.Programs[2]; p.PID != 22 || l.local.Programs[1] != (sockets.Process{}) {
			t.Errorf("%+v", l.local.Programs)
		}
	}
	if want := "[map[1:true 2:true] map[3:true]]"; fmt.Sprint(asked) != want {
		t.Errorf("asked %v, want %v", asked, want)
	}
}

func TestFlowWarningsNameWhatTheSystemDoesNotReport(t *testing.T) {
	s := samplerOf(&listed{})
	for _, tt := range []struct {
		err      error
		warnings int
	}{{nil, 0}, {errors.ErrUnsupported, 1}, {errors.New("no netlink"), 1}} {
		s.list = func(func(netip.Addr) bool) ([]sockets.Socket, error) { return nil, tt.err }
		if list := s.sample(time.Now(), 0); len(list.Warnings) != tt.warnings {
			t.Errorf("%v: %q", tt.err, list.Warnings)
		}
	}
}

func TestFlowsAreServedOnceOrUntilTheDaemonEnds(t *testing.T) {
	r := start(t)
	r.connect("east")
	list := fetch[api.FlowList](r, api.PathFlows)
	if len(list.Items) != 1 || list.Items[0].Connection != "id-east" || list.Items[0].Name.Name != "kube-dns" || list.Total.Flows != 1 {
		t.Errorf("%+v", list)
	}
	resp, err := r.client.Get("http://daemon" + api.PathFlows + "?" + api.ParamLimit + "=-1")
	if err != nil {
		t.Fatal(err)
	}
	resp.Body.Close()
	if resp.StatusCode != http.StatusBadRequest {
		t.Errorf("a negative limit: %s", resp.Status)
	}

	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://daemon"+api.PathFlows+"?"+api.ParamFollow+"=true", nil)
	if err != nil {
		t.Fatal(err)
	}
	resp, err = r.client.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	lines := bufio.NewScanner(resp.Body)
	for n := 0; lines.Scan(); n++ {
		var list api.FlowList
		if err := json.Unmarshal(lines.Bytes(), &list); err != nil || list.Total.Flows != 1 && n < 2 {
			t.Fatalf("%v %s", err, lines.Bytes())
		}
		if n == 1 {
			r.mustPost(api.PathQuit, nil)
		}
	}
	if err := lines.Err(); err != nil {
		t.Errorf("the followed list did not end with the daemon: %v", err)
	}
}
