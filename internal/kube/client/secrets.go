package client

import (
	"maps"
	"net/url"
	"os"
	"slices"

	clientcmdapi "k8s.io/client-go/tools/clientcmd/api"

	"kubevpn/internal/api"
)

// Secrets returns the secrets of all users and proxies of the kubeconfig and of the flags, and those in files that they
// name. It ignores what it cannot read.
func (in Inputs) Secrets() (secrets []string) {
	config, err := in.rules().Load()
	if err != nil {
		config = clientcmdapi.NewConfig()
	}
	config.AuthInfos[""] = &in.Overrides.AuthInfo
	config.Clusters[""] = &in.Overrides.ClusterInfo
	for _, user := range config.AuthInfos {
		secrets = append(secrets, user.Token, user.Password, string(user.ClientKeyData))
		for _, file := range []string{user.TokenFile, user.ClientKey} {
			if text, err := os.ReadFile(file); err == nil {
				secrets = append(secrets, string(text))
			}
		}
		if user.AuthProvider != nil {
			secrets = slices.AppendSeq(secrets, maps.Values(user.AuthProvider.Config))
		}
		if user.Exec != nil {
			secrets = append(secrets,
				api.Texts(user.Exec.Env, func(v clientcmdapi.ExecEnvVar) string { return v.Value })...)
		}
	}
	for _, c := range config.Clusters {
		if proxy, err := url.Parse(c.ProxyURL); err == nil && proxy.User != nil {
			password, _ := proxy.User.Password()
			secrets = append(secrets, password, proxy.User.String())
		}
	}
	return secrets
}

// Secrets returns the secrets of the user's credentials. Those of a credential plugin change.
func (c *Cluster) Secrets() []string {
	config := c.credentials()
	return []string{config.BearerToken, config.Password, string(config.KeyData)}
}
