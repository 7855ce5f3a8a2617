package workload

import (
	"errors"
	"fmt"
	"net"
	"net/http"
	"regexp"
	"slices"
	"strconv"
	"strings"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
	"k8s.io/apimachinery/pkg/api/resource"
	"k8s.io/apimachinery/pkg/util/validation"

	"kubevpn/internal/api"
	"kubevpn/internal/config"
	"kubevpn/internal/laptop/cli/command"
	"kubevpn/pkg/protocol/httpmatch"
)

// specFlags select the requests of an intercept and the ports they go to.
type specFlags struct {
	headers   []string
	baggage   []string
	cookies   []string
	query     []string
	method    string // of gRPC
	cache     bool
	far       bool // --no-shortcut
	path      string
	methods   []string
	ports     []string
	portmap   []string // ports in the order CONTAINER:LOCAL
	container string
	mirror    bool
	flush     bool
	tlsSecret string
	record    int
}

// addMatch adds the flags that select requests.
func (f *specFlags) addMatch(cmd *cobra.Command) {
	flags := cmd.Flags()
	// Not a StringSlice: values may have commas.
	flags.StringArrayVarP(&f.headers, "headers", "H", nil,
		"only requests with this header, NAME=VALUE or NAME=~REGEXP; may be repeated: all must match")
	flags.StringArrayVar(&f.baggage, "baggage", nil,
		"only requests with this member of the header baggage, KEY=VALUE or KEY=~REGEXP; may be repeated: all must "+
			"match")
	flags.StringArrayVar(&f.cookies, "cookie", nil,
		"only requests with this cookie, NAME=VALUE or NAME=~REGEXP; may be repeated: all must match")
	flags.StringArrayVar(&f.query, "query", nil,
		"only requests with this parameter in the query, NAME=VALUE or NAME=~REGEXP; may be repeated: all must match")
	flags.StringVar(&f.path, "path", "", "only requests for this path or below it, or =~REGEXP")
	flags.StringSliceVar(&f.methods, "method", nil, "only requests with this method; may be repeated: one must match")
	flags.StringVar(&f.method, "grpc-method", "", "only gRPC calls of this PACKAGE.SERVICE or PACKAGE.SERVICE/METHOD")
	flags.BoolVar(&f.flush, "flush", false, "close connections that are already open, so that their clients reconnect")
	flags.StringVar(&f.tlsSecret, "tls-secret", "",
		"Secret of type kubernetes.io/tls with which the application serves TLS; required to match headers inside TLS")
	command.Complete(cmd, "method", "GET", "POST", "PUT", "PATCH", "DELETE", "HEAD", "OPTIONS")
}

// addCache adds --cache.
func (f *specFlags) addCache(cmd *cobra.Command) {
	cmd.Flags().BoolVar(&f.cache, "cache", false,
		"let browsers and caches keep the answers (default: answers to GET and HEAD get 'Cache-Control: no-store', so "+
			"that none comes again after the intercept)")
}

// addShortcut adds --no-shortcut.
func (f *specFlags) addShortcut(cmd *cobra.Command) {
	cmd.Flags().BoolVar(&f.far, "no-shortcut", false, "let requests of programs of this machine pass the cluster, too "+
		"(default: those that match do not leave this machine)")
}

func (f *specFlags) addTo(cmd *cobra.Command) {
	f.addTarget(cmd)
	f.addCache(cmd)
	f.addShortcut(cmd)
	cmd.Flags().BoolVar(&f.mirror, "mirror", false,
		"send a copy of the requests to this machine; the application still answers")
}

// defaultContainer describes which container a command chooses, in the usage of --container.
const defaultContainer = "(default: the one in the annotation kubectl.kubernetes.io/default-container, " +
	"else the only one, else the one with a port to which a Service sends)"

// addTarget adds the flags for the match, the ports and the container.
func (f *specFlags) addTarget(cmd *cobra.Command) {
	f.addMatch(cmd)
	flags := cmd.Flags()
	flags.StringSliceVar(&f.ports, "port", nil, "port of this machine and of the container, "+
		"[tcp|udp/]LOCAL:CONTAINER, [tcp|udp/]PORT for the same port, or [tcp|udp/]CONTAINER=HOST:PORT for a program "+
		"in a container or virtual machine; may be repeated (default: all ports, each to the same port)")
	flags.StringSliceVar(&f.portmap, "portmap", nil,
		"deprecated, use --port; the ports are in the order [tcp|udp/]CONTAINER:LOCAL")
	flags.StringVarP(&f.container, "container", "c", "",
		"container whose ports are intercepted (default: the one in the annotation "+
			"kubectl.kubernetes.io/default-container, else the only one, else the one with the ports)")
}

// addRecord adds --record.
func (f *specFlags) addRecord(cmd *cobra.Command) {
	cmd.Flags().IntVar(&f.record, "record", 0, fmt.Sprintf("how many of the last requests to keep for "+
		"'kubevpn requests', at most %d", api.MaxKept))
}

// spec builds the specification from the flags, without TLS, which needs the cluster.
func (f *specFlags) spec(mode string) (api.InterceptSpec, error) {
	s := api.InterceptSpec{Container: f.container, Mode: mode, Mirror: f.mirror, Flush: f.flush, Cache: f.cache,
		NoShortcut: f.far, Record: f.record}
	if f.record < 0 || f.record > api.MaxKept {
		return s, api.Errorf(api.ExitUsage, "--record %d is not between 0 and %d", f.record, api.MaxKept)
	}
	var err error
	if s.Match, err = f.match(); err != nil {
		return s, err
	}
	s.Ports, err = f.portMaps()
	return s, err
}

// match builds the match from the flags.
func (f *specFlags) match() (m httpmatch.Spec, err error) {
	for _, part := range []struct {
		flag  string
		texts []string
		to    *[]httpmatch.Named
	}{{"headers", f.headers, &m.Headers}, {"baggage", f.baggage, &m.Baggage}, {"cookie", f.cookies, &m.Cookies},
		{"query", f.query, &m.Query}} {
		for _, text := range part.texts {
			n, err := httpmatch.ParseNamed(text)
			if err != nil {
				return m, api.Errorf(api.ExitUsage, "--%s: %w", part.flag, err).
					WithHint("write it like --%[1]s user=me, or --%[1]s 'user=~me|you' for a regular expression",
						part.flag)
			}
			*part.to = append(*part.to, n)
		}
	}
	m.Methods, m.Path = api.Texts(f.methods, strings.ToUpper), f.path
	if f.method != "" {
		if m.Path != "" || len(m.Methods) > 0 {
			return m, api.Errorf(api.ExitUsage, "--grpc-method selects the path and the method").
				WithHint("leave out --path and --method")
		}
		if !grpcMethod.MatchString(f.method) {
			return m, api.Errorf(api.ExitUsage, "--grpc-method: %q is no service or method of gRPC", f.method).
				WithHint("write it like --grpc-method shop.v1.Cart or --grpc-method shop.v1.Cart/AddItem")
		}
		m.Path, m.Methods = "/"+strings.TrimPrefix(f.method, "/"), []string{http.MethodPost}
	}
	if _, err := httpmatch.New(m); err != nil {
		return m, api.Errorf(api.ExitUsage, "%w", err).
			WithHint("a value matches literally or, after =~, as a regular expression (RE2) for the whole text:\n" +
				"--headers x-user=me   --headers 'x-user=~me|you'   --path /api   --path '=~/v[12]/.*'   --method GET")
	}
	return m, nil
}

// selects reports whether a flag selects requests or ports.
func (f *specFlags) selects() bool {
	m, err := f.match()
	return err != nil || !m.IsZero() || len(f.ports) > 0
}

// grpcMethod is the path of a gRPC call, or of all calls to a service, with or without the slash before it:
// https://github.com/grpc/grpc/blob/master/doc/PROTOCOL-HTTP2.md#requests
var grpcMethod = regexp.MustCompile(`^/?\w+(\.\w+)*(/\w+)?$`)

// portMaps returns the ports of --port and --portmap.
func (f *specFlags) portMaps() (ports []api.PortMap, err error) {
	add := func(flag, text, example string, parse func(string) (api.PortMap, error)) error {
		p, err := parse(text)
		if err != nil {
			return api.Errorf(api.ExitUsage, "--%s: %w", flag, err).WithHint("%s", example)
		}
		if slices.ContainsFunc(ports, func(o api.PortMap) bool {
			return o.Protocol == p.Protocol && o.Container == p.Container && o.Name == p.Name
		}) {
			return api.Errorf(api.ExitUsage, "--%s: %s maps a port twice", flag, text).
				WithHint("map each port of the container to one port of this machine")
		}
		ports = append(ports, p)
		return nil
	}
	for _, text := range f.ports {
		if err := add("port", text, "write it like --port 3000:8080, --port udp/5353:53, --port 3000:http for a port "+
			"that has a name, or --port 8080=172.17.0.5:3000 for a program in a container or virtual machine",
			parsePort); err != nil {
			return nil, err
		}
	}
	for _, text := range f.portmap {
		if err := add("portmap", text, "write it like --port 3000:8080: the port of this machine first",
			parsePortMap); err != nil {
			return nil, err
		}
	}
	return ports, nil
}

// checkMatch returns an error if the settings require a match in the namespace and spec has none.
func checkMatch(cfg *config.Config, spec api.InterceptSpec, namespace string) error {
	if !spec.Match.IsZero() || !cfg.RequireMatch.Requires(namespace) {
		return nil
	}
	return api.Errorf(api.ExitMatch, "an intercept in the namespace %s requires a match, so that others keep their "+
		"requests: requireMatch is set by %s", namespace, cfg.Setting(config.KeyRequireMatch).Source).
		WithHint("Select your requests, for example with --headers x-user=me or --baggage user=me.\n" +
			"To take all requests nevertheless: --require-match=false")
}

// parsePort parses [tcp|udp/][LOCAL:]CONTAINER or [tcp|udp/]CONTAINER=HOST:LOCAL. CONTAINER is a number or the name of
// a port. LOCAL defaults to the same port.
func parsePort(text string) (api.PortMap, error) {
	protocol, rest := cutProtocol(text)
	if container, place, other := strings.Cut(rest, "="); other {
		host, local, err := net.SplitHostPort(place)
		if err != nil || host == "" {
			return api.PortMap{}, fmt.Errorf("%q: %q is not HOST:PORT", text, place)
		}
		p, err := newPortMap(text, protocol, container, local, true)
		p.Host = host
		return p, err
	}
	local, container, mapped := strings.Cut(rest, ":")
	if !mapped {
		container = local
	}
	return newPortMap(text, protocol, container, local, mapped)
}

// parsePortMap is parsePort for [tcp|udp/]CONTAINER[:LOCAL].
func parsePortMap(text string) (api.PortMap, error) {
	protocol, rest := cutProtocol(text)
	container, local, mapped := strings.Cut(rest, ":")
	return newPortMap(text, protocol, container, local, mapped)
}

func cutProtocol(text string) (protocol, rest string) {
	if protocol, rest, found := strings.Cut(text, "/"); found {
		return protocol, rest
	}
	return "tcp", text
}

// newPortMap returns the port map with these parts of text.
func newPortMap(text, protocol, container, local string, mapped bool) (api.PortMap, error) {
	p := api.PortMap{Protocol: strings.ToLower(protocol)}
	if p.Protocol != "tcp" && p.Protocol != "udp" {
		return p, fmt.Errorf("%q: %q is neither tcp nor udp", text, p.Protocol)
	}
	number, err := strconv.ParseUint(container, 10, 16)
	switch {
	case err == nil && number > 0:
		p.Container, p.Local = uint16(number), uint16(number)
	case err == nil, errors.Is(err, strconv.ErrRange), len(validation.IsValidPortName(container)) > 0:
		return p, fmt.Errorf("%q: %q is not a container port", text, container)
	default:
		p.Name = container
	}
	if !mapped {
		return p, nil
	}
	number, err = strconv.ParseUint(local, 10, 16)
	if err != nil || number == 0 {
		return p, fmt.Errorf("%q: %q is not a local port", text, local)
	}
	p.Local = uint16(number)
	return p, nil
}

// oneWorkload returns the check of a command that takes one TYPE/NAME, before --. hint helps a user who gave more.
func oneWorkload(hint string) cobra.PositionalArgs {
	return func(cmd *cobra.Command, args []string) error {
		if n := cmd.ArgsLenAtDash(); n >= 0 {
			args = args[:n]
		}
		if len(args) > 1 {
			return api.Errorf(api.ExitUsage, "`%s` takes one workload", cmd.CommandPath()).WithHint("%s", hint)
		}
		return checkWorkloads(cmd, args)
	}
}

// checkWorkloads returns an error for arguments that are not TYPE/NAME, with a suggestion.
func checkWorkloads(cmd *cobra.Command, args []string) error {
	if len(args) == 0 {
		return api.Errorf(api.ExitUsage, "`%s` requires the name of a workload", cmd.CommandPath()).
			WithHint("write it as TYPE/NAME: `%s deployment/web`", cmd.CommandPath())
	}
	for n, arg := range args {
		if command.IsWorkload(arg) {
			continue
		}
		err := api.Errorf(api.ExitUsage, "%q is not TYPE/NAME", arg)
		switch {
		case strings.Contains(arg, "/"):
			return err.WithHint("write it like deployment/web; set the namespace with -n")
		case n == 0 && len(args) == 2 && !strings.Contains(args[1], "/"):
			return err.WithHint("write it as one word: %s/%s", arg, args[1])
		}
		return err.WithHint("did you mean deployment/%s?", arg)
	}
	return nil
}

// addBody adds --body: how many bytes of each body to keep.
func addBody(cmd *cobra.Command, limit *int, usage string) *pflag.Flag {
	usage += fmt.Sprintf(", at most %dKi", api.MaxRecordedBody>>10)
	cmd.Flags().Func("body", usage, func(s string) error {
		q, err := resource.ParseQuantity(s)
		if err != nil || q.Sign() < 0 || q.Value() > api.MaxRecordedBody {
			return fmt.Errorf("must be a number of bytes up to %dKi", api.MaxRecordedBody>>10)
		}
		*limit = int(q.Value())
		return nil
	})
	return cmd.Flag("body")
}
