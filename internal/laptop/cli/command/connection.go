package command

import (
	"context"
	"net"
	"slices"
	"strings"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"kubevpn/internal/api"
	"kubevpn/internal/config"
	"kubevpn/internal/kube/client"
	"kubevpn/internal/kube/install"
	"kubevpn/internal/kube/workloads"
	"kubevpn/internal/laptop/cli/term"
	"kubevpn/pkg/host/sandbox"
)

// ConnectionFlags select the cluster and the settings of a connection.
type ConnectionFlags struct {
	ClusterFlags
	Here bool   // this process connects, and not the daemon
	Own  bool   // the program has a network or a proxy of its own
	Via  string // TYPE/NAME: connections leave from inside a pod of it; empty: from the traffic manager

	// Request sets these.
	Cluster *client.Cluster
	Config  config.Config

	egress        string
	upgrade, keep bool
}

// AddTo defines the flags, and those of more settings.
func (k *ConnectionFlags) AddTo(cmd *cobra.Command, f *Factory, more ...config.Key) {
	k.AddWithoutImage(cmd, f, append([]config.Key{config.KeyImage}, more...)...)
}

// AddWithoutImage is AddTo for a command whose --image has another meaning. Environment and file can still set the
// image of the traffic manager.
func (k *ConnectionFlags) AddWithoutImage(cmd *cobra.Command, f *Factory, more ...config.Key) {
	k.ClusterFlags.AddTo(cmd, f)
	Section(cmd, SectionConnection, func(flags *pflag.FlagSet) {
		config.AddFlags(cmd, slices.Concat(config.ConnectionKeys(), config.ObjectKeys(), []config.Key{config.KeyYes},
			more)...)
		flags.BoolVar(&k.upgrade, "upgrade", false,
			"replace a traffic manager of another version; interrupts the connections of all users")
		flags.BoolVar(&k.keep, "keep", false,
			"keep a traffic manager that kubevpn installs into your namespace; else it goes when no laptop uses it")
	})
}

// AddVia defines --via and --egress.
func (k *ConnectionFlags) AddVia(cmd *cobra.Command) {
	cmd.Flags().StringVar(&k.Via, "via", "",
		"TYPE/NAME of a workload: connections to the cluster leave from inside one of its pods, so that "+
			"NetworkPolicies, service meshes and allow-lists see the pod")
	CompleteWith(cmd, "via", k.CompleteWorkloads)
	k.AddEgress(cmd, "via")
}

// AddEgress defines --egress, which requires the flag via.
func (k *ConnectionFlags) AddEgress(cmd *cobra.Command, via string) {
	cmd.Flags().StringVar(&k.egress, "egress", api.EgressCluster,
		"what leaves through the pod of --"+via+": connections to the \"cluster\", or \"all\", also to the internet")
	Complete(cmd, "egress", api.EgressCluster, api.EgressAll)
}

// IsWorkload reports whether a text is TYPE/NAME.
func IsWorkload(text string) bool {
	kind, name, found := strings.Cut(text, "/")
	return found && kind != "" && name != "" && !strings.Contains(name, "/")
}

// checkVia checks the flags of AddVia against the settings.
func (k *ConnectionFlags) checkVia(c config.Config) error {
	usage := func(text string, args ...any) *api.Error { return api.Errorf(api.ExitUsage, text, args...) }
	switch {
	case !slices.Contains([]string{"", api.EgressCluster, api.EgressAll}, k.egress):
		return usage("--egress: %q is neither %s nor %s", k.egress, api.EgressCluster, api.EgressAll)
	case k.Via == "" && k.egress == api.EgressAll:
		return usage("--egress all says what leaves through a pod, and connections leave from the traffic manager").
			WithHint("name a workload with --via, or use `kubevpn dev --via-pod`")
	case k.Via == "":
		return nil
	case !IsWorkload(k.Via):
		return usage("--via: %q is not TYPE/NAME", k.Via).
			WithHint("write it like deployment/web; set the namespace with -n")
	case c.Netstack == api.NetstackSystem:
		return usage("connections through a pod need the netstack gvisor, and the netstack is set to system (%s)",
			c.Setting(config.KeyNetstack).Source).WithHint("add --netstack gvisor")
	case k.egress == api.EgressAll && !k.Own:
		return usage("--egress all needs a network of the program's own: on this machine's it would carry off the "+
			"connections of all programs, also that of kubevpn to the API server").
			WithHint("use `kubevpn run --via %s --egress all -- COMMAND`, or `kubevpn connect --socks`", k.Via)
	}
	kind, name, _ := strings.Cut(k.Via, "/")
	if known, ok := workloads.BuiltinKind(kind); ok {
		k.Via = known.Type + "/" + name // requests with one meaning are equal
	}
	return nil
}

// Request builds the request from the settings and the kubeconfig, after the API server has answered.
func (k *ConnectionFlags) Request(ctx context.Context, on func(api.Event)) (api.ConnectRequest, error) {
	prepare := func(ctx context.Context, l Selection) {
		k.f.Daemon().Prepare(ctx, api.ConnectRequest{
			Kubeconfig: l.Kubeconfig, Credential: l.Credential, Namespace: l.Prepared.Namespace,
			ConnectSettings: l.Config.ConnectSettings,
		})
	}
	if k.Here {
		prepare = nil
	}
	l, err := k.LoginWithDefaults(ctx, on, prepare)
	if err != nil {
		return api.ConnectRequest{}, err
	}
	k.Cluster, k.Config = l.Cluster, l.Config
	if err := k.checkVia(l.Config); err != nil {
		return api.ConnectRequest{}, err
	}
	return api.ConnectRequest{
		Kubeconfig: l.Kubeconfig, Credential: l.Credential, Context: l.Prepared.Context,
		Namespace: l.Prepared.Namespace, Upgrade: k.upgrade, Keep: k.keep, ConnectSettings: l.Config.ConnectSettings,
		Settings: l.Config.Settings(), Via: k.Via, Egress: k.egress,
	}, nil
}

// Consenting completes the Consent of req, which Request returned.
func (k *ConnectionFlags) Consenting(req *api.ConnectRequest, output *term.Format, quiet func()) Consenting {
	return Consenting{
		Factory: k.f, Cluster: k.Cluster, Consent: &req.Consent, Yes: k.Config.Yes, Batch: !output.ForPeople(),
		Quiet: quiet,
		Find: func(ctx context.Context) error {
			_, err := install.Find(ctx, k.Cluster, req.ManagerNamespace, req.Namespace, req.Consent)
			return err
		},
	}
}

// Hold keeps a connection, and the intercepts of the request, in this process, with the consent of the user: see
// Programs.Hold.
func (k *ConnectionFlags) Hold(ctx context.Context, req api.InterceptRequest, place sandbox.Place, proxy net.Listener,
	output *term.Format, on func(api.Event), quiet func()) error {
	if proxy != nil { // settings of the configuration file that require a device
		req.Connect.Netstack, req.Connect.AllowInbound = "", nil
	}
	return k.Consenting(&req.Connect, output, quiet).Run(ctx, on, func(on func(api.Event)) error {
		return k.f.Hold(ctx, req, place, proxy, on)
	})
}

// ListenProxy listens at the address of --socks, which must be a loopback address: the protocols are not encrypted.
func ListenProxy(text string) (net.Listener, error) {
	at, err := config.ParseLoopback(text, "the password and the traffic")
	if err != nil {
		return nil, api.Errorf(api.ExitUsage, "--socks: %w", err).
			WithHint("use a loopback address and a port, such as 127.0.0.1:1080")
	}
	l, err := net.Listen("tcp", at.String())
	if err != nil {
		return nil, api.Errorf(api.ExitNetwork, "--socks: cannot listen on %s: %w", at, err).
			WithHint("use another port, or port 0 for a free one")
	}
	return l, nil
}
