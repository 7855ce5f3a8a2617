package docker

import (
	"slices"
	"strconv"
	"strings"

	"kubevpn/internal/api"
)

// Arguments are flags of `docker run` for the main container.
type Arguments struct {
	Rest         []string // passed to docker unchanged
	Publish      []string // ports of the network container, which also gets AddHosts
	AddHosts     []string
	Capabilities []string // to add
	Entrypoint   *string  // replaces the pod's program
	Interactive  bool
	TTY          bool
}

// switches are the flags of `docker run` that take no value; all others do.
var switches = []string{
	"d", "detach", "disable-content-trust", "help", "i", "init", "interactive", "no-healthcheck", "oom-kill-disable",
	"P", "privileged",
	"publish-all", "q", "quiet", "read-only", "rm", "sig-proxy", "t", "tty", "use-api-socket",
}

// refused maps flags that are not supported to the reason.
var refused = map[string]string{
	"detach":     "the container ends with this command",
	"restart":    "the container ends with this command",
	"name":       "kubevpn finds its containers by their names",
	"env":        "use `kubevpn dev --env NAME=VALUE`, which keeps the value out of the engine's configuration",
	"env-file":   "use `kubevpn dev --env-file FILE`, which keeps the values out of the engine's configuration",
	"hostname":   "the container gets the pod's host name",
	"domainname": "the container gets the pod's host name",
	"uts":        "the container gets the pod's host name",
	"sig-proxy":  "`kubevpn dev` forwards signals itself",
	"help":       "`docker run --help` lists the flags",

	"network": whyNetwork, "net": whyNetwork, "network-alias": whyNetwork, "net-alias": whyNetwork, "link": whyNetwork,
	"link-local-ip": whyNetwork,
	"ip":            whyNetwork, "ip6": whyNetwork, "mac-address": whyNetwork, "dns": whyNetwork,
	"dns-search": whyNetwork, "dns-option": whyNetwork, "dns-opt": whyNetwork,
	"expose": whyPorts, "publish-all": whyPorts,
}

const (
	whyNetwork = "the container uses the network and the DNS of the cluster"
	whyPorts   = "publish each port with -p 8080:80"
)

// long maps letters to the names of flags that add handles.
var long = map[string]string{
	"d": "detach", "e": "env", "h": "hostname", "i": "interactive", "p": "publish", "P": "publish-all", "t": "tty",
}

// ParseArguments parses the flags after --. Errors are *api.Error.
func ParseArguments(args []string) (Arguments, error) {
	var a Arguments
	for len(args) > 0 {
		word := args[0]
		args = args[1:]
		name, value, valued := strings.Cut(strings.TrimPrefix(word, "--"), "=")
		switch {
		case word == "--" || !strings.HasPrefix(word, "-") || word == "-":
			return a, api.Errorf(api.ExitUsage, "%q is not a flag of `docker run`", word).
				WithHint("write only flags after --; " +
					"--image chooses another image, and -- --entrypoint another program")
		case !strings.HasPrefix(word, "--"):
			// Letters: -it, -p80:80, -p=80:80, -p 80:80.
			letter, rest := word[1:2], word[2:]
			name, value, valued = letter, strings.TrimPrefix(rest, "="), rest != ""
			if slices.Contains(switches, letter) && rest != "" && rest[0] != '=' {
				args = slices.Insert(slices.Clone(args), 0, "-"+rest)
				word, value, valued = "-"+letter, "", false
			}
		}
		whole := []string{word}
		if !valued && !slices.Contains(switches, name) {
			if len(args) == 0 {
				return a, api.Errorf(api.ExitUsage, "%s of `docker run` needs a value", word)
			}
			value, args = args[0], args[1:]
			whole = append(whole, value)
		}
		if full := long[name]; full != "" {
			name = full
		}
		if err := a.add(name, value, whole); err != nil {
			return a, err
		}
	}
	return a, nil
}

// add adds one flag. whole is the flag as the user wrote it.
func (a *Arguments) add(name, value string, whole []string) error {
	if why, no := refused[name]; no {
		return api.Errorf(api.ExitUsage, "`docker run` flag %s is not supported: %s", whole[0], why)
	}
	on := true
	if slices.Contains(switches, name) && value != "" {
		var err error
		if on, err = strconv.ParseBool(value); err != nil {
			return api.Errorf(api.ExitUsage, "%s of `docker run`: %q is neither true nor false", whole[0], value)
		}
	}
	switch name {
	case "rm", "init": // every container has them
	case "interactive":
		a.Interactive = on
	case "tty":
		a.TTY = on
	case "publish":
		a.Publish = append(a.Publish, value)
	case "add-host":
		a.AddHosts = append(a.AddHosts, value)
	case "cap-add":
		a.Capabilities = append(a.Capabilities, value)
	case "entrypoint":
		a.Entrypoint = &value
	default:
		a.Rest = append(a.Rest, whole...)
	}
	return nil
}
