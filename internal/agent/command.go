package agent

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"os"
	"os/signal"
	"strconv"
	"strings"
	"syscall"

	"github.com/spf13/cobra"

	"kubevpn/internal/api"
	"kubevpn/internal/trim"
)

// options are the command's flags and its environment.
type options struct {
	port         uint16
	podIP, log   string
	listen       []string
	owner, named string
	greet        string
}

// NewCommand returns `traffic agent`.
func NewCommand() *cobra.Command {
	var o options
	cmd := &cobra.Command{
		Use:   "agent",
		Short: "Give requests of a pod to the laptops that have claimed them",
		Long: `Gives requests that reach a pod to the laptops that have claimed them, and the
others to the application.

It runs in a container of the pod, which kubevpn adds for who intercepts a
workload: an ephemeral one, as root with the capability NET_ADMIN, or a sidecar
without any (--listen). The first line on standard output says where the owner's
laptop finds it; the log is on standard error.

$` + api.AgentOwnerVariable + ` is the hash of the owner's public key, and $` + api.AgentNameVariable + `
what the owner is called. $` + api.AgentGreetVariable + ` is a port of 127.0.0.1
where the first line is said as well, for a minute.`,
		Example: `  traffic agent
  traffic agent --listen 8080:18080`,
		Args:          cobra.NoArgs,
		SilenceUsage:  true,
		SilenceErrors: true,
		RunE: func(cmd *cobra.Command, _ []string) error {
			o.owner, o.named = os.Getenv(api.AgentOwnerVariable), os.Getenv(api.AgentNameVariable)
			o.greet = os.Getenv(api.AgentGreetVariable)
			ctx, stop := signal.NotifyContext(cmd.Context(), os.Interrupt, syscall.SIGTERM)
			defer stop()
			return run(ctx, o)
		},
	}
	f := cmd.Flags()
	f.Uint16Var(&o.port, "port", 0, "port for laptops; 0: any")
	f.StringVar(&o.podIP, "pod-ip", os.Getenv("POD_IP"), "addresses of this pod, with commas ($POD_IP); empty: those of its interfaces")
	f.StringSliceVar(&o.listen, "listen", nil, "[tcp/|udp/]PORT:LISTEN, for a sidecar: the application's port, and the one on which to listen for it")
	f.StringVar(&o.log, "log-level", "info", "debug, info, warn or error")
	return cmd
}

func run(ctx context.Context, o options) error {
	trim.Processors()
	var level slog.Level
	if err := level.UnmarshalText([]byte(o.log)); err != nil {
		return api.Errorf(api.ExitUsage, "--log-level: %w", err)
	}
	if o.owner == "" {
		return api.Errorf(api.ExitUsage, "$%s has to be the hash of the owner's public key", api.AgentOwnerVariable)
	}
	cfg := Config{
		Owner: o.owner, OwnerName: o.named, Port: o.port, Socket: api.AgentSocket, Greetings: os.Stdout,
		Logger: slog.New(slog.NewTextHandler(os.Stderr, &slog.HandlerOptions{Level: level})),
	}
	if o.greet != "" {
		n, err := strconv.ParseUint(o.greet, 10, 16)
		if err != nil {
			return api.Errorf(api.ExitUsage, "$%s: %w", api.AgentGreetVariable, err)
		}
		cfg.Greet = uint16(n)
	}
	var err error
	if cfg.PodIPs, err = podIPs(o.podIP); err != nil {
		return api.Errorf(api.ExitUsage, "--pod-ip: %w", err)
	}
	for _, text := range o.listen {
		l, err := parseListen(text)
		if err != nil {
			return api.Errorf(api.ExitUsage, "--listen %s: %w", text, err)
		}
		cfg.Listen = append(cfg.Listen, l)
	}
	if len(cfg.Listen) == 0 {
		if guarded, err := guard(cfg.Logger); guarded {
			return err
		}
	}
	return New(cfg).Run(ctx)
}

// podIPs reads addresses, or finds them.
func podIPs(text string) ([]netip.Addr, error) {
	var ips []netip.Addr
	for word := range strings.SplitSeq(text, ",") {
		if word = strings.TrimSpace(word); word == "" {
			continue
		}
		ip, err := netip.ParseAddr(word)
		if err != nil {
			return nil, err
		}
		ips = append(ips, ip.Unmap())
	}
	if len(ips) > 0 {
		return ips, nil
	}
	addrs, err := net.InterfaceAddrs()
	if err != nil {
		return nil, fmt.Errorf("reading the pod's addresses: %w", err)
	}
	for _, addr := range addrs {
		if n, ok := addr.(*net.IPNet); ok {
			if ip, ok := netip.AddrFromSlice(n.IP); ok && ip.Unmap().IsGlobalUnicast() {
				ips = append(ips, ip.Unmap())
			}
		}
	}
	if len(ips) == 0 {
		return nil, errors.New("the pod has no address")
	}
	return ips, nil
}

// parseListen reads "[tcp/|udp/]PORT:LISTEN".
func parseListen(text string) (Listen, error) {
	l := Listen{Protocol: "tcp"}
	if protocol, rest, found := strings.Cut(text, "/"); found {
		if protocol != "tcp" && protocol != "udp" {
			return l, fmt.Errorf("%q is not tcp or udp", protocol)
		}
		l.Protocol, text = protocol, rest
	}
	application, listen, found := strings.Cut(text, ":")
	if !found {
		return l, errors.New("not PORT:LISTEN")
	}
	for _, p := range []struct {
		text string
		to   *uint16
	}{{application, &l.Port}, {listen, &l.Listen}} {
		n, err := strconv.ParseUint(p.text, 10, 16)
		if err != nil || n == 0 {
			return l, fmt.Errorf("%q is not a port", p.text)
		}
		*p.to = uint16(n)
	}
	if l.Port == l.Listen {
		return l, errors.New("the two are the same")
	}
	return l, nil
}
