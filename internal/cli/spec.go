package cli

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"

	"github.com/spf13/cobra"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"kubevpn/internal/api"
	"kubevpn/internal/cluster"
	"kubevpn/pkg/match"
)

// specFlags say what an intercept takes, and where that goes.
type specFlags struct {
	headers   []string
	path      string
	methods   []string
	ports     []string
	container string
	mirror    bool
	flush     bool
	tlsSecret string
}

// addMatch adds those that say which requests are meant.
func (f *specFlags) addMatch(cmd *cobra.Command) {
	flags := cmd.Flags()
	// Not a StringSlice: values may have commas.
	flags.StringArrayVar(&f.headers, "headers", nil, "only requests with this header, NAME=VALUE or NAME=~REGEXP; may be repeated: all have to match")
	flags.StringVar(&f.path, "path", "", "only requests for this path or below it, or =~REGEXP")
	flags.StringSliceVar(&f.methods, "method", nil, "only requests of this method; may be repeated: one has to match")
	flags.BoolVar(&f.flush, "flush", false, "end connections that are open already, so that their clients connect anew")
	flags.StringVar(&f.tlsSecret, "tls-secret", "", "Secret of type kubernetes.io/tls with which the application serves TLS, so that headers can match")
	complete(cmd, "method", "GET", "POST", "PUT", "PATCH", "DELETE", "HEAD", "OPTIONS")
}

func (f *specFlags) addTo(cmd *cobra.Command) {
	f.addMatch(cmd)
	flags := cmd.Flags()
	flags.StringSliceVar(&f.ports, "portmap", nil, "port of the container and of this machine, [tcp|udp/]CONTAINER:LOCAL; may be repeated (default all, each to the same)")
	flags.StringVarP(&f.container, "container", "c", "", "container whose ports are meant (default the one that kubectl would take)")
	flags.BoolVar(&f.mirror, "mirror", false, "send this machine a copy; the answers come from the application")
}

// spec is what the flags ask for, but for TLS: that needs the cluster.
func (f *specFlags) spec(mode string) (api.InterceptSpec, error) {
	s := api.InterceptSpec{Container: f.container, Mode: mode, Mirror: f.mirror, Flush: f.flush}
	var m match.Spec
	for _, text := range f.headers {
		h, err := match.ParseHeader(text)
		if err != nil {
			return s, api.Errorf(api.ExitUsage, "--headers: %q is no header", text).
				WithHint("write it like --headers x-user=me, or --headers 'x-user=~me|you' for a regular expression")
		}
		m.Headers = append(m.Headers, h)
		s.Match.Headers = append(s.Match.Headers, api.HeaderMatch{Name: h.Name, Value: h.Value})
	}
	for _, method := range f.methods {
		s.Match.Methods = append(s.Match.Methods, strings.ToUpper(method))
	}
	m.Path, m.Methods = f.path, s.Match.Methods
	s.Match.Path = f.path
	if _, err := match.New(m); err != nil {
		return s, api.Errorf(api.ExitUsage, "%w", err).
			WithHint("values are taken as they are, or, behind =~, as a regular expression (RE2) for the whole text:\n" +
				"--headers x-user=me   --headers 'x-user=~me|you'   --path /api   --path '=~/v[12]/.*'   --method GET")
	}
	for _, text := range f.ports {
		p, err := parsePortMap(text)
		if err != nil {
			return s, api.Errorf(api.ExitUsage, "--portmap: %w", err).
				WithHint("write it like --portmap 8080:3000, --portmap udp/53:5353, or --portmap http:3000 for a port that has a name")
		}
		if i := slices.IndexFunc(s.Ports, func(o api.PortMap) bool {
			return o.Protocol == p.Protocol && o.Container == p.Container && o.Name == p.Name
		}); i >= 0 {
			return s, api.Errorf(api.ExitUsage, "--portmap: %s is given twice", text).WithHint("a port of the container goes to one port of this machine")
		}
		s.Ports = append(s.Ports, p)
	}
	return s, nil
}

// parsePortMap reads [tcp|udp/]CONTAINER[:LOCAL]. CONTAINER may be a port's name; LOCAL is the same port where it is missing.
func parsePortMap(text string) (api.PortMap, error) {
	p := api.PortMap{Protocol: "tcp"}
	rest := text
	if protocol, after, found := strings.Cut(text, "/"); found {
		p.Protocol, rest = strings.ToLower(protocol), after
	}
	if p.Protocol != "tcp" && p.Protocol != "udp" {
		return p, fmt.Errorf("%q: %q is neither tcp nor udp", text, p.Protocol)
	}
	container, local, mapped := strings.Cut(rest, ":")
	number, err := strconv.ParseUint(container, 10, 16)
	switch {
	case err == nil && number > 0:
		p.Container, p.Local = uint16(number), uint16(number)
	case err == nil, errors.Is(err, strconv.ErrRange), !isPortName(container):
		return p, fmt.Errorf("%q: %q is no port of a container", text, container)
	default:
		p.Name = container
	}
	if !mapped {
		return p, nil
	}
	number, err = strconv.ParseUint(local, 10, 16)
	if err != nil || number == 0 {
		return p, fmt.Errorf("%q: %q is no port of this machine", text, local)
	}
	p.Local = uint16(number)
	return p, nil
}

// isPortName reports whether a container's port may have that name: letters, digits and dashes, one of them a letter.
func isPortName(s string) bool {
	return s != "" && strings.Trim(s, "abcdefghijklmnopqrstuvwxyz0123456789-") == "" && strings.ContainsAny(s, "abcdefghijklmnopqrstuvwxyz")
}

// checkWorkloads refuses arguments that are not TYPE/NAME, and says what was probably meant.
func checkWorkloads(cmd *cobra.Command, args []string) error {
	if len(args) == 0 {
		return api.Errorf(api.ExitUsage, "`%s` needs the name of a workload", cmd.CommandPath()).
			WithHint("as TYPE/NAME: `%s deployment/web`", cmd.CommandPath())
	}
	for n, arg := range args {
		kind, name, found := strings.Cut(arg, "/")
		if found && kind != "" && name != "" && !strings.Contains(name, "/") {
			continue
		}
		err := api.Errorf(api.ExitUsage, "%q is not TYPE/NAME", arg)
		switch {
		case found:
			return err.WithHint("write it like deployment/web; the namespace is -n's")
		case n == 0 && len(args) == 2 && !strings.Contains(args[1], "/"):
			return err.WithHint("write it as one word: %s/%s", arg, args[1])
		}
		return err.WithHint("did you mean deployment/%s?", arg)
	}
	return nil
}

// termination reads the Secret with the user's own account.
func termination(ctx context.Context, c *cluster.Cluster, namespace, name string) (*api.TLSTermination, error) {
	secret, err := c.Kube().CoreV1().Secrets(namespace).Get(ctx, name, metav1.GetOptions{})
	if apierrors.IsNotFound(err) {
		return nil, api.Errorf(api.ExitWorkload, "there is no Secret %s in the namespace %s", name, namespace).
			WithHint("`kubectl -n %s get secrets --field-selector type=%s` lists those that could be meant", namespace, corev1.SecretTypeTLS)
	}
	if err != nil {
		return nil, explain(ctx, c, fmt.Errorf("reading the Secret %s/%s: %w", namespace, name, err))
	}
	t := &api.TLSTermination{Certificate: secret.Data[corev1.TLSCertKey], Key: secret.Data[corev1.TLSPrivateKeyKey]}
	if err := checkPair(namespace+"/"+name, t); err != nil {
		return nil, err
	}
	return t, nil
}

// checkPair refuses a Secret that no TLS server could use, before anything is begun.
func checkPair(name string, t *api.TLSTermination) error {
	_, err := tls.X509KeyPair(t.Certificate, t.Key)
	if err == nil {
		return nil
	}
	if len(t.Certificate) == 0 || len(t.Key) == 0 {
		err = fmt.Errorf("it lacks %s or %s", corev1.TLSCertKey, corev1.TLSPrivateKeyKey)
	}
	return api.Errorf(api.ExitWorkload, "the Secret %s cannot be served with: %w", name, err).
		WithHint("--tls-secret wants a Secret of type kubernetes.io/tls, the one that the application uses")
}
