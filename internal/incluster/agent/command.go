//go:build linux

package agent

import (
	"cmp"
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

// NewCommand returns `traffic agent`.
func NewCommand() *cobra.Command {
	var listen []string
	var ready uint16
	var level slog.Level
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
			ctx, stop := signal.NotifyContext(cmd.Context(), os.Interrupt, syscall.SIGTERM)
			defer stop()
			return run(ctx, listen, ready, level)
		},
	}
	f := cmd.Flags()
	f.StringSliceVar(&listen, "listen", nil,
		"[tcp/|udp/]PORT:LISTEN, for a sidecar: the application's port, and the port on which to listen for it")
	f.Uint16Var(&ready, "ready", 0, "port at which to answer readiness probes in place of an application")
	f.TextVar(&level, "log-level", slog.LevelInfo, "debug, info, warn or error")
	return cmd
}

func run(ctx context.Context, listen []string, ready uint16, level slog.Level) error {
	footprint.HalveProcessors()
	cfg := Config{
		Owner: os.Getenv(api.AgentOwnerVariable), OwnerName: os.Getenv(api.AgentNameVariable),
		Socket: api.AgentSocket, Output: os.Stdout, ReadyPort: ready,
		Logger: slog.New(slog.NewTextHandler(os.Stderr, &slog.HandlerOptions{Level: level})),
	}
	if cfg.Owner == "" {
		return api.Errorf(api.ExitUsage, "set $%s to the hash of the owner's public key", api.AgentOwnerVariable)
	}
	var err error
	if port := os.Getenv(api.AgentInfoPortVariable); port != "" {
		if cfg.InfoPort, err = parsePort(port); err != nil {
			return api.Errorf(api.ExitUsage, "$%s: %w", api.AgentInfoPortVariable, err)
		}
	}
	if cfg.PodIPs, err = podIPs(os.Getenv(api.AgentAddressesVariable)); err != nil {
		return api.Errorf(api.ExitUsage, "$%s: %w", api.AgentAddressesVariable, err)
	}
	if pod := os.Getenv(api.AgentPodVariable); pod != "" {
		if err := json.Unmarshal([]byte(pod), &cfg.Pod); err != nil {
			return api.Errorf(api.ExitUsage, "$%s: %w", api.AgentPodVariable, err)
		}
	}
	node, err := api.ParseAddrs(os.Getenv(api.AgentNodeVariable))
	if err != nil {
		return api.Errorf(api.ExitUsage, "$%s: %w", api.AgentNodeVariable, err)
	}
	// The kubelet connects from the node's address or, depending on the network plugin, from that of the pod's router.
	if cfg.CheckedFrom, err = redirect.Neighbors(node...); err != nil {
		cfg.Logger.Warn("probes that come from the pod's router may go to laptops", "err", err)
	}
	for _, text := range listen {
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
		l.Protocol, text = protocol, rest
	}
	application, listen, found := strings.Cut(text, ":")
	if !found {
		return l, errors.New("not PORT:LISTEN")
	}
	var errs [2]error
	l.Port, errs[0] = parsePort(application)
	l.Listen, errs[1] = parsePort(listen)
	return l, cmp.Or(errs[0], errs[1], checkSidecar(l))
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
