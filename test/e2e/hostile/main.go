// Command hostile is a malicious traffic manager for the suite of the same name. It replaces `traffic manager`, with
// the same arguments and ports. The namespace of a laptop selects the attack on that laptop:
//
//	route-resolver   leases a resolver outside of the inner network
//	route-world      announces public networks and the default route as networks of the cluster
//	domain           claims the cluster domain "com"
//	terminal         rejects the laptop with a message full of escape sequences
//	names            sends two million Service names
//	message          sends one control message of 1 GiB
//	streams          opens 200 000 streams to the laptop
//
// With the argument attack it attacks the ports of other pods instead (attack.go):
//
//	hostile attack [-for 1m] ADDRESS:PORT...
package main

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/netip"
	"os"
	"os/signal"
	"strings"
	"syscall"

	"kubevpn/internal/api"
	"kubevpn/internal/process/version"
	"kubevpn/pkg/wire/transport"
)

// streams is the number of streams that the manager opens to a laptop; a link of the transport allows 2^18.
const streams = 200_000

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM)
	defer stop()
	var err error
	if len(os.Args) > 1 && os.Args[1] == "attack" {
		err = runAttack(ctx, os.Args[2:])
	} else {
		err = run(ctx)
	}
	if err != nil && ctx.Err() == nil {
		fmt.Fprintln(os.Stderr, "hostile:", err)
		os.Exit(1)
	}
}

func run(ctx context.Context) error {
	healthy := http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { _, _ = io.WriteString(w, "ok") })
	go func() { _ = http.ListenAndServe(fmt.Sprintf(":%d", api.HealthPort), healthy) }() // the kubelet notices
	var network net.ListenConfig
	listener, err := network.Listen(ctx, "tcp", fmt.Sprintf("127.0.0.1:%d", api.ManagerPort))
	if err != nil {
		return err
	}
	logger := slog.New(slog.NewTextHandler(os.Stderr, nil))
	server := transport.NewServer(transport.ServerConfig{OnSession: func(ctx context.Context, s *transport.Session) {
		serve(ctx, s, logger)
	}, Logger: logger})
	return server.Serve(ctx, listener)
}

// serve answers a laptop's streams: it attacks on the control stream, and carries flows as a manager does.
func serve(ctx context.Context, s *transport.Session, logger *slog.Logger) {
	for {
		in, err := s.Accept(ctx)
		if err != nil {
			return
		}
		go func() {
			var err error
			switch in.Proto {
			case transport.ProtoControl:
				err = attack(ctx, s, in)
			case transport.ProtoTCP, transport.ProtoUDP:
				err = relay(ctx, in)
			default:
				err = in.Reject(transport.CodeRefused)
			}
			if err != nil {
				logger.Info("stream ended", "request", in.Request, "err", err)
			}
		}()
	}
}

// relay dials where the laptop asks to, and copies until either end is done.
func relay(ctx context.Context, in *transport.Incoming) error {
	var dialer net.Dialer
	pod, err := dialer.DialContext(ctx, in.Proto.String(), in.Dst.String())
	if err != nil {
		return in.RejectError(err)
	}
	defer pod.Close()
	var laptop io.ReadWriteCloser
	if in.Datagrams() {
		packets, err := in.AcceptPackets()
		if err != nil {
			return err
		}
		laptop = datagrams{packets}
	} else if laptop, err = in.Accept(); err != nil {
		return err
	}
	defer laptop.Close()
	go func() {
		defer pod.Close()
		io.Copy(pod, laptop)
	}()
	_, err = io.Copy(laptop, pod)
	return err
}

// datagrams reads and writes one datagram at a time.
type datagrams struct{ *transport.Packets }

func (d datagrams) Read(b []byte) (int, error)  { return d.ReadPacket(b) }
func (d datagrams) Write(b []byte) (int, error) { return len(b), d.WritePacket(b) }

func attack(ctx context.Context, s *transport.Session, in *transport.Incoming) error {
	laptop, err := in.Accept()
	if err != nil {
		return err
	}
	defer laptop.Close()
	var hello api.ClientHello
	if err := json.NewDecoder(laptop).Decode(&hello); err != nil {
		return err
	}
	answer := benign(hello)
	say := json.NewEncoder(laptop)
	switch hello.Namespace {
	case "route-resolver":
		answer.Lease.Resolver = netip.MustParseAddr("203.0.113.5")
	case "route-world":
		for _, p := range []string{"0.0.0.0/0", "8.8.8.0/24", "140.82.121.0/24", "0.0.0.5/32", "2000::/3"} {
			answer.State.StatedPodCIDRs = append(answer.State.StatedPodCIDRs, netip.MustParsePrefix(p))
		}
	case "domain":
		answer.State.DNSDomain = "com"
	case "terminal":
		return say.Encode(api.ControlMessage{Error: api.Errorf(api.ExitUsage,
			"no\x1b]0;owned\x07 \x1b[2Jentry\r\u202egnp").WithHint("run `\x1b[8mrm\x1b[0m`")})
	}
	if err := say.Encode(api.ControlMessage{Hello: answer}); err != nil {
		return err
	}
	switch hello.Namespace {
	case "names":
		err = sendNames(say)
	case "message":
		err = sendMessage(laptop)
	case "streams":
		err = open(ctx, s)
	}
	fmt.Fprintln(os.Stderr, "attack over:", hello.Namespace, err)
	<-ctx.Done()
	return nil
}

// The limits of what the manager sends: more than a laptop can hold.
const (
	names   = 2_000_000
	message = 1 << 30 // bytes
)

func sendNames(say *json.Encoder) error {
	const perMessage = 100
	for i := range names / perMessage {
		part := make([]string, perMessage)
		for j := range part {
			part[j] = fmt.Sprintf("%s-%d", strings.Repeat("n", 50), j)
		}
		namespace := fmt.Sprintf("%s-%d", strings.Repeat("n", 50), i)
		message := api.ControlMessage{Names: &api.NameDelta{Add: map[string][]string{namespace: part}}}
		if err := say.Encode(message); err != nil {
			return err
		}
	}
	return nil
}

func sendMessage(w io.Writer) error {
	part := strings.Repeat("n", 1<<16)
	if _, err := io.WriteString(w, `{"hello": {"pod": "`); err != nil {
		return err
	}
	for range message / len(part) {
		if _, err := io.WriteString(w, part); err != nil {
			return err
		}
	}
	return nil
}

// benign returns a hello with the lab's cluster, which a laptop accepts.
func benign(hello api.ClientHello) *api.ManagerHello {
	inner := netip.MustParsePrefix("198.19.0.0/16")
	return &api.ManagerHello{
		Protocol: api.Protocol, Version: version.String(), Pod: os.Getenv("POD_NAME"),
		Lease: api.Lease{
			Addrs: []netip.Addr{netip.MustParseAddr("198.19.0.77")}, Networks: []netip.Prefix{inner},
			Resolver: netip.MustParseAddr("198.19.0.2"),
		},
		State: api.ManagerState{
			StatedServiceCIDRs: []netip.Prefix{netip.MustParsePrefix("10.96.0.0/16")}, DNSDomain: "cluster.local",
			DNSServers: []netip.Addr{netip.MustParseAddr("10.96.0.10")}, ResolvesVIPs: true,
			InnerNetworks: []netip.Prefix{inner},
		},
	}
}

// open opens streams until all are open or the session ends. A laptop that rejects a stream sends one frame.
func open(ctx context.Context, s *transport.Session) error {
	for i := range streams {
		p, err := s.OpenPackets(ctx,
			transport.Request{Proto: transport.ProtoUDP,
				Dst: netip.AddrPortFrom(netip.MustParseAddr("127.0.0.1"), uint16(i))})
		if err != nil {
			return err
		}
		// The laptop may already have rejected the stream, which is no reason to stop.
		if err := p.WritePacket(make([]byte, 1200)); err != nil && s.Err() != nil {
			return err
		}
	}
	return nil
}
