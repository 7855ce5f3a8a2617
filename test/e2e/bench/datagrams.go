//go:build linux

package main

import (
	"cmp"
	"context"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"
	"unsafe"

	"golang.org/x/net/ipv4"
	"golang.org/x/sys/unix"
)

// The measurements of UDP: a program on the laptop and a program in a pod's network namespace send each other datagrams
// at a fixed rate, one direction at a time, and the receiver counts them. Both use plain sockets with the kernel's
// default buffers.

const (
	sinkDatagrams, sourceDatagrams = 9200, 9202 // the ports of the end that receives, and of the one that sends

	datagramSize = 1200 // the minimum that QUIC requires of a path
	// tick is the time between two bursts. The sender omits what a late burst of maxBurst cannot contain, because
	// larger bursts would overflow the receiver.
	tick     = 200 * time.Microsecond
	maxBurst = 64
)

// The first byte of a datagram.
const (
	kindData  = 'd' // and a number, uint64
	kindStart = 's' // and a pacing: send to me
	kindBegin = 'b' // forget what this address has sent before; answered like kindQuery
	kindQuery = 'q' // answered with kindCount and a count
	kindCount = 'c'
)

// pacing describes a flow of datagrams.
type pacing struct {
	Rate     float64 // 10^6 bits a second
	Duration time.Duration
}

// count is what one end of a flow has sent or received.
type count struct {
	Sent       int
	Sending    bool
	Received   int
	Disordered int // of the received ones, those behind a later one
	Elapsed    time.Duration

	next  uint64
	began time.Time
}

func (c *count) add(b []byte) {
	now := time.Now()
	if c.Received == 0 {
		c.began = now
	}
	c.Received++
	c.Elapsed = now.Sub(c.began)
	if number := binary.BigEndian.Uint64(b[1:]); number >= c.next {
		c.next = number + 1
	} else {
		c.Disordered++
	}
}

// batch holds the datagrams that one system call reads or writes. This saves processor time, which the ends share with
// the programs that they measure.
type batch []ipv4.Message

func newBatch() batch {
	b := make(batch, maxBurst)
	for i := range b {
		b[i].Buffers = [][]byte{make([]byte, maxDatagram)}
	}
	return b
}

// maxDatagram is larger than any datagram of a measurement.
const maxDatagram = 2048

// send sends datagrams at the rate and returns their number. to is nil if the socket is connected.
func (p pacing) send(c *net.UDPConn, to net.Addr) (sent int, err error) {
	runtime.LockOSThread() // for sleep
	defer runtime.UnlockOSThread()
	conn, b := ipv4.NewPacketConn(c), newBatch()
	for i := range b {
		b[i].Buffers[0] = b[i].Buffers[0][:datagramSize]
		b[i].Buffers[0][0], b[i].Addr = kindData, to
	}
	interval := time.Duration(datagramSize * 8 * 1e3 / p.Rate)
	start := time.Now()
	next := start
	for now := start; now.Sub(start) < p.Duration; now = time.Now() {
		burst := min(maxBurst, int(now.Sub(next)/interval)+1)
		for i := range burst {
			binary.BigEndian.PutUint64(b[i].Buffers[0][1:], uint64(sent+i))
		}
		for at := 0; at < burst; {
			n, err := conn.WriteBatch(b[at:burst], 0)
			if err != nil && !errors.Is(err, unix.ENOBUFS) {
				return sent, err
			}
			at += max(n, 1)
		}
		sent += burst
		if next = next.Add(time.Duration(burst) * interval); next.Before(now) {
			next = now
		}
		sleep(tick)
	}
	return sent, nil
}

// sleep is more precise than time.Sleep, which may be a millisecond late. It bypasses Go's scheduler, which would use
// more processor time than the measurement.
func sleep(d time.Duration) {
	t := unix.Timespec{Nsec: int64(d)}
	_, _, _ = unix.RawSyscall(unix.SYS_NANOSLEEP, uintptr(unsafe.Pointer(&t)), 0, 0)
}

// datagramServer is the end in the pod.
type datagramServer struct {
	conn *net.UDPConn
	mu   sync.Mutex
	from map[netip.AddrPort]*count
}

// serveDatagrams serves until the socket fails.
func serveDatagrams(address string) error {
	at, err := net.ResolveUDPAddr("udp", address)
	if err != nil {
		return err
	}
	conn, err := net.ListenUDP("udp4", at)
	if err != nil {
		return err
	}
	defer conn.Close()
	return newDatagramServer(conn).serve()
}

func newDatagramServer(conn *net.UDPConn) *datagramServer {
	return &datagramServer{conn: conn, from: map[netip.AddrPort]*count{}}
}

func (s *datagramServer) serve() error {
	in, b := ipv4.NewPacketConn(s.conn), newBatch()
	for {
		n, err := in.ReadBatch(b, 0)
		if err != nil {
			return err
		}
		for _, m := range b[:n] {
			if from, ok := m.Addr.(*net.UDPAddr); ok && m.N > 0 {
				s.handle(m.Buffers[0][:m.N], from.AddrPort())
			}
		}
	}
}

func (s *datagramServer) handle(b []byte, from netip.AddrPort) {
	s.mu.Lock()
	defer s.mu.Unlock()
	c := s.from[from]
	if c == nil {
		c = &count{}
		s.from[from] = c
	}
	switch b[0] {
	case kindData:
		if len(b) == datagramSize {
			c.add(b)
		}
	case kindBegin, kindQuery:
		if b[0] == kindBegin && !c.Sending {
			*c = count{}
		}
		answer, err := json.Marshal(c)
		if err == nil {
			_, err = s.conn.WriteToUDPAddrPort(append([]byte{kindCount}, answer...), from)
		}
		if err != nil {
			fmt.Fprintln(os.Stderr, "bench:", err)
		}
	case kindStart:
		var p pacing
		if json.Unmarshal(b[1:], &p) == nil && !c.Sending && c.Sent == 0 {
			c.Sending = true
			go s.send(p, c, from)
		}
	}
}

func (s *datagramServer) send(p pacing, c *count, to netip.AddrPort) {
	sent, err := p.send(s.conn, net.UDPAddrFromAddrPort(to))
	if err != nil {
		fmt.Fprintln(os.Stderr, "bench:", err)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	c.Sent, c.Sending = sent, false
}

// pause is the silence after which one end queries the other.
const pause = 200 * time.Millisecond

// datagrams makes one measurement of UDP.
func (w worker) datagrams() (measured, error) {
	to, err := net.ResolveUDPAddr("udp4", w.Target)
	if err != nil {
		return measured{}, err
	}
	c, err := net.DialUDP("udp4", nil, to)
	if err != nil {
		return measured{}, err
	}
	defer c.Close()
	if _, err := ask(c, kindBegin, &count{}); err != nil { // the flow is there
		return measured{}, err
	}
	before := w.processorTimes()
	var got count
	if p := (pacing{Rate: w.Rate, Duration: w.Duration}); w.Kind == "udp-up" {
		got, err = p.up(c)
	} else {
		got, err = p.down(c)
	}
	if err != nil {
		return measured{}, err
	}
	if got.Sent == 0 || got.Received == 0 {
		return measured{}, fmt.Errorf("%d datagrams were sent and %d received", got.Sent, got.Received)
	}
	bits := float64(got.Received) * datagramSize * 8
	after := w.processorTimes()
	return measured{
		Count:      got.Sent,
		Lost:       100 * (1 - float64(got.Received)/float64(got.Sent)),
		Mbps:       bits / 1e6 / got.Elapsed.Seconds(),
		Disordered: got.Disordered,
		Busy:       (after.machine - before.machine).Seconds() / w.Duration.Seconds(),
	}, nil
}

// up sends datagrams, and then queries the other end's count until it no longer changes.
func (p pacing) up(c *net.UDPConn) (count, error) {
	sent, err := p.send(c, nil)
	if err != nil {
		return count{}, err
	}
	for before := -1; ; {
		got, err := query(c, &count{})
		if err != nil || got.Received == before {
			got.Sent = sent
			return got, err
		}
		before = got.Received
		time.Sleep(pause)
	}
}

// down makes the other end send, and counts what it receives until the other end has stopped and nothing more arrives.
func (p pacing) down(c *net.UDPConn) (count, error) {
	start, err := json.Marshal(p)
	if err != nil {
		return count{}, err
	}
	var got count
	for deadline := time.Now().Add(p.Duration + dialTimeout); time.Now().Before(deadline); {
		if got.Received == 0 {
			if _, err := c.Write(append([]byte{kindStart}, start...)); err != nil {
				return got, err
			}
		}
		if _, err := receive(c, &got); err != nil {
			return got, err
		}
		answer, err := query(c, &got)
		if err != nil {
			return got, err
		}
		if !answer.Sending && answer.Sent > 0 {
			got.Sent = answer.Sent
			return got, nil
		}
	}
	return got, errors.New("the other end does not stop")
}

// query asks the other end for its count until it answers. It adds the data that arrives before the answer to got.
func query(c *net.UDPConn, got *count) (count, error) { return ask(c, kindQuery, got) }

func ask(c *net.UDPConn, kind byte, got *count) (count, error) {
	for deadline := time.Now().Add(dialTimeout); time.Now().Before(deadline); {
		if _, err := c.Write([]byte{kind}); err != nil {
			return count{}, err
		}
		answer, err := receive(c, got)
		if answer != nil || err != nil {
			return *cmp.Or(answer, &count{}), err
		}
	}
	return count{}, errors.New("the other end does not answer")
}

// receive adds data to got until nothing arrives for the time of pause, or until it receives the answer to a query.
func receive(c *net.UDPConn, got *count) (*count, error) {
	in, b := ipv4.NewPacketConn(c), newBatch()
	for came := true; came; {
		came = false
		if err := c.SetReadDeadline(time.Now().Add(pause)); err != nil {
			return nil, err
		}
		for {
			n, err := in.ReadBatch(b, 0)
			if os.IsTimeout(err) {
				break
			} else if err != nil {
				return nil, err
			}
			came = true
			for _, m := range b[:n] {
				switch text := m.Buffers[0][:m.N]; {
				case m.N == datagramSize && text[0] == kindData:
					got.add(text)
				case m.N > 0 && text[0] == kindCount:
					answer := new(count)
					return answer, json.Unmarshal(text[1:], answer)
				}
			}
		}
	}
	return nil, nil
}

// datagramRate is the rate of UDP measurements, in Mb/s.
const datagramRate = 500

// datagramMeasurements are the kinds of UDP measurements.
var datagramMeasurements = []string{"udp-down", "udp-up"}

func datagramRow(kind string) string {
	return fmt.Sprintf("UDP %s, %d Mb/s", strings.TrimPrefix(kind, "udp-"), datagramRate)
}

// The other figures of a measurement of UDP.
func receivedRow(row string) string { return row + ": received" }
func busyRow(row string) string     { return row + ": processors busy" }

// measureDatagrams makes all measurements of UDP round by round, by every path in each round.
func (b *bench) measureDatagrams(ctx context.Context, r *report) error {
	if err := b.expose(ctx); err != nil {
		return err
	}
	stop, err := b.servePods(ctx)
	if err != nil {
		return err
	}
	defer stop()
	for round := range b.rounds {
		for i, s := range stages {
			if err := b.connectBy(ctx, s.netstack, s.transport); err != nil {
				return err
			}
			paths := []path{s.path}
			if i == 0 {
				paths = []path{kernel, s.path}
			}
			for _, p := range paths {
				say("round %d of %d: %s", round+1, b.rounds, p)
				for _, m := range datagramMeasurements {
					if err := b.measureDatagram(ctx, r, m, p); err != nil {
						return fmt.Errorf("%s, %s: %w", datagramRow(m), p, err)
					}
				}
				if err := b.measureSecure(ctx, r, p); err != nil {
					return err
				}
			}
		}
	}
	return nil
}

// measureDatagram adds one measurement of UDP to the report, and prints where datagrams were lost.
func (b *bench) measureDatagram(ctx context.Context, r *report, kind string, p path) error {
	before, err := b.drops()
	if err != nil {
		return err
	}
	w := work{Kind: kind, Target: b.target(p, sinkDatagrams), Rate: datagramRate, Duration: b.each}
	if kind == "udp-down" {
		w.Target = b.target(p, sourceDatagrams)
	}
	got, err := b.measure(ctx, w)
	if err != nil {
		return err
	}
	row := datagramRow(kind)
	r.add(row, p, got.Lost)
	r.add(receivedRow(row), p, got.Mbps)
	r.add(busyRow(row), p, got.Busy)
	say("%s, %s: %.3f %% of %d lost, %d disordered, %.0f Mb/s, %.2f processors%s", row, p, got.Lost, got.Count,
		got.Disordered, got.Mbps, got.Busy, before.since(b))
	return nil
}

// drops contains the kernel's counts of undelivered datagrams, by place.
type drops map[string]int

// drops reads the counts in the network namespaces of the laptop, the manager and the pod.
func (b *bench) drops() (drops, error) {
	p, err := b.processes()
	if err != nil {
		return nil, err
	}
	pod, err := b.podProcess(b.pod)
	if err != nil {
		return nil, err
	}
	d := drops{}
	for place, pid := range map[string]int{"laptop": p.laptop[0], "manager": p.manager[0], "pod": pod} {
		for line := range strings.Lines(procText(pid, "net/snmp")) {
			f := strings.Fields(line)
			if len(f) > 5 && f[0] == "Udp:" && f[1] != "InDatagrams" {
				d[place+"'s receive buffer"], _ = strconv.Atoi(f[5])
			}
		}
		for line := range strings.Lines(procText(pid, "net/dev")) {
			name, figures, found := strings.Cut(line, ":")
			if f := strings.Fields(figures); found && len(f) > 11 {
				name = place + "'s " + strings.TrimSpace(name)
				d[name+" in"], _ = strconv.Atoi(f[3])
				d[name+" out"], _ = strconv.Atoi(f[11])
			}
		}
	}
	for line := range strings.Lines(procText(1, "net/softnet_stat")) {
		if f := strings.Fields(line); len(f) > 1 {
			n, _ := strconv.ParseInt(f[1], 16, 64)
			d["backlog"] += int(n)
		}
	}
	return d, nil
}

// since describes the drops since d.
func (d drops) since(b *bench) string {
	now, err := b.drops()
	if err != nil {
		return ""
	}
	var text string
	for _, place := range slices.Sorted(maps.Keys(now)) {
		if n := now[place] - d[place]; n > 0 {
			text += fmt.Sprintf("; %s: %d", place, n)
		}
	}
	return text
}

// procText returns the content of a file of a process, or "" if the process has ended.
func procText(pid int, name string) string {
	text, _ := os.ReadFile(filepath.Join("/proc", strconv.Itoa(pid), name))
	return string(text)
}
