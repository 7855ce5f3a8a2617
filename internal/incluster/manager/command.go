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

// options contains the command's flags. The defaults of those about the pod come from the environment, which the
// Deployment fills from the downward API.
type options struct {
	Config
	podIP, account string
	allow, deny    []string
	level          slog.Level
}

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
capability.`,
		Example: `  traffic manager
  traffic manager --listen 127.0.0.1:10800 --log-level debug`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			ctx, stop := signal.NotifyContext(cmd.Context(), os.Interrupt, syscall.SIGTERM)
			defer stop()
			return run(ctx, o)
		},
	}
	f := cmd.Flags()
	f.StringVar(&o.Listen, "listen", net.JoinHostPort("127.0.0.1", strconv.Itoa(api.ManagerPort)),
		"loopback address for sessions")
	f.StringVar(&o.Health, "health", net.JoinHostPort("", strconv.Itoa(api.HealthPort)),
		"address for /livez and /readyz")
	f.StringVar(&o.Proxy, "proxy-listen", net.JoinHostPort("", strconv.Itoa(api.ProxyPort)),
		"address for conns of the transports api-proxy and direct; empty: none")
	f.StringVar(&o.Metrics, "metrics-listen", "", "address for /metrics, for Prometheus; empty: none")
	f.StringVar(&o.PodName, "pod-name", os.Getenv("POD_NAME"), "name of this pod ($POD_NAME)")
	f.StringVar(&o.podIP, "pod-ip", os.Getenv("POD_IP"), "comma-separated addresses of this pod ($POD_IP)")
	f.StringVar(&o.Namespace, "namespace", os.Getenv("POD_NAMESPACE"), "namespace of this pod ($POD_NAMESPACE)")
	f.StringVar(&o.NodeName, "node-name", os.Getenv("NODE_NAME"), "node of this pod ($NODE_NAME)")
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
	f.StringVar(&o.ResolvConf, "resolv-conf", "/etc/resolv.conf",
		"file in which the kubelet names the cluster DNS servers")
	f.StringVar(&o.account, "service-account", serviceAccountDir,
		"directory of the service account's token and ca.crt; without a token there is no API access")
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
	// A session needs no credential but the right to forward a port of the pod.
	if l, err := netip.ParseAddrPort(o.Listen); err != nil || !l.Addr().IsLoopback() {
		return api.Errorf(api.ExitUsage, "--listen %q: sessions are for a loopback address, with its port", o.Listen)
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
	pod, err := api.ParseAddrs(o.podIP)
	if err != nil {
		return api.Errorf(api.ExitUsage, "--pod-ip: %w", err)
	}
	kube, err := kubeClient(o.account, apiServers(os.Getenv))
	if err != nil {
		return err
	}
	if o.Authorize && kube == nil {
		return api.Errorf(api.ExitUsage, "--authorize: this pod has no service account to ask the API server")
	}
	o.Kube, o.APIServer, o.PodIPs = kube, apiServerVIP(os.Getenv), pod
	o.GatewaySocket, o.Logger = api.GatewaySocket, log
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
