package daemon

import (
	"cmp"
	"context"
	"errors"
	"net/http"
	"net/netip"
	"slices"
	"strconv"
	"time"

	"kubevpn/internal/api"
	"kubevpn/internal/laptop/connection"
	"kubevpn/pkg/host/sockets"
	"kubevpn/pkg/wakeup"
)

// flowInterval is the time over which rates are measured, and in which a flow that waits must move a byte.
const flowInterval = time.Second

// handleFlows answers one list of flows after flowInterval, or one after each until the client has gone.
func (d *daemon) handleFlows(w http.ResponseWriter, r *http.Request) {
	limit, err := strconv.Atoi(cmp.Or(r.FormValue(api.ParamLimit), "0"))
	if err != nil || limit < 0 {
		d.answer(w, http.StatusBadRequest, api.Errorf(api.ExitUsage, "the limit must be a number from 0 on"))
		return
	}
	sampler := &flowSampler{sources: d.connections.working, list: sockets.List, owners: sockets.Owners}
	sampler.sample(time.Now(), limit)
	d.lines(w, r, func(ctx context.Context, send func(any)) {
		for wakeup.Pause(ctx, flowInterval) {
			send(sampler.sample(time.Now(), limit))
			if !follows(r) {
				return
			}
		}
	})
}

// follows reports whether a request asks for lines until the client has gone.
func follows(r *http.Request) bool { return r.FormValue(api.ParamFollow) == "true" }

// lines answers the JSON lines that produce sends, and flushes each. The context of produce ends with the client and
// with the daemon.
func (d *daemon) lines(w http.ResponseWriter, r *http.Request, produce func(ctx context.Context, send func(any))) {
	ctx, cancel := context.WithCancel(r.Context())
	defer cancel()
	defer context.AfterFunc(d.ending, cancel)()
	s := &stream{w: w}
	produce(ctx, func(line any) {
		if s.line(line) != nil {
			cancel()
		}
	})
}

// working returns the connections that have not failed, by their IDs.
func (cs *connections) working() map[string]Connection {
	cs.mu.Lock()
	defer cs.mu.Unlock()
	all := map[string]Connection{}
	for id, t := range cs.tasks {
		if t.failed == nil {
			all[id] = t.conn
		}
	}
	return all
}

// flowSampler computes rates and stalls from one list of flows to the next. One goroutine uses it.
type flowSampler struct {
	sources func() map[string]Connection
	list    func(keep func(netip.Addr) bool) ([]sockets.Socket, error)
	owners  func(inodes map[uint32]bool) (map[uint32]sockets.Process, error)

	programs map[uint32]sockets.Process // by inode; zero: unknown
	before   map[flowKey]flowPast
	at       time.Time
}

// flowKey identifies a flow among those of all connections.
type flowKey struct {
	connection, protocol string
	src, dst             netip.AddrPort
	since                int64
}

// flowPast is the previous sample of a flow.
type flowPast struct {
	sent, received uint64
	stall          api.Stall
	stalled        time.Time // since then
}

// sample lists the flows, the fastest first, at most limit of them unless limit is 0. The first sample has no rates.
func (s *flowSampler) sample(now time.Time, limit int) api.FlowList {
	sources := s.sources()
	local, err := s.localSockets(sources)
	out := api.FlowList{Time: now, Items: []api.Flow{}, Warnings: flowWarnings(sources, err)}
	next, elapsed := map[flowKey]flowPast{}, now.Sub(s.at).Seconds()
	for id, source := range sources {
		for _, f := range source.Flows(local) {
			f.Connection = id
			key := flowKey{id, f.Protocol, f.Source, f.Destination, f.Since.UnixNano()}
			past, known := s.before[key]
			next[key] = update(&f, past, known, now, elapsed)
			out.Items = append(out.Items, f)
			out.Total.Flows++
			out.Total.SentRate += f.SentRate
			out.Total.ReceivedRate += f.ReceivedRate
			if f.Stall != "" {
				out.Total.Stalled++
			}
		}
	}
	s.before, s.at = next, now
	slices.SortFunc(out.Items, compareFlows)
	if limit > 0 && len(out.Items) > limit {
		out.Items = slices.Clip(out.Items[:limit])
	}
	for i := range out.Items { // look up only the names that are shown
		f := &out.Items[i]
		f.Name = sources[f.Connection].NameOf(f.Destination.Addr())
	}
	return out
}

// compareFlows orders flows by rate, then stalled before idle ones, then by bytes.
func compareFlows(a, b api.Flow) int {
	return cmp.Or(
		cmp.Compare(b.SentRate+b.ReceivedRate, a.SentRate+a.ReceivedRate),
		cmp.Compare(b.StallSeconds, a.StallSeconds),
		cmp.Compare(b.Sent+b.Received, a.Sent+a.Received),
		a.Destination.Compare(b.Destination), a.Source.Compare(b.Source), cmp.Compare(a.Connection, b.Connection),
	)
}

// update sets the rates of f, and removes its stall if bytes have moved or the flow was not seen before. It returns
// what the next sample compares with.
func update(f *api.Flow, past flowPast, known bool, now time.Time, elapsed float64) flowPast {
	next := flowPast{sent: f.Sent, received: f.Received, stall: f.Stall, stalled: now}
	waits := f.Stall
	f.Stall = ""
	if !known || f.Sent < past.sent || f.Received < past.received {
		return next // a new flow, or another one with the same ports
	}
	sent, received := f.Sent-past.sent, f.Received-past.received
	f.SentRate, f.ReceivedRate = float64(sent)/elapsed, float64(received)/elapsed
	moved := sent > 0 && waits != api.StallProgram || received > 0 && waits != api.StallDestination
	if waits == "" || waits != past.stall || moved {
		return next
	}
	next.stalled = past.stalled
	f.Stall, f.StallSeconds = waits, now.Sub(past.stalled).Seconds()
	return next
}

// localSockets lists the sockets that may belong to flows of these connections, and their programs.
func (s *flowSampler) localSockets(sources map[string]Connection) (connection.LocalSockets, error) {
	own := map[netip.Addr]bool{netip.IPv4Unspecified(): true, netip.IPv6Unspecified(): true}
	for _, source := range sources {
		for _, a := range source.Status().Addresses {
			own[a] = true
		}
	}
	if len(sources) == 0 {
		return connection.LocalSockets{}, nil
	}
	found, err := s.list(func(a netip.Addr) bool { return own[a] })
	if err != nil {
		return connection.LocalSockets{}, err
	}
	programs, unknown := map[uint32]sockets.Process{}, map[uint32]bool{}
	for _, f := range found {
		if p, known := s.programs[f.Inode]; known {
			programs[f.Inode] = p
		} else if f.Inode != 0 {
			unknown[f.Inode] = true
		}
	}
	if len(unknown) > 0 {
		owners, ownersErr := s.owners(unknown)
		for inode := range unknown {
			programs[inode] = owners[inode] // also if it is unknown: another look would not find it
		}
		err = ownersErr
	}
	s.programs = programs
	return connection.LocalSockets{List: found, Programs: programs}, err
}

// flowWarnings returns what the list lacks. err is the error of listing sockets.
func flowWarnings(sources map[string]Connection, err error) (warnings []string) {
	if err == nil || len(sources) == 0 {
		return nil
	}
	if !errors.Is(err, errors.ErrUnsupported) {
		return []string{"the programs of flows are unknown, and TCP flows of the system netstack are missing: " +
			err.Error()}
	}
	warnings = []string{"this system does not report the programs of flows"}
	for id, source := range sources {
		if source.Status().Netstack == api.NetstackSystem {
			warnings = append(warnings, "this system does not report the TCP flows of the system netstack: "+id)
		}
	}
	return warnings
}
