package command

import (
	"context"
	"net"
	"slices"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"kubevpn/internal/api"
	"kubevpn/internal/config"
	"kubevpn/internal/kube/client"
	"kubevpn/internal/kube/install"
	"kubevpn/internal/laptop/cli/term"
	"kubevpn/pkg/host/sandbox"
)

// ConnectionFlags select the cluster and the settings of a connection.
type ConnectionFlags struct {
	ClusterFlags
	Here bool // this process connects, and not the daemon

	// Request sets these.
	Cluster *client.Cluster
	Config  config.Config

	upgrade bool
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
	})
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
	return api.ConnectRequest{
		Kubeconfig: l.Kubeconfig, Credential: l.Credential, Context: l.Prepared.Context,
		Namespace: l.Prepared.Namespace, Upgrade: k.upgrade, ConnectSettings: l.Config.ConnectSettings,
		Settings: l.Config.Settings(),
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
