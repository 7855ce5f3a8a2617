package cli

import (
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"

	"github.com/spf13/cobra"

	"kubevpn/internal/api"
	"kubevpn/pkg/protocol/httpmatch"
)

// specFlags select the requests of an intercept and the ports they go to.
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

// addMatch adds the flags that select requests.
func (f *specFlags) addMatch(cmd *cobra.Command) {
	flags := cmd.Flags()
	// Not a StringSlice: values may have commas.
	flags.StringArrayVar(&f.headers, "headers", nil,
		"only requests with this header, NAME=VALUE or NAME=~REGEXP; may be repeated: all must match")
	flags.StringVar(&f.path, "path", "", "only requests for this path or below it, or =~REGEXP")
	flags.StringSliceVar(&f.methods, "method", nil, "only requests with this method; may be repeated: one must match")
	flags.BoolVar(&f.flush, "flush", false, "close connections that are already open, so that their clients reconnect")
	flags.StringVar(&f.tlsSecret, "tls-secret", "",
		"Secret of type kubernetes.io/tls with which the application serves TLS; required to match headers inside TLS")
	complete(cmd, "method", "GET", "POST", "PUT", "PATCH", "DELETE", "HEAD", "OPTIONS")
}

func (f *specFlags) addTo(cmd *cobra.Command) {
	f.addMatch(cmd)
	flags := cmd.Flags()
	flags.StringSliceVar(&f.ports, "portmap", nil,
		"port of the container and of this machine, [tcp|udp/]CONTAINER:LOCAL; may be repeated (default: all ports, "+
			"each to the same port)")
	flags.StringVarP(&f.container, "container", "c", "",
		"container whose ports are intercepted (default: the one in the annotation "+
			"kubectl.kubernetes.io/default-container, else the only one, else the one with the ports)")
	flags.BoolVar(&f.mirror, "mirror", false,
		"send a copy of the requests to this machine; the application still answers")
}

// spec builds the specification from the flags, without TLS, which needs the cluster.
func (f *specFlags) spec(mode string) (api.InterceptSpec, error) {
	s := api.InterceptSpec{Container: f.container, Mode: mode, Mirror: f.mirror, Flush: f.flush}
	var m httpmatch.Spec
	for _, text := range f.headers {
		h, err := httpmatch.ParseHeader(text)
		if err != nil {
			return s, api.Errorf(api.ExitUsage, "--headers: %q is not a header", text).
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
	if _, err := httpmatch.New(m); err != nil {
		return s, api.Errorf(api.ExitUsage, "%w", err).
			WithHint("a value matches literally or, after =~, as a regular expression (RE2) for the whole text:\n" +
				"--headers x-user=me   --headers 'x-user=~me|you'   --path /api   --path '=~/v[12]/.*'   --method GET")
	}
	for _, text := range f.ports {
		p, err := parsePortMap(text)
		if err != nil {
			return s, api.Errorf(api.ExitUsage, "--portmap: %w", err).
				WithHint("write it like --portmap 8080:3000, --portmap udp/53:5353, or --portmap http:3000 for a " +
					"port that has a name")
		}
		if i := slices.IndexFunc(s.Ports, func(o api.PortMap) bool {
			return o.Protocol == p.Protocol && o.Container == p.Container && o.Name == p.Name
		}); i >= 0 {
			return s, api.Errorf(api.ExitUsage, "--portmap: %s maps a port twice", text).
				WithHint("map each port of the container to one port of this machine")
		}
		s.Ports = append(s.Ports, p)
	}
	return s, nil
}

// parsePortMap parses [tcp|udp/]CONTAINER[:LOCAL]. CONTAINER is a number or the name of a port. LOCAL defaults to the
// same port.
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

// isPortName reports whether s is valid as the name of a container port: letters, digits and dashes, at least one
// letter.
func isPortName(s string) bool {
	return s != "" && strings.Trim(s, "abcdefghijklmnopqrstuvwxyz0123456789-") == "" &&
		strings.ContainsAny(s, "abcdefghijklmnopqrstuvwxyz")
}

// checkWorkloads returns an error for arguments that are not TYPE/NAME, with a suggestion.
func checkWorkloads(cmd *cobra.Command, args []string) error {
	if len(args) == 0 {
		return api.Errorf(api.ExitUsage, "`%s` requires the name of a workload", cmd.CommandPath()).
			WithHint("write it as TYPE/NAME: `%s deployment/web`", cmd.CommandPath())
	}
	for n, arg := range args {
		kind, name, found := strings.Cut(arg, "/")
		if found && kind != "" && name != "" && !strings.Contains(name, "/") {
			continue
		}
		err := api.Errorf(api.ExitUsage, "%q is not TYPE/NAME", arg)
		switch {
		case found:
			return err.WithHint("write it like deployment/web; set the namespace with -n")
		case n == 0 && len(args) == 2 && !strings.Contains(args[1], "/"):
			return err.WithHint("write it as one word: %s/%s", arg, args[1])
		}
		return err.WithHint("did you mean deployment/%s?", arg)
	}
	return nil
}
