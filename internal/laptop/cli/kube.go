package cli

import (
	"maps"
	"slices"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
	"k8s.io/client-go/tools/clientcmd"
	clientcmdapi "k8s.io/client-go/tools/clientcmd/api"

	"kubevpn/internal/config"
	"kubevpn/internal/kube/client"
)

// kubeFlags select the cluster and the user, like the flags of kubectl, and the settings.
type kubeFlags struct {
	in  client.Inputs
	cmd *cobra.Command
}

func (k *kubeFlags) addTo(cmd *cobra.Command, a *app) {
	k.bind(cmd, clientcmd.FlagInfo{LongName: clientcmd.FlagNamespace, ShortName: "n"})
	completeWith(cmd, clientcmd.FlagNamespace, k.completeNamespaces(a))
}

// addClusterTo is addTo without the namespace.
func (k *kubeFlags) addClusterTo(cmd *cobra.Command) { k.bind(cmd, clientcmd.FlagInfo{}) }

func (k *kubeFlags) bind(cmd *cobra.Command, namespace clientcmd.FlagInfo) {
	k.cmd = cmd
	section(cmd, sectionCluster, func(flags *pflag.FlagSet) {
		names := clientcmd.RecommendedConfigOverrideFlags("")
		names.ContextOverrideFlags.Namespace = namespace
		names.ClusterOverrideFlags.APIServer.ShortName = "s"
		names.ClusterOverrideFlags.DisableCompression = clientcmd.FlagInfo{}
		names.AuthOverrideFlags.Username, names.AuthOverrideFlags.Password = clientcmd.FlagInfo{}, clientcmd.FlagInfo{}
		names.Timeout.Default = "10s"
		clientcmd.BindOverrideFlags(&k.in.Overrides, flags, names)
		flags.StringVar(&k.in.Kubeconfig, clientcmd.RecommendedConfigPathFlag, "", "")
		for name, usage := range kubeUsages() {
			if f := flags.Lookup(name); f != nil {
				f.Usage = usage
			}
		}
		config.AddFlags(cmd, config.KeySSHJump)
	})
	for flag, names := range map[string]func(*clientcmdapi.Config) []string{
		clientcmd.FlagContext: func(c *clientcmdapi.Config) []string {
			return slices.Sorted(maps.Keys(c.Contexts))
		},
		clientcmd.FlagClusterName: func(c *clientcmdapi.Config) []string {
			return slices.Sorted(maps.Keys(c.Clusters))
		},
		clientcmd.FlagAuthInfoName: func(c *clientcmdapi.Config) []string {
			return slices.Sorted(maps.Keys(c.AuthInfos))
		},
	} {
		completeWith(cmd, flag, k.completeKubeconfig(names))
	}
}

// kubeUsages returns the help texts of the flags by name.
func kubeUsages() map[string]string {
	return map[string]string{
		clientcmd.RecommendedConfigPathFlag: "path of the kubeconfig, or - for standard input (default: $KUBECONFIG, " +
			"else ~/.kube/config)",
		clientcmd.FlagContext:          "context of the kubeconfig (default: its current context)",
		clientcmd.FlagNamespace:        "namespace (default: that of the context)",
		clientcmd.FlagClusterName:      "cluster of the kubeconfig (default: that of the context)",
		clientcmd.FlagAuthInfoName:     "user of the kubeconfig (default: that of the context)",
		clientcmd.FlagAPIServer:        "URL of the API server (default: that of the cluster)",
		clientcmd.FlagTLSServerName:    "name in the certificate of the API server (default: its host name)",
		clientcmd.FlagInsecure:         "do not verify the certificate of the API server (insecure)",
		clientcmd.FlagCAFile:           "path of the certificate of the API server's certificate authority",
		clientcmd.FlagProxyURL:         "URL of the proxy to the API server",
		clientcmd.FlagBearerToken:      "bearer token, instead of the credentials of the kubeconfig",
		clientcmd.FlagCertFile:         "path of a client certificate, instead of the kubeconfig's credentials",
		clientcmd.FlagKeyFile:          "path of the key of --client-certificate",
		clientcmd.FlagImpersonate:      "user to impersonate",
		clientcmd.FlagImpersonateUID:   "UID to impersonate",
		clientcmd.FlagImpersonateGroup: "group to impersonate; may be repeated",
		clientcmd.FlagTimeout: "time limit for the first answer of the API server, such as 10s or 1m; 0: no " +
			"limit",
	}
}

// chosen reports whether a flag selects a cluster.
func (k *kubeFlags) chosen() bool {
	o := k.in.Overrides
	return k.in.Kubeconfig != "" || o.CurrentContext != "" || o.Context.Cluster != "" || o.ClusterInfo.Server != ""
}

func (k *kubeFlags) prepare(a *app) (client.Prepared, error) {
	cfg, err := k.settings(a)
	if err != nil {
		return client.Prepared{}, err
	}
	in := k.in
	in.Environ, in.Stdin, in.Jump.Hosts = a.environ, a.In, cfg.SSHJump
	if len(in.Jump.Hosts) > 0 {
		paths, err := a.paths()
		if err == nil {
			err = paths.MakeRuntimeDir()
		}
		if err != nil {
			return client.Prepared{}, err
		}
		in.Jump.Dir = paths.RuntimeDir
	}
	prepared, err := client.Prepare(in)
	if prepared.Warning != "" {
		a.Note("warning: %s", prepared.Warning)
	}
	return prepared, err
}
