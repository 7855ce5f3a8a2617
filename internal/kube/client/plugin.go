package client

import (
	"cmp"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"os/exec"
	goruntime "runtime"
	"slices"
	"strings"
	"time"
	"unicode"

	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/runtime/serializer"
	"k8s.io/client-go/pkg/apis/clientauthentication"
	"k8s.io/client-go/pkg/apis/clientauthentication/install"
	"k8s.io/client-go/rest"
	clientcmdapi "k8s.io/client-go/tools/clientcmd/api"

	"kubevpn/internal/api"
	"kubevpn/pkg/wakeup"
)

const (
	// pluginTimeout limits a run of a kubeconfig's credential plugin without a terminal.
	pluginTimeout = 10 * time.Second
	// credentialMost limits a plugin's answer, in bytes. A certificate with its chain takes about 10 KB.
	credentialMost = 1 << 20
	// interruptTime is the time after a program's end in which the Ctrl-C that ended it may end ctx.
	interruptTime = 100 * time.Millisecond
	// pluginGrace limits the wait for a plugin after its signal, and for the output of its children.
	pluginGrace = 500 * time.Millisecond
)

// Terminal is a terminal on which a credential plugin may ask the user. The zero value means none.
type Terminal struct {
	Stdin  *os.File  // nil: standard input is not a terminal
	Stderr io.Writer // nil: nobody reads the plugin's messages
}

// plugin runs a kubeconfig's credential plugin, as client-go does. client-go's own authenticator does not accept a
// credential from another process.
type plugin struct {
	config  *clientcmdapi.ExecConfig
	cluster *clientauthentication.Cluster // nil unless the kubeconfig sets provideClusterInfo
	timeout time.Duration                 // without a terminal
	environ []string                      // of the caller of Prepare; the kubeconfig's own variables take precedence
	refusal string                        // why the user's kuberc does not allow it; empty: it does
}

// newPlugin removes the plugin from the configuration and returns it. It returns nil if there is none, or if the user
// has other credentials, which kubectl prefers.
func newPlugin(config *rest.Config) (*plugin, error) {
	provider := config.ExecProvider
	if provider == nil {
		return nil, nil
	}
	p := &plugin{config: provider, timeout: pluginTimeout}
	if provider.ProvideClusterInfo {
		var err error
		if p.cluster, err = rest.ConfigToExecCluster(config); err != nil {
			return nil, err
		}
	}
	config.ExecProvider = nil
	if config.BearerToken != "" || config.BearerTokenFile != "" || config.Username != "" || len(config.CertData) > 0 ||
		config.CertFile != "" {
		return nil, nil
	}
	return p, nil
}

// interactive reports whether the plugin may ask the user at t. It fails if the plugin requires a terminal and t has
// none.
func (p *plugin) interactive(t Terminal) (bool, error) {
	switch {
	case p.config.InteractiveMode == clientcmdapi.NeverExecInteractiveMode:
		return false, nil
	case t.Stdin == nil && p.config.InteractiveMode == clientcmdapi.AlwaysExecInteractiveMode:
		return false, p.errorf("needs a terminal, and standard input is not one")
	}
	return t.Stdin != nil, nil
}

// run runs the plugin. On a terminal it has no timeout, and ctx or Ctrl-C ends it. Otherwise run kills it and its
// children after the timeout. Errors are *api.Error, or ctx's.
func (p *plugin) run(ctx context.Context, t Terminal) (*api.Credential, error) {
	if p.refusal != "" {
		return nil, p.errorf("%s", p.refusal).WithHint("If you trust the kubeconfig, add the plugin to " +
			"credentialPluginAllowlist in this file.")
	}
	interactive, err := p.interactive(t)
	if err != nil {
		return nil, err
	}
	info, err := p.info(interactive)
	if err != nil {
		return nil, err
	}
	attended := t.Stdin != nil || t.Stderr != nil
	bounded := ctx
	if !attended {
		var cancel context.CancelFunc
		bounded, cancel = context.WithTimeout(ctx, p.timeout)
		defer cancel()
	}
	cmd := exec.CommandContext(bounded, p.config.Command, p.config.Args...)
	cmd.Env = append(p.env(), "KUBERNETES_EXEC_INFO="+info)
	out, said := &tail{most: credentialMost + 1}, &tail{most: saidMost}
	cmd.Stdout, cmd.Stderr = out, said
	if t.Stderr != nil {
		cmd.Stderr = t.Stderr
	}
	cmd.WaitDelay = pluginGrace
	if interactive {
		cmd.Stdin = t.Stdin
	}
	if attended {
		// To read, it must stay in the terminal's foreground group. It also receives Ctrl-C.
		cmd.Cancel = func() error { return cmd.Process.Signal(os.Interrupt) }
	} else {
		ownGroup(cmd)
	}
	goruntime.LockOSThread() // Linux kills the plugin with the thread that started it
	err = cmd.Run()
	goruntime.UnlockOSThread()
	if errors.Is(err, exec.ErrWaitDelay) {
		err = nil // a child, such as the daemon of a token cache, is still running
	}
	if err != nil {
		return nil, p.failed(ctx, bounded, err, said.String())
	}
	return p.decode(out.bytes())
}

// env returns the environment of the plugin. Of several values of a variable, the last one counts.
func (p *plugin) env() []string {
	own := api.Texts(p.config.Env, func(v clientcmdapi.ExecEnvVar) string { return v.Name + "=" + v.Value })
	return slices.Concat(os.Environ(), p.environ, own)
}

// failed returns the error for a plugin that failed.
func (p *plugin) failed(ctx, bounded context.Context, err error, said string) error {
	if bounded.Err() == nil {
		wakeup.Pause(ctx, interruptTime)
	}
	if ctx.Err() != nil {
		return ctx.Err()
	}
	var exit *exec.ExitError
	switch {
	case bounded.Err() != nil:
		return p.errorf("did not answer within %v and was killed", p.timeout)
	case errors.Is(err, exec.ErrNotFound), errors.Is(err, fs.ErrNotExist):
		return p.errorf("is not installed").WithHint("%s",
			cmp.Or(p.config.InstallHint, "Install it, or put its folder into PATH, then connect again."))
	case !errors.As(err, &exit):
		return p.errorf("cannot be run: %w", err)
	}
	how := exit.String() // a signal
	if code := exit.ExitCode(); code >= 0 {
		how = fmt.Sprintf("exit code %d", code)
	}
	lines := strings.Split(strings.TrimSpace(api.Clean(said)), "\n")
	if last := api.OneLine(lines[len(lines)-1]); last != "" {
		how += ": " + last
	}
	return p.errorf("failed with %s", how)
}

func (p *plugin) errorf(format string, args ...any) *api.Error {
	e := api.Errorf(api.ExitExecPlugin, "the credential plugin %s "+format, append([]any{p.config.Command}, args...)...)
	return e.WithHint("Run it by hand to see what it says, and log in if it asks: `%s`", commandLine(p.command()))
}

// command returns the plugin's arguments, its path first.
func (p *plugin) command() []string { return append([]string{p.config.Command}, p.config.Args...) }

// commandLine returns argv with shell quotes.
func commandLine(argv []string) string {
	return strings.Join(api.Texts(argv, api.ShellQuote), " ")
}

// info returns the value of KUBERNETES_EXEC_INFO.
func (p *plugin) info(interactive bool) (string, error) {
	gv, err := schema.ParseGroupVersion(p.config.APIVersion)
	if err != nil {
		return "", p.errorf("has an invalid apiVersion in the kubeconfig: %w", err)
	}
	request := &clientauthentication.ExecCredential{
		Spec: clientauthentication.ExecCredentialSpec{Interactive: interactive, Cluster: p.cluster},
	}
	data, err := runtime.Encode(credentialCodecs().LegacyCodec(gv), request)
	if err != nil {
		return "", p.errorf("has an unknown apiVersion in the kubeconfig: %s", p.config.APIVersion)
	}
	return string(data), nil
}

func credentialCodecs() serializer.CodecFactory {
	scheme := runtime.NewScheme()
	install.Install(scheme)
	return serializer.NewCodecFactory(scheme)
}

func (p *plugin) decode(out []byte) (*api.Credential, error) {
	c, err := decodeCredential(out, p.config.APIVersion)
	if err != nil {
		return nil, p.errorf("printed an invalid credential: %w", err)
	}
	return c, nil
}

// decodeCredential reads a plugin's answer, an ExecCredential of that version in JSON or YAML. Its errors contain
// nothing of the answer, which may contain secrets.
func decodeCredential(out []byte, apiVersion string) (*api.Credential, error) {
	if len(out) > credentialMost {
		return nil, fmt.Errorf("it is larger than %d bytes", credentialMost)
	}
	var answer clientauthentication.ExecCredential
	object, kind, err := credentialCodecs().UniversalDecoder(clientauthentication.SchemeGroupVersion).Decode(out, nil,
		&answer)
	switch {
	case err != nil || object != runtime.Object(&answer):
		return nil, errors.New("it is not an ExecCredential")
	case kind.GroupVersion().String() != apiVersion:
		return nil, fmt.Errorf("the kubeconfig wants apiVersion %s, and it is %s", apiVersion,
			api.CleanLine(kind.GroupVersion().String()))
	case answer.Status == nil:
		return nil, errors.New("it has no status")
	}
	c := &api.Credential{Token: answer.Status.Token, Certificate: answer.Status.ClientCertificateData,
		Key: answer.Status.ClientKeyData}
	if t := answer.Status.ExpirationTimestamp; t != nil {
		c.Expires = t.Time
	}
	_, err = checkCredential(c)
	return c, err
}

// checkCredential returns the client certificate, or nil if there is none. It fails if no request can use the
// credential.
func checkCredential(c *api.Credential) (*tls.Certificate, error) {
	switch {
	case c.Token == "" && c.Certificate == "" && c.Key == "":
		return nil, errors.New("it has neither a token nor a certificate")
	case (c.Certificate == "") != (c.Key == ""):
		return nil, errors.New("it needs both a certificate and a key")
	case strings.IndexFunc(c.Token, func(r rune) bool { return r > unicode.MaxASCII || !unicode.IsPrint(r) }) >= 0:
		return nil, errors.New("its token has characters that are invalid in an HTTP header")
	}
	if c.Certificate == "" {
		return nil, nil
	}
	cert, err := tls.X509KeyPair([]byte(c.Certificate), []byte(c.Key))
	if err != nil {
		return nil, errors.New("its certificate and key do not match")
	}
	return &cert, nil
}
