package command

import (
	"context"
	"fmt"
	"maps"
	"slices"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/client-go/tools/clientcmd"
	clientcmdapi "k8s.io/client-go/tools/clientcmd/api"

	"kubevpn/internal/api"
	"kubevpn/internal/config"
	"kubevpn/internal/kube/client"
	"kubevpn/internal/kube/workloads"
)

// ClusterFlags select the cluster and the user, like the flags of kubectl, and the settings.
type ClusterFlags struct {
	Inputs client.Inputs

	f       *Factory
	cmd     *cobra.Command
	reached *Selection // that of an earlier login
}

// AddTo defines the flags.
func (k *ClusterFlags) AddTo(cmd *cobra.Command, f *Factory) {
	k.bind(cmd, f, clientcmd.FlagInfo{LongName: clientcmd.FlagNamespace, ShortName: "n"})
	CompleteWith(cmd, clientcmd.FlagNamespace, k.CompleteNamespaces)
}

// AddClusterTo is AddTo without the namespace.
func (k *ClusterFlags) AddClusterTo(cmd *cobra.Command, f *Factory) {
	k.bind(cmd, f, clientcmd.FlagInfo{})
}

func (k *ClusterFlags) bind(cmd *cobra.Command, f *Factory, namespace clientcmd.FlagInfo) {
	k.f, k.cmd = f, cmd
	Section(cmd, SectionCluster, func(flags *pflag.FlagSet) {
		names := clientcmd.RecommendedConfigOverrideFlags("")
		names.ContextOverrideFlags.Namespace = namespace
		names.ClusterOverrideFlags.APIServer.ShortName = "s"
		names.ClusterOverrideFlags.DisableCompression = clientcmd.FlagInfo{}
		names.AuthOverrideFlags.Username, names.AuthOverrideFlags.Password = clientcmd.FlagInfo{}, clientcmd.FlagInfo{}
		names.Timeout.Default = "10s"
		clientcmd.BindOverrideFlags(&k.Inputs.Overrides, flags, names)
		flags.StringVar(&k.Inputs.Kubeconfig, clientcmd.RecommendedConfigPathFlag, "", "")
		for name, usage := range kubeUsages() {
			if flag := flags.Lookup(name); flag != nil {
				flag.Usage = usage
			}
		}
		config.AddFlags(cmd, config.KeySSHJump)
	})
	for flag, names := range map[string]func(*clientcmdapi.Config) []string{
		clientcmd.FlagContext:      func(c *clientcmdapi.Config) []string { return keys(c.Contexts) },
		clientcmd.FlagClusterName:  func(c *clientcmdapi.Config) []string { return keys(c.Clusters) },
		clientcmd.FlagAuthInfoName: func(c *clientcmdapi.Config) []string { return keys(c.AuthInfos) },
	} {
		CompleteWith(cmd, flag, k.completeKubeconfig(names))
	}
}

func keys[T any](all map[string]T) []string { return slices.Sorted(maps.Keys(all)) }

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

// Changed reports whether the command line sets a flag.
func (k *ClusterFlags) Changed(flag string) bool { return k.cmd.Flags().Changed(flag) }

// Settings returns the settings, with the flags that were set.
func (k *ClusterFlags) Settings() (config.Config, error) {
	paths, err := k.f.Paths()
	if err != nil {
		return config.Config{}, err
	}
	cfg, err := config.Load(paths.ConfigFile, k.f.Lookup)
	if err == nil {
		err = cfg.ApplyFlags(k.cmd.Flags())
	}
	if err != nil {
		return config.Config{}, err
	}
	return cfg, cfg.CheckDomains()
}

// Selection is what the flags select.
type Selection struct {
	*client.Cluster
	client.Prepared
	Config config.Config
	opened <-chan struct{} // closed when requests have a connection to the API server, which later ones share
}

// Load returns a client for the cluster that the flags select, with the credentials and the settings. It runs no
// credential plugin; the requests of the client do, without a prompt.
func (k *ClusterFlags) Load() (s Selection, err error) {
	if s.Config, err = k.Settings(); err != nil {
		return s, err
	}
	if s.Prepared, err = k.Prepare(&s.Config); err != nil {
		return s, err
	}
	s.Cluster, err = s.Prepared.Load(client.Options{Logger: k.f.Log})
	return s, err
}

// RunningPod returns a workload, TYPE/NAME in the namespace that the flags select, and a running pod of it.
func (s *Selection) RunningPod(ctx context.Context, workload string) (*workloads.Workload, *corev1.Pod, error) {
	w, err := workloads.New(s.Cluster).Workload(ctx, s.Prepared.Namespace, workload)
	if err != nil {
		return nil, nil, err
	}
	pod, err := w.Running(ctx, s.Kube())
	switch {
	case err != nil:
		return nil, nil, s.ExplainContext(ctx, fmt.Errorf("cannot list the pods of %s: %w", w, err))
	case pod == nil:
		return nil, nil, api.Errorf(api.ExitWorkload, "no pod of %s in the namespace %s runs", w, w.Namespace).
			WithHint("`kubectl -n %s get pods` shows them. Scale the workload up, or name another one.",
				api.ShellQuote(w.Namespace))
	}
	return w, pod, nil
}

// Prepare reads the kubeconfig, and resolves the flags.
func (k *ClusterFlags) Prepare(cfg *config.Config) (client.Prepared, error) {
	in := k.Inputs
	in.Environ, in.Stdin, in.Jump.Hosts = k.f.Environ, k.f.In, cfg.SSHJump
	if len(in.Jump.Hosts) > 0 {
		paths, err := k.f.Paths()
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
		k.f.Note("warning: %s", prepared.Warning)
	}
	return prepared, err
}

// ConnectionID returns the ID of the connection to the cluster that the flags select, of whichever user. It returns ""
// if no flag selects a cluster.
func (k *ClusterFlags) ConnectionID(ctx context.Context) (string, error) {
	o := k.Inputs.Overrides
	if k.Inputs.Kubeconfig == "" && o.CurrentContext == "" && o.Context.Cluster == "" && o.ClusterInfo.Server == "" {
		return "", nil
	}
	c, err := k.Load()
	if err != nil {
		return "", err
	}
	status, err := k.f.Status(ctx)
	if err != nil {
		return "", err
	}
	for _, connection := range status.Connections {
		if connection.ClusterID == c.ID() && connection.Status != api.StatusFailed {
			return connection.ID, nil
		}
	}
	return c.ConnectionID(), nil
}
