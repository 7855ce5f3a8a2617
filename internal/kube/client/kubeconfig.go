package client

import (
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"net"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"

	"golang.org/x/net/http/httpproxy"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/tools/clientcmd"
	clientcmdapi "k8s.io/client-go/tools/clientcmd/api"

	"kubevpn/internal/api"
)

// Inputs are kubectl's inputs: flags and the environment of the process.
type Inputs struct {
	Kubeconfig string    // --kubeconfig; empty: $KUBECONFIG, else ~/.kube/config, else a pod's service account
	Stdin      io.Reader // what --kubeconfig - reads
	// Overrides are the other flags. Prepare ignores ClusterDefaults and Timeout.
	Overrides clientcmd.ConfigOverrides
	// Environ is the caller's environment, for the credential plugin, for ssh and for its proxy variables. The daemon
	// that uses the kubeconfig has another environment.
	Environ []string
	Jump    Jump // before the API server
}

// Prepared is a kubeconfig with one context. It depends on no environment, no current directory and no other file than
// a token file. It contains credentials: pass it only to processes of the same user.
type Prepared struct {
	Kubeconfig []byte
	Credential *api.Credential // what Login returned; Prepare leaves it empty
	Context    string
	Cluster    string // the kubeconfig's name for it
	Namespace  string
	Warning    string // for the user, or empty

	config *clientcmdapi.Config // what Kubeconfig contains; nil: Prepare did not make it
}

// Prepare finds the user's kubeconfig as kubectl does, and makes it self-contained. It only reads files. Errors are
// *api.Error.
func Prepare(in Inputs) (Prepared, error) {
	config, err := in.load()
	if err != nil {
		return Prepared{}, err
	}
	in.choose(config)
	if err := checkContext(config, in.Overrides.ClusterInfo.Server); err != nil {
		return Prepared{}, err
	}
	if config, err = in.merge(config); err != nil {
		return Prepared{}, err
	}
	if err := clientcmdapi.MinifyConfig(config); err != nil {
		return Prepared{}, api.Errorf(api.ExitKubeconfig, "the kubeconfig's context %q: %w", config.CurrentContext, err)
	}
	kctx := config.Contexts[config.CurrentContext]
	if kctx.Namespace == "" {
		kctx.Namespace = "default"
	}
	warning, faulty := prepareUser(config.AuthInfos[kctx.AuthInfo], in)
	if faulty != nil {
		return Prepared{}, faulty
	}
	if err := preparePath(config.Clusters[kctx.Cluster], in); err != nil {
		return Prepared{}, err
	}
	if err := clientcmdapi.FlattenConfig(config); err != nil { // embeds certificates
		return Prepared{}, api.Errorf(api.ExitKubeconfig, "cannot read a file that the kubeconfig names: %w", err).
			WithHint("Correct the path in the kubeconfig, or fetch it again with the cluster's own tool.")
	}
	out, err := clientcmd.Write(*config)
	if err != nil {
		return Prepared{}, api.Errorf(api.ExitKubeconfig, "writing the kubeconfig's context %q: %w",
			config.CurrentContext, err)
	}
	return Prepared{Kubeconfig: out, Context: config.CurrentContext, Cluster: kctx.Cluster, Namespace: kctx.Namespace,
		Warning: warning, config: config}, nil
}

// load reads the kubeconfig.
func (in Inputs) load() (*clientcmdapi.Config, error) {
	if in.Kubeconfig == "-" {
		return loadStdin(in.Stdin)
	}
	rules := in.rules()
	config, err := rules.Load()
	switch {
	case err != nil:
		return nil, loadError(in, err)
	case len(config.Contexts) > 0 || len(config.Clusters) > 0 || in.Overrides.ClusterInfo.Server != "":
		return config, nil
	}
	if pod := inCluster(environment(in.Environ), accountDir); pod != nil && in.Kubeconfig == "" {
		return pod, nil
	}
	return nil, noKubeconfig(rules, environment(in.Environ)["KUBECONFIG"])
}

// maxKubeconfig limits a kubeconfig of the standard input, in bytes.
const maxKubeconfig = 16 << 20

// loadStdin reads a kubeconfig. Its paths are relative to the current directory.
func loadStdin(r io.Reader) (*clientcmdapi.Config, error) {
	text, err := io.ReadAll(io.LimitReader(r, maxKubeconfig))
	var config *clientcmdapi.Config
	if err == nil {
		config, err = clientcmd.Load(text)
	}
	if err == nil && len(config.Clusters) == 0 {
		err = errors.New("it names no cluster")
	}
	if err != nil {
		return nil, api.Errorf(api.ExitKubeconfig, "the kubeconfig of the standard input: %s",
			api.OneLine(err.Error())).
			WithHint("With --kubeconfig -, pass it by a pipe: `my-secrets get kubeconfig | kubevpn connect " +
				"--kubeconfig -`.")
	}
	here, err := filepath.Abs("-")
	if err != nil {
		return nil, api.Errorf(api.ExitUnexpected, "%w", err)
	}
	for _, c := range config.Clusters {
		c.LocationOfOrigin = here
	}
	for _, u := range config.AuthInfos {
		u.LocationOfOrigin = here
	}
	if err := clientcmd.ResolveLocalPaths(config); err != nil {
		return nil, api.Errorf(api.ExitKubeconfig, "the kubeconfig of the standard input: %w", err)
	}
	return config, nil
}

// accountDir is where the kubelet mounts the service account of a pod.
const accountDir = "/var/run/secrets/kubernetes.io/serviceaccount"

// inCluster returns the configuration that a program of a pod has by its service account, or nil. Each request reads
// the token again, because the kubelet renews it.
func inCluster(env map[string]string, dir string) *clientcmdapi.Config {
	host, port, token := env["KUBERNETES_SERVICE_HOST"], env["KUBERNETES_SERVICE_PORT"], filepath.Join(dir, "token")
	if _, err := os.Stat(token); err != nil || host == "" || port == "" {
		return nil
	}
	const name = "in-cluster"
	c := clientcmdapi.NewConfig()
	c.CurrentContext = name
	c.Clusters[name] = &clientcmdapi.Cluster{Server: "https://" + net.JoinHostPort(host, port),
		CertificateAuthority: filepath.Join(dir, "ca.crt")}
	c.AuthInfos[name] = &clientcmdapi.AuthInfo{TokenFile: token}
	namespace, _ := os.ReadFile(filepath.Join(dir, "namespace")) // without it, the namespace is default
	c.Contexts[name] = &clientcmdapi.Context{Cluster: name, AuthInfo: name,
		Namespace: strings.TrimSpace(string(namespace))}
	return c
}

// InPod reports whether the credentials are those of the pod that this program runs in: it is a pod of the cluster.
// No Cluster has none.
func (c *Cluster) InPod() bool {
	return c != nil && c.config.BearerTokenFile == filepath.Join(accountDir, "token")
}

// rules returns where kubectl looks for a kubeconfig.
func (in Inputs) rules() *clientcmd.ClientConfigLoadingRules {
	rules := clientcmd.NewDefaultClientConfigLoadingRules()
	rules.ExplicitPath = in.Kubeconfig
	rules.WarnIfAllMissing = false
	return rules
}

func loadError(in Inputs, err error) *api.Error {
	if in.Kubeconfig != "" && errors.Is(err, os.ErrNotExist) {
		return api.Errorf(api.ExitKubeconfig, "there is no kubeconfig at %s", in.Kubeconfig).
			WithHint("Give --kubeconfig the path of an existing file, or leave it out to use $KUBECONFIG or " +
				"~/.kube/config.")
	}
	return api.Errorf(api.ExitKubeconfig, "the kubeconfig%s", kubeconfigFault(err)).
		WithHint("Correct the file, or fetch it again with the cluster's own tool. `kubectl config view` fails the " +
			"same way.")
}

var (
	faultyFile  = regexp.MustCompile(`^error loading config file "([^"]*)": `)
	faultyRead  = regexp.MustCompile(`^(?:open|read|stat) (\S+): (.+)$`)
	faultyField = regexp.MustCompile(`json: cannot unmarshal (\w+) into Go ` +
		`(?:struct field|value of type) (?:\w+\.)?(\S+)`)
	otherKind = regexp.MustCompile(`no kind "([^"]*)" is registered for version "([^"]*)"`)
)

// kubeconfigFault describes an error of clientcmd for a user: ` bad.yaml is not valid YAML: ...`.
func kubeconfigFault(err error) string {
	text, file := api.OneLine(err.Error()), ""
	if m := faultyFile.FindStringSubmatch(text); m != nil {
		text, file = text[len(m[0]):], " "+m[1]
	}
	if m := faultyRead.FindStringSubmatch(text); m != nil {
		return fmt.Sprintf(" %s cannot be read: %s", m[1], m[2])
	}
	switch m, kind := faultyField.FindStringSubmatch(text), otherKind.FindStringSubmatch(text); {
	case m != nil:
		return fmt.Sprintf("%s has an unexpected %s at %s", file, m[1], m[2])
	case kind != nil:
		return fmt.Sprintf("%s is not a kubeconfig: it contains a %s (%s)", file, kind[1], kind[2])
	case strings.Contains(text, "illegal base64"):
		return file + " has a field with the suffix -data that is not base64"
	}
	return file + " is not valid YAML: " + strings.TrimPrefix(text, "yaml: ")
}

// noKubeconfig returns an error that lists where kubectl looks for a kubeconfig.
func noKubeconfig(rules *clientcmd.ClientConfigLoadingRules, env string) *api.Error {
	var looked []string
	for _, path := range rules.Precedence {
		what := "no such file"
		if _, err := os.Stat(path); err == nil {
			what = "names no cluster"
		}
		looked = append(looked, fmt.Sprintf("%s (%s)", path, what))
	}
	if path := rules.ExplicitPath; path != "" {
		looked = []string{path + " (names no cluster)"}
	} else if env == "" {
		looked = append([]string{"$KUBECONFIG (not set)"}, looked...)
	}
	return api.Errorf(api.ExitKubeconfig, "no kubeconfig: looked at %s", strings.Join(looked, ", ")).
		WithHint("Name one with --kubeconfig FILE or KUBECONFIG=FILE. Clusters hand it out with a command like\n" +
			"`aws eks update-kubeconfig`, `gcloud container clusters get-credentials`, `az aks get-credentials` or " +
			"`kind export kubeconfig`.")
}

// checkContext checks the current context. server is the one that the flags name, or empty.
func checkContext(config *clientcmdapi.Config, server string) *api.Error {
	names := strings.Join(slices.Sorted(maps.Keys(config.Contexts)), ", ")
	if config.CurrentContext == "" {
		return api.Errorf(api.ExitKubeconfig, "the kubeconfig has no current context").
			WithHint("Choose one with --context NAME or `kubectl config use-context NAME`. It has: %s", names)
	}
	kctx := config.Contexts[config.CurrentContext]
	if kctx == nil {
		return api.Errorf(api.ExitKubeconfig, "the kubeconfig has no context %q", config.CurrentContext).
			WithHint("It has: %s", names)
	}
	if c := config.Clusters[kctx.Cluster]; c == nil || c.Server == "" && server == "" {
		return api.Errorf(api.ExitKubeconfig, "the kubeconfig's context %q names the cluster %q, which has no server",
			config.CurrentContext, kctx.Cluster).
			WithHint("`kubectl config view --context %s --minify` shows it.", api.ShellQuote(config.CurrentContext))
	}
	if kctx.AuthInfo != "" && config.AuthInfos[kctx.AuthInfo] == nil {
		return api.Errorf(api.ExitKubeconfig, "the kubeconfig's context %q names the user %q, which does not exist",
			config.CurrentContext, kctx.AuthInfo)
	}
	return nil
}

// prepareUser makes the user's credentials usable from another process. It finds the plugin in PATH; the loading rules
// have made all other paths absolute. It returns a warning for the user, or "".
func prepareUser(user *clientcmdapi.AuthInfo, in Inputs) (warning string, err *api.Error) {
	if user == nil {
		return "", nil
	}
	if p := user.AuthProvider; p != nil {
		return "", api.Errorf(api.ExitKubeconfig,
			"the kubeconfig uses the auth-provider %q, which Kubernetes removed in 1.26", p.Name).
			WithHint("Fetch a new kubeconfig with the cluster's own tool; it will use a credential plugin (exec) " +
				"instead.")
	}
	if user.Exec == nil {
		return "", nil
	}
	env, command := environment(in.Environ), user.Exec.Command
	path, missing := lookPath(command, env["PATH"])
	refusal, warning, err := pluginRefusal(command, path, env)
	if err != nil {
		return "", err
	}
	if missing != nil && refusal == "" {
		return "", api.Errorf(api.ExitExecPlugin, "the kubeconfig's credential plugin %s: %w", command, missing).
			WithHint("%s", cmp.Or(user.Exec.InstallHint, "Install it, or put its folder into PATH."))
	}
	user.Exec.Command = cmp.Or(path, command)
	if err := setExtension(&user.Extensions, refusalExtension, refusal); err != nil {
		return "", err
	}
	return warning, setExtension(&user.Extensions, environExtension, in.Environ)
}

// The extensions of the kubeconfig's user for the credential plugin. Only Prepare writes them.
const (
	environExtension = "kubevpn/environ" // the caller's environment
	refusalExtension = "kubevpn/refusal" // why the caller's kuberc does not allow the plugin; empty: it does
)

// userOf returns the user of the current context, or an empty one.
func userOf(raw *clientcmdapi.Config) *clientcmdapi.AuthInfo {
	if kctx := raw.Contexts[raw.CurrentContext]; kctx != nil && raw.AuthInfos[kctx.AuthInfo] != nil {
		return raw.AuthInfos[kctx.AuthInfo]
	}
	return &clientcmdapi.AuthInfo{}
}

// setExtension writes a value into the extensions of a part of the kubeconfig.
func setExtension(extensions *map[string]runtime.Object, name string, value any) *api.Error {
	text, err := json.Marshal(value)
	if err != nil {
		return api.Errorf(api.ExitUnexpected, "writing the kubeconfig's extension %s: %w", name, err)
	}
	if *extensions == nil {
		*extensions = map[string]runtime.Object{}
	}
	(*extensions)[name] = &runtime.Unknown{Raw: text, ContentType: runtime.ContentTypeJSON}
	return nil
}

// extension reads what setExtension has written. It reports whether there is such an extension.
func extension(extensions map[string]runtime.Object, name string, value any) (bool, error) {
	e, ok := extensions[name].(*runtime.Unknown)
	if !ok {
		return false, nil
	}
	if err := json.Unmarshal(e.Raw, value); err != nil {
		return false, api.Errorf(api.ExitKubeconfig, "the kubeconfig's extension %s: %w", name, err)
	}
	return true, nil
}

// environment converts NAME=value to a map. Of several values the last one counts, as in a process.
func environment(environ []string) map[string]string {
	m := make(map[string]string, len(environ))
	for _, kv := range environ {
		// On Windows, "=C:=C:\dir" is a drive's directory.
		if name, value, ok := strings.Cut(kv, "="); ok && name != "" {
			m[name] = value
		}
	}
	return m
}

// lookPath finds a command in the caller's PATH and makes it absolute.
func lookPath(command, path string) (string, error) {
	if filepath.Base(command) == command && path != os.Getenv("PATH") {
		for _, dir := range filepath.SplitList(path) {
			if found, err := exec.LookPath(filepath.Join(dir, command)); err == nil && filepath.IsAbs(found) {
				return found, nil
			}
		}
		return "", exec.ErrNotFound
	}
	found, err := exec.LookPath(command)
	if err != nil {
		return "", errors.Unwrap(err)
	}
	return filepath.Abs(found)
}

// preparePath writes the jump hosts of the flags into the kubeconfig, or the proxy that the caller's environment names
// for this server.
func preparePath(cluster *clientcmdapi.Cluster, in Inputs) *api.Error {
	if err := prepareJump(cluster, in); err != nil || len(in.Jump.Hosts) > 0 {
		return err
	}
	server, err := url.Parse(cluster.Server)
	if err != nil {
		return api.Errorf(api.ExitKubeconfig, "the kubeconfig's server %q is not a URL: %w", cluster.Server, err)
	}
	if cluster.ProxyURL != "" {
		return nil
	}
	env := proxyFromEnvironment(environment(in.Environ))
	if err := checkProxy(env, server); err != nil {
		return err
	}
	proxy, err := env.ProxyFunc()(server)
	if err != nil {
		return api.Errorf(api.ExitKubeconfig, "the environment's proxy for %s: %w", server.Host, err).
			WithHint("Check HTTPS_PROXY, HTTP_PROXY and NO_PROXY.")
	}
	if proxy != nil {
		cluster.ProxyURL = proxy.String()
	}
	return nil
}

// checkProxy returns an error if the environment's proxy for the server is not a URL. ProxyFunc ignores such a proxy.
func checkProxy(env *httpproxy.Config, server *url.URL) *api.Error {
	value := env.HTTPSProxy
	if server.Scheme == "http" {
		value = env.HTTPProxy
	}
	if _, err := url.Parse(value); err == nil || !strings.Contains(value, "://") {
		return nil
	}
	other := *env
	other.HTTPProxy, other.HTTPSProxy = "http://proxy.invalid", "http://proxy.invalid"
	if via, err := other.ProxyFunc()(server); err == nil && via == nil {
		return nil // NO_PROXY contains the server
	}
	return api.Errorf(api.ExitUsage, "the environment's proxy for %s is not a URL: %s", server.Host, redacted(value)).
		WithHint("Check HTTPS_PROXY and HTTP_PROXY. In the user and the password, write %%25 for %%, %%40 for @, " +
			"%%2F for / and %%20 for a space.")
}

var userInfo = regexp.MustCompile(`://[^"]*@`)

// redacted replaces the users and passwords in the URLs of a text.
func redacted(text string) string { return userInfo.ReplaceAllString(text, "://xxxxx@") }

func proxyFromEnvironment(env map[string]string) *httpproxy.Config {
	return &httpproxy.Config{
		HTTPProxy:  cmp.Or(env["HTTP_PROXY"], env["http_proxy"]),
		HTTPSProxy: cmp.Or(env["HTTPS_PROXY"], env["https_proxy"]),
		NoProxy:    cmp.Or(env["NO_PROXY"], env["no_proxy"]),
		CGI:        env["REQUEST_METHOD"] != "",
	}
}
