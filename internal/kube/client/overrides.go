package client

import (
	"cmp"
	"path/filepath"
	"reflect"
	"strings"

	"k8s.io/client-go/tools/clientcmd"
	clientcmdapi "k8s.io/client-go/tools/clientcmd/api"

	"kubevpn/internal/api"
)

// choose makes the context of the flags the current one, with the cluster, user and namespace of the flags. If there is
// none, flags that name a cluster or a server make one.
func (in Inputs) choose(config *clientcmdapi.Config) {
	o := in.Overrides
	config.CurrentContext = cmp.Or(o.CurrentContext, config.CurrentContext)
	if name := cmp.Or(o.Context.Cluster, o.ClusterInfo.Server); config.CurrentContext == "" && name != "" {
		config.CurrentContext = name
		config.Contexts[name] = &clientcmdapi.Context{Cluster: name}
		if o.Context.Cluster == "" {
			config.Clusters[name] = clientcmdapi.NewCluster()
		}
	}
	kctx := config.Contexts[config.CurrentContext]
	if kctx == nil {
		return // checkContext reports it
	}
	kctx.Cluster = cmp.Or(o.Context.Cluster, kctx.Cluster)
	kctx.AuthInfo = cmp.Or(o.Context.AuthInfo, kctx.AuthInfo)
	kctx.Namespace = cmp.Or(o.Context.Namespace, kctx.Namespace)
}

// merge applies the flags for the server and the user to those of the current context.
func (in Inputs) merge(config *clientcmdapi.Config) (*clientcmdapi.Config, error) {
	o := clientcmd.ConfigOverrides{AuthInfo: in.Overrides.AuthInfo, ClusterInfo: in.Overrides.ClusterInfo}
	if len(o.AuthInfo.ImpersonateGroups) == 0 {
		o.AuthInfo.ImpersonateGroups = nil
	}
	if reflect.ValueOf(o.AuthInfo).IsZero() && reflect.ValueOf(o.ClusterInfo).IsZero() {
		return config, nil // the library would also check files, with other messages
	}
	for _, path := range []*string{
		&o.AuthInfo.ClientCertificate, &o.AuthInfo.ClientKey, &o.ClusterInfo.CertificateAuthority,
	} {
		if *path == "" {
			continue
		}
		absolute, err := filepath.Abs(*path) // else it would be relative to the kubeconfig
		if err != nil {
			return nil, api.Errorf(api.ExitUsage, "%w", err)
		}
		*path = absolute
	}
	replaceCredentials(config, o.AuthInfo)
	overriding := clientcmd.NewNonInteractiveClientConfig(*config, config.CurrentContext, &o, nil)
	merged, err := overriding.MergedRawConfig()
	if err != nil {
		text := strings.TrimPrefix(api.OneLine(redacted(err.Error())), "invalid configuration: ")
		return nil, api.Errorf(api.ExitUsage, "the flags do not fit the kubeconfig's context %q: %s",
			config.CurrentContext, text).
			WithHint("`kubectl config view --minify` with the same flags prints what they are combined with.")
	}
	return &merged, nil
}

// replaceCredentials removes the current user's credentials if the flags contain others. The API server would prefer a
// client certificate to the token of a flag. The name of the new user identifies the credentials, see idsOf.
func replaceCredentials(config *clientcmdapi.Config, given clientcmdapi.AuthInfo) {
	if given.Token == "" && given.ClientCertificate == "" {
		return
	}
	kctx, user := config.Contexts[config.CurrentContext], clientcmdapi.NewAuthInfo()
	if old := config.AuthInfos[kctx.AuthInfo]; old != nil {
		user.Impersonate, user.ImpersonateUID = old.Impersonate, old.ImpersonateUID
		user.ImpersonateGroups, user.ImpersonateUserExtra = old.ImpersonateGroups, old.ImpersonateUserExtra
	}
	kctx.AuthInfo = "flags-" + shortHash(given.Token+"\n"+given.ClientCertificate)
	config.AuthInfos[kctx.AuthInfo] = user
}
