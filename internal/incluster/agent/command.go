//go:build linux

package agent

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"os"
	"os/signal"
	"strconv"
	"strings"
	"syscall"

	"github.com/spf13/cobra"

	"kubevpn/internal/api"
	"kubevpn/internal/process/footprint"
	"kubevpn/pkg/host/redirect"
)

// options are the command's flags and environment.
type options struct {
	listen           []string
	level            slog.Level
	owner, ownerName string
	podIPs           string
	infoPort         string
	node, pod        string
}

// NewCommand returns `traffic agent`.
func NewCommand() *cobra.Command {
	var o options
	cmd := &cobra.Command{
		Use:   "agent",
		Short: "Forward requests of a pod to the laptops that intercept them",
		Long: `Forwards the requests of a pod that laptops intercept to them, and all others to
the application.

It runs in a container that kubevpn adds to the pod: an ephemeral container, as
root with the capability NET_ADMIN, or a sidecar without capabilities (--listen).
The first line on standard output tells the owner's laptop where to connect; the
log is on standard error.

$` + api.AgentOwnerVariable + ` is the hash of the owner's public key, and $` + api.AgentNameVariable + `
the owner's name. $` + api.AgentAddressesVariable + ` has the addresses of the pod, separated by commas.
$` + api.AgentInfoPortVariable + ` is a port of 127.0.0.1 that serves the first line
as well, for a minute. $` + api.AgentNodeVariable + ` is the address of the pod's node, and
$` + api.AgentPodVariable + ` has facts of the pod's spec, such as probes, as JSON.`,
		Example: `  traffic agent
  traffic agent --listen 8080:18080`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			o.owner, o.ownerName = os.Getenv(api.AgentOwnerVariable), os.Getenv(api.AgentNameVariable)
			o.podIPs = os.Getenv(api.AgentAddressesVariable)
			o.infoPort = os.Getenv(api.AgentInfoPortVariable)
			o.node, o.pod = os.Getenv(api.AgentNodeVariable), os.Getenv(api.AgentPodVariable)
			ctx, stop := signal.NotifyContext(cmd.Context(), os.Interrupt, syscall.SIGTERM)
			defer stop()
			return run(ctx, o)
		},
	}
	f := cmd.Flags()
	f.StringSliceVar(&o.listen, "listen", nil,
		"[tcp/|udp/]PORT:LISTEN, for a sidecar: the application's port, and the port on which to listen for it")
	f.TextVar(&o.level, "log-level", slog.LevelInfo, "debug, info, warn or error")
	return cmd
}

func run(ctx context.Context, o options) error {
	footprint.HalveProcessors()
	if o.owner == "" {
		return api.Errorf(api.ExitUsage, "set $%s to the hash of the owner's public key", api.AgentOwnerVariable)
	}
	cfg := Config{
		Owner: o.owner, OwnerName: o.ownerName, Socket: api.AgentSocket, Output: os.Stdout,
		Logger: slog.New(slog.NewTextHandler(os.Stderr, &slog.HandlerOptions{Level: o.level})),
	}
	var err error
	if o.infoPort != "" {
		if cfg.InfoPort, err = parsePort(o.infoPort); err != nil {
			return api.Errorf(api.ExitUsage, "$%s: %w", api.AgentInfoPortVariable, err)
		}
	}
	if cfg.PodIPs, err = podIPs(o.podIPs); err != nil {
		return api.Errorf(api.ExitUsage, "$%s: %w", api.AgentAddressesVariable, err)
	}
	if o.pod != "" {
		if err := json.Unmarshal([]byte(o.pod), &cfg.Pod); err != nil {
			return api.Errorf(api.ExitUsage, "$%s: %w", api.AgentPodVariable, err)
		}
	}
	node, err := api.ParseAddrs(o.node)
	if err != nil {
		return api.Errorf(api.ExitUsage, "$%s: %w", api.AgentNodeVariable, err)
	}
	// The kubelet connects from the node's address or, depending on the network plugin, from that of the pod's router.
	if cfg.CheckedFrom, err = redirect.Neighbors(node...); err != nil {
		cfg.Logger.Warn("probes that come from the pod's router may go to laptops", "err", err)
	}
	for _, text := range o.listen {
		l, err := parseListen(text)
		if err != nil {
			return api.Errorf(api.ExitUsage, "--listen %s: %w", text, err)
		}
		cfg.Listen = append(cfg.Listen, l)
	}
	return New(cfg).Run(ctx)
}

// podIPs parses the addresses of the pod. It has one at least.
func podIPs(text string) ([]netip.Addr, error) {
	ips, err := api.ParseAddrs(text)
	if err == nil && len(ips) == 0 {
		err = errors.New("no address")
	}
	return ips, err
}

// parseListen reads "[tcp/|udp/]PORT:LISTEN".
func parseListen(text string) (api.AgentPort, error) {
	l := api.AgentPort{Protocol: "tcp"}
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
	var err error
	if l.Port, err = parsePort(application); err != nil {
		return l, err
	}
	if l.Listen, err = parsePort(listen); err != nil {
		return l, err
	}
	return l, checkSidecar(l)
}

func parsePort(text string) (uint16, error) {
	n, err := strconv.ParseUint(text, 10, 16)
	if err != nil || n == 0 {
		return 0, fmt.Errorf("%q is not a port", text)
	}
	return uint16(n), nil
}

// checkSidecar validates the port of a sidecar, which may come from another process of the pod.
func checkSidecar(l api.AgentPort) error {
	switch {
	case l.Protocol != "tcp" && l.Protocol != "udp":
		return fmt.Errorf("%q is not tcp or udp", l.Protocol)
	case l.Port == 0 || l.Listen == 0:
		return errors.New("0 is not a port")
	case l.Port == l.Listen:
		return errors.New("the two are the same")
	}
	return nil
}
