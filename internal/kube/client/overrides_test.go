package client

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"k8s.io/client-go/tools/clientcmd"
	clientcmdapi "k8s.io/client-go/tools/clientcmd/api"

	"kubevpn/internal/api"
)

func inContext(name, namespace string) clientcmd.ConfigOverrides {
	return clientcmd.ConfigOverrides{CurrentContext: name, Context: clientcmdapi.Context{Namespace: namespace}}
}

// TestPrepareMergesFlags shows the cluster, the server and the user of the kubeconfig that the daemon receives.
func TestPrepareMergesFlags(t *testing.T) {
	type user = clientcmdapi.AuthInfo
	type server = clientcmdapi.Cluster
	tests := []struct {
		name   string
		flags  clientcmd.ConfigOverrides
		server server // of the kubeconfig's only cluster
		user   user   // without a name: that of the kubeconfig
	}{
		{"none", clientcmd.ConfigOverrides{},
			server{Server: "https://10.0.0.1:6443", CertificateAuthorityData: []byte("CA")},
			user{ClientCertificateData: []byte("CERT"), ClientKeyData: []byte("key"), TokenFile: "DIR/.kube/token"}},
		{"--as, --as-group and --as-uid", clientcmd.ConfigOverrides{AuthInfo: user{Impersonate: "bob", ImpersonateGroups: []string{"ops", "qa"}, ImpersonateUID: "7"}},
			server{Server: "https://10.0.0.1:6443", CertificateAuthorityData: []byte("CA")},
			user{ClientCertificateData: []byte("CERT"), ClientKeyData: []byte("key"), TokenFile: "DIR/.kube/token",
				Impersonate: "bob", ImpersonateGroups: []string{"ops", "qa"}, ImpersonateUID: "7"}},
		{"--token replaces certificate and token file", clientcmd.ConfigOverrides{AuthInfo: user{Token: "t"}},
			server{Server: "https://10.0.0.1:6443", CertificateAuthorityData: []byte("CA")}, user{Token: "t"}},
		{"--token replaces a credential plugin that is not installed", clientcmd.ConfigOverrides{CurrentContext: "absent", AuthInfo: user{Token: "t"}},
			server{Server: "https://far.example:6443", InsecureSkipTLSVerify: true}, user{Token: "t"}},
		{"--client-certificate and --client-key, relative to the working directory", clientcmd.ConfigOverrides{AuthInfo: user{ClientCertificate: "my.crt", ClientKey: "my.key"}},
			server{Server: "https://10.0.0.1:6443", CertificateAuthorityData: []byte("CA")},
			user{ClientCertificateData: []byte("MY CERT"), ClientKeyData: []byte("MY KEY")}},
		{"--user", clientcmd.ConfigOverrides{CurrentContext: "two", Context: clientcmdapi.Context{AuthInfo: "dev"}},
			server{Server: "https://far.example:6443", InsecureSkipTLSVerify: true},
			user{ClientCertificateData: []byte("CERT"), ClientKeyData: []byte("key"), TokenFile: "DIR/.kube/token"}},
		{"--cluster", clientcmd.ConfigOverrides{Context: clientcmdapi.Context{Cluster: "far"}},
			server{Server: "https://far.example:6443", InsecureSkipTLSVerify: true},
			user{ClientCertificateData: []byte("CERT"), ClientKeyData: []byte("key"), TokenFile: "DIR/.kube/token"}},
		{"--server and --tls-server-name", clientcmd.ConfigOverrides{ClusterInfo: server{Server: "https://[::1]:6443", TLSServerName: "kubernetes"}, AuthInfo: user{Token: "t"}},
			server{Server: "https://[::1]:6443", TLSServerName: "kubernetes", CertificateAuthorityData: []byte("CA")}, user{Token: "t"}},
		{"--insecure-skip-tls-verify drops the authority", clientcmd.ConfigOverrides{ClusterInfo: server{InsecureSkipTLSVerify: true}, AuthInfo: user{Token: "t"}},
			server{Server: "https://10.0.0.1:6443", InsecureSkipTLSVerify: true}, user{Token: "t"}},
		{"--certificate-authority, relative to the working directory", clientcmd.ConfigOverrides{ClusterInfo: server{CertificateAuthority: "my.crt"}, AuthInfo: user{Token: "t"}},
			server{Server: "https://10.0.0.1:6443", CertificateAuthorityData: []byte("MY CERT")}, user{Token: "t"}},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			dir, environ := home(t, twoContexts)
			t.Chdir(dir)
			for name, text := range map[string]string{"my.crt": "MY CERT", "my.key": "MY KEY"} {
				if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o600); err != nil {
					t.Fatal(err)
				}
			}
			p, err := Prepare(Inputs{Overrides: tt.flags, Environ: environ})
			if err != nil {
				t.Fatal(err)
			}
			config, err := clientcmd.Load(p.Kubeconfig)
			if err != nil {
				t.Fatal(err)
			}
			kctx := config.Contexts[p.Context]
			if len(config.Contexts) != 1 || len(config.Clusters) != 1 || len(config.AuthInfos) != 1 || kctx == nil {
				t.Fatalf("not minified:\n%s", p.Kubeconfig)
			}
			gotServer, gotUser := *config.Clusters[kctx.Cluster], *config.AuthInfos[kctx.AuthInfo]
			gotServer.Extensions, gotUser.Extensions, gotUser.ImpersonateUserExtra = nil, nil, nil
			gotUser.TokenFile = strings.Replace(gotUser.TokenFile, dir, "DIR", 1)
			if d := cmp.Diff(tt.server, gotServer); d != "" {
				t.Errorf("server (-want +got):\n%s", d)
			}
			if d := cmp.Diff(tt.user, gotUser); d != "" {
				t.Errorf("user (-want +got):\n%s", d)
			}
		})
	}
}

func TestPrepareNeedsNoKubeconfigWithServer(t *testing.T) {
	_, environ := home(t, "")
	p, err := Prepare(Inputs{Environ: environ, Overrides: clientcmd.ConfigOverrides{
		ClusterInfo: clientcmdapi.Cluster{Server: "https://10.0.0.1:6443"}, AuthInfo: clientcmdapi.AuthInfo{Token: "t"},
	}})
	if err != nil {
		t.Fatal(err)
	}
	c, err := Load(p.Kubeconfig, Options{})
	if err != nil {
		t.Fatal(err)
	}
	if p.Namespace != "default" || c.Server() != "https://10.0.0.1:6443" || c.config.BearerToken != "t" {
		t.Fatalf("%+v: server %s, token %q", p, c.Server(), c.config.BearerToken)
	}
}

func TestPrepareRejectsFlagsThatDoNotFit(t *testing.T) {
	tests := []struct {
		name    string
		flags   clientcmd.ConfigOverrides
		code    api.ExitCode
		message string
	}{
		{"no such user", clientcmd.ConfigOverrides{Context: clientcmdapi.Context{AuthInfo: "bob"}}, api.ExitKubeconfig, `the kubeconfig's context "one" names the user "bob", which does not exist`},
		{"no such cluster", clientcmd.ConfigOverrides{Context: clientcmdapi.Context{Cluster: "moon"}}, api.ExitKubeconfig, `the kubeconfig's context "one" names the cluster "moon", which has no server`},
		{"group without a user", clientcmd.ConfigOverrides{AuthInfo: clientcmdapi.AuthInfo{ImpersonateGroups: []string{"ops"}}}, api.ExitUsage, `the flags do not fit the kubeconfig's context "one": requesting uid, groups or user-extra for dev without impersonating a user`},
		{"certificate without a key", clientcmd.ConfigOverrides{AuthInfo: clientcmdapi.AuthInfo{ClientCertificate: "/dev/null"}}, api.ExitUsage, `the flags do not fit the kubeconfig's context "one": client-key-data or client-key must be specified for `},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			_, environ := home(t, twoContexts)
			_, err := Prepare(Inputs{Overrides: tt.flags, Environ: environ})
			var e *api.Error
			if !errors.As(err, &e) || e.Code != tt.code || !strings.HasPrefix(e.Message, tt.message) {
				t.Fatalf("%v; want code %d and %q", err, tt.code, tt.message)
			}
		})
	}
}

func TestConnectionIDCoversUserAndImpersonation(t *testing.T) {
	user := func(u clientcmdapi.AuthInfo) clientcmd.ConfigOverrides {
		return clientcmd.ConfigOverrides{AuthInfo: u}
	}
	type auth = clientcmdapi.AuthInfo
	different := map[string]clientcmd.ConfigOverrides{
		"no flag":        {},
		"--user":         {Context: clientcmdapi.Context{AuthInfo: "plugin"}},
		"--token":        user(auth{Token: "t"}),
		"another token":  user(auth{Token: "u"}),
		"--as":           user(auth{Impersonate: "bob"}),
		"--as another":   user(auth{Impersonate: "eve"}),
		"--as-group":     user(auth{Impersonate: "bob", ImpersonateGroups: []string{"ops"}}),
		"--as-uid":       user(auth{Impersonate: "bob", ImpersonateUID: "7"}),
		"--as and token": user(auth{Impersonate: "bob", Token: "t"}),
	}
	_, environ := home(t, twoContexts)
	identify := func(o clientcmd.ConfigOverrides) IDs {
		p, err := Prepare(Inputs{Overrides: o, Environ: environ})
		if err != nil {
			t.Fatal(err)
		}
		ids, err := Identify(p.Kubeconfig)
		if err != nil {
			t.Fatal(err)
		}
		return ids
	}
	cluster, seen := identify(clientcmd.ConfigOverrides{}).Cluster, map[string]string{}
	for name, o := range different {
		ids := identify(o)
		if other, twice := seen[ids.Connection]; twice || len(ids.Connection) != 12 {
			t.Errorf("%s and %s have the ID %q", name, other, ids.Connection)
		}
		seen[ids.Connection] = name
		if ids.Cluster != cluster || ids != identify(o) {
			t.Errorf("%s: %+v, then %+v; the cluster is %s", name, ids, identify(o), cluster)
		}
	}
	if other := identify(inContext("", "shop")); seen[other.Connection] != "no flag" {
		t.Error("the namespace changes the ID")
	}
}
