// Package gateway is `traffic gateway`, the privileged part of the system netstack. It runs beside the traffic manager, in
// an ephemeral container of its pod, and shares the pod's network namespace; the manager's own container has no
// capability.
//
//	manager ── listens on @kubevpn-gateway ◀── dials ── gateway (root, NET_ADMIN, MKNOD, NET_RAW)
//	   │  ── {"networks": ["198.19.0.0/16"]} ──────────▶ TUN device, addresses, routes, forwarding, rules
//	   │  ◀── {"mtu": 1500, ...} + the TUN's descriptor ──
//	 packets ⇄ TUN ⇄ kernel: forwards, masquerades ⇄ eth0 ⇄ pods, Services
//
// The manager reads and writes the packets; the gateway only prepares their way. The connection is the lease: when it ends,
// whoever ended it, the gateway removes what it made and dials again, and at its own end it removes it too. What a gateway
// that was killed left in the pod, the next one removes. Nothing is ever set on the node, and what is in the pod goes with
// its network namespace.
//
//	gateway_linux.go   the connection, and what comes when
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

	"kubevpn/internal/api"
)

// NewCommand returns `traffic gateway`.
func NewCommand() *cobra.Command {
	var level string
	cmd := &cobra.Command{
		Use:   "gateway",
		Short: "Give the traffic manager's pod a TUN device that the kernel forwards and masquerades",
		Long: `Makes a TUN device in the network namespace that it shares with the traffic
manager, turns on forwarding, sets rules that masquerade, and hands the device
to the manager. It removes all of it when the manager's connection ends, and
when it ends itself.

It runs in an ephemeral container of the manager's pod, which kubevpn adds for
who asks for the system netstack. It needs root and the capabilities NET_ADMIN,
MKNOD and NET_RAW, and changes nothing outside the pod.`,
		Example:       "  traffic gateway",
		Args:          cobra.NoArgs,
		SilenceUsage:  true,
		SilenceErrors: true,
		RunE: func(cmd *cobra.Command, _ []string) error {
			var l slog.Level
			if err := l.UnmarshalText([]byte(level)); err != nil {
				return api.Errorf(api.ExitUsage, "--log-level: %w", err)
			}
			ctx, stop := signal.NotifyContext(cmd.Context(), os.Interrupt, syscall.SIGTERM)
			defer stop()
			return run(ctx, slog.New(slog.NewTextHandler(os.Stderr, &slog.HandlerOptions{Level: l})))
		},
	}
	cmd.Flags().StringVar(&level, "log-level", "info", "debug, info, warn or error")
	return cmd
}
