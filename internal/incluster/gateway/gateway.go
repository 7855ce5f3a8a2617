//go:build linux

// Package gateway implements `traffic gateway`, the privileged part of the system netstack. It runs in an ephemeral
// container of the traffic manager's pod and shares the pod's network namespace. The manager's own container has no
// capabilities.
//
//	manager ── listens on @kubevpn-gateway ◀── dials ── gateway (root, NET_ADMIN, MKNOD, NET_RAW)
//	   │  ── {"networks": ["198.19.0.0/16"]} ──────────▶ TUN device, addresses, routes, forwarding, rules
//	   │  ◀── {"mtu": 1500, ...} + the TUN's descriptor ──
//	 packets ⇄ TUN ⇄ kernel: forwards, masquerades ⇄ eth0 ⇄ pods, Services
//
// The manager reads and writes the packets; the gateway only configures the pod's network. The connection is the lease:
// when it ends, for whatever reason, the gateway removes the device, routes and rules, and dials again. It also removes
// them when it ends itself, and the next gateway removes what a killed one left in the pod. The gateway changes nothing
// on the node, and its changes in the pod end with the pod's network namespace.
//
//	gateway_linux.go   the connection to the manager
//	network_linux.go   the device, addresses, routes, forwarding
//	firewall_linux.go  rules, by iptables of either backend
//	device_linux.go    /dev/net/tun
package gateway

import (
	"log/slog"
	"os"
	"os/signal"
	"syscall"

	"github.com/spf13/cobra"
)

// NewCommand returns `traffic gateway`.
func NewCommand() *cobra.Command {
	var level slog.Level
	cmd := &cobra.Command{
		Use:   "gateway",
		Short: "Create the TUN device of the traffic manager's pod",
		Long: `Creates a TUN device in the network namespace that it shares with the traffic
manager, enables forwarding, adds rules that masquerade, and sends the device to
the manager. It removes all of this when the manager's connection ends, and when
the gateway ends.

It runs in an ephemeral container of the manager's pod, which kubevpn adds for
the system netstack. It needs root and the capabilities NET_ADMIN, MKNOD and
NET_RAW, and changes nothing outside the pod.`,
		Example: "  traffic gateway",
		Args:    cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			ctx, stop := signal.NotifyContext(cmd.Context(), os.Interrupt, syscall.SIGTERM)
			defer stop()
			return run(ctx, slog.New(slog.NewTextHandler(os.Stderr, &slog.HandlerOptions{Level: level})))
		},
	}
	cmd.Flags().TextVar(&level, "log-level", slog.LevelInfo, "debug, info, warn or error")
	return cmd
}
