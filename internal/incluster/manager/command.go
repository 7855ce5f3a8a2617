package manager

import (
	"context"
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"os"
	"os/signal"
	"runtime/debug"
	"slices"
	"strconv"
	"syscall"

	"github.com/spf13/cobra"
	"k8s.io/apimachinery/pkg/util/validation"
	"k8s.io/klog/v2"

	"kubevpn/internal/api"
)

// options contains the command's flags.
type options struct {
	Config
	allow, deny []string
	level       slog.Level
}

// sessionsAddress is on the loopback interface, because a session needs no credential but the right to forward a port
// of the pod.
var sessionsAddress = net.JoinHostPort("127.0.0.1", strconv.Itoa(api.ManagerPort))

// NewCommand returns `traffic manager`.
func NewCommand() *cobra.Command {
	var o options
	cmd := &cobra.Command{
		Use:   "manager",
		Short: "Run the traffic manager, which serves the laptops of a cluster",
		Long: `Serves the laptops that are connected to this cluster, from its Deployment.

It accepts sessions on the pod's loopback interface, which only users who may
forward ports of its pod can reach. The whole cluster can reach its proxy port,
which sends nothing to a client without a ticket of a session. It needs no
capability.

$POD_NAME, $POD_NAMESPACE and $NODE_NAME are names, and $POD_IP the addresses of
this pod, separated by commas.`,
		Example: `  traffic manager
  traffic manager --log-level debug`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			ctx, stop := signal.NotifyContext(cmd.Context(), os.Interrupt, syscall.SIGTERM)
			defer stop()
			return run(ctx, o)
		},
	}
	f := cmd.Flags()
	f.StringVar(&o.Health, "health", net.JoinHostPort("", strconv.Itoa(api.HealthPort)),
		"address for /livez and /readyz")
	f.StringVar(&o.Proxy, "proxy-listen", net.JoinHostPort("", strconv.Itoa(api.ProxyPort)),
		"address for conns of the transports api-proxy and direct; empty: none")
	f.StringVar(&o.Metrics, "metrics-listen", "", "address for /metrics, for Prometheus; empty: none")
	f.StringSliceVar(&o.WatchNamespaces, "watch-namespaces", nil,
		"comma-separated namespaces whose Services to watch; empty: all")
	f.StringSliceVar(&o.allow, "allow-cidr", nil,
		"comma-separated networks; the manager dials no other address for laptops; empty: all")
	f.StringSliceVar(&o.deny, "deny-cidr", nil,
		"comma-separated networks that the manager does not dial for laptops, also if --allow-cidr contains them")
	f.StringSliceVar(&o.AllowNamespaces, "allow-namespaces", nil,
		"comma-separated namespaces whose Services and pods laptops may reach, in the gvisor netstack; empty: all")
	f.BoolVar(&o.Authorize, "authorize", false,
		"let laptops reach only pods of which their user may forward ports, in the gvisor netstack")
	f.TextVar(&o.level, "log-level", slog.LevelInfo, "debug, info, warn or error")
	return cmd
}

func run(ctx context.Context, o options) error {
	log := slog.New(slog.NewTextHandler(os.Stderr, &slog.HandlerOptions{Level: o.level}))
	klog.SetSlogLogger(log.With("from", "client-go"))
	// The manager allocates little per byte carried (buffers are pooled), so a small heap costs little time: half
	// as much garbage as Go's default keeps it well under 40 MB. The Deployment sets GOMEMLIMIT, below the container's
	// limit.
	if os.Getenv("GOGC") == "" {
		debug.SetGCPercent(50)
	}
	for flag, namespaces := range map[string][]string{"watch": o.WatchNamespaces, "allow": o.AllowNamespaces} {
		for _, ns := range namespaces {
			if len(validation.IsDNS1123Label(ns)) > 0 {
				return api.Errorf(api.ExitUsage, "--%s-namespaces: %q is not the name of a namespace", flag, ns)
			}
		}
	}
	for _, ns := range o.AllowNamespaces {
		if len(o.WatchNamespaces) > 0 && !slices.Contains(o.WatchNamespaces, ns) {
			return api.Errorf(api.ExitUsage, "--allow-namespaces: --watch-namespaces lacks %q", ns)
		}
	}
	var err error
	if o.AllowCIDRs, err = parseNetworks("--allow-cidr", o.allow); err != nil {
		return err
	}
	if o.DenyCIDRs, err = parseNetworks("--deny-cidr", o.deny); err != nil {
		return err
	}
	if o.PodIPs, err = api.ParseAddrs(os.Getenv("POD_IP")); err != nil {
		return api.Errorf(api.ExitUsage, "$POD_IP: %w", err)
	}
	kube, err := kubeClient(serviceAccountDir, apiServers(os.Getenv))
	if err != nil {
		return err
	}
	if o.Authorize && kube == nil {
		return api.Errorf(api.ExitUsage, "--authorize: this pod has no service account to ask the API server")
	}
	o.PodName, o.Namespace, o.NodeName = os.Getenv("POD_NAME"), os.Getenv("POD_NAMESPACE"), os.Getenv("NODE_NAME")
	o.Kube, o.APIServer = kube, apiServerVIP(os.Getenv)
	o.Listen, o.ResolvConf, o.GatewaySocket = sessionsAddress, "/etc/resolv.conf", api.GatewaySocket
	o.Logger = log
	return New(o.Config).Run(ctx)
}

// parseNetworks parses the networks of a flag. An error ends the manager: a limit with a typing error would not limit.
func parseNetworks(flag string, texts []string) ([]netip.Prefix, error) {
	var all []netip.Prefix
	for _, text := range texts {
		p, err := netip.ParsePrefix(text)
		if err == nil && (p.Masked() != p || p.Addr().Is4In6()) {
			err = fmt.Errorf("the network of %s is %s", text, p.Masked())
		}
		if err != nil {
			return nil, api.Errorf(api.ExitUsage, "%s: %w", flag, err)
		}
		all = append(all, p)
	}
	return all, nil
}
