package docker

import (
	"cmp"
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

// flag is a flag of `docker run`.
type flag struct {
	name, short string
	takesValue  bool
	refusedWhy  string // empty: it is supported
}

// flags are those that take no value, those with a short name that kubevpn handles itself, and those that are not
// supported. An unknown flag is assumed to take a value, and docker gets it unchanged.
var flags = []flag{
	{"detach", "d", false, whyEnds},
	{"disable-content-trust", "", false, ""},
	{"help", "", false, "`docker run --help` lists the flags"},
	{"init", "", false, ""},
	{"interactive", "i", false, ""},
	{"no-healthcheck", "", false, ""},
	{"oom-kill-disable", "", false, ""},
	{"privileged", "", false, ""},
	{"publish-all", "P", false, whyPorts},
	{"quiet", "q", false, ""},
	{"read-only", "", false, ""},
	{"rm", "", false, ""},
	{"sig-proxy", "", false, "`kubevpn dev` forwards signals itself"},
	{"tty", "t", false, ""},
	{"use-api-socket", "", false, ""},

	{"dns", "", true, whyNetwork},
	{"dns-opt", "", true, whyNetwork},
	{"dns-option", "", true, whyNetwork},
	{"dns-search", "", true, whyNetwork},
	{"domainname", "", true, whyHostname},
	{"env", "e", true, "use `kubevpn dev --env NAME=VALUE`, which keeps the value out of the engine's configuration"},
	{"env-file", "", true,
		"use `kubevpn dev --env-file FILE`, which keeps the values out of the engine's configuration"},
	{"expose", "", true, whyPorts},
	{"hostname", "h", true, whyHostname},
	{"ip", "", true, whyNetwork},
	{"ip6", "", true, whyNetwork},
	{"link", "", true, whyNetwork},
	{"link-local-ip", "", true, whyNetwork},
	{"mac-address", "", true, whyNetwork},
	{"name", "", true, "kubevpn finds its containers by their names"},
	{"net", "", true, whyNetwork},
	{"net-alias", "", true, whyNetwork},
	{"network", "", true, whyNetwork},
	{"network-alias", "", true, whyNetwork},
	{"publish", "p", true, ""},
	{"restart", "", true, whyEnds},
	{"uts", "", true, whyHostname},
}

const (
	whyEnds     = "the container ends with this command"
	whyHostname = "the container gets the pod's host name"
	whyNetwork  = "the container uses the network and the DNS of the cluster"
	whyPorts    = "publish each port with -p 8080:80"
)

// flagNamed returns the flag with a name or a short name.
func flagNamed(name string) flag {
	known := api.Find(flags, func(f flag) bool { return f.name == name || f.short != "" && f.short == name })
	return *cmp.Or(known, &flag{name: name, takesValue: true})
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
			if !flagNamed(letter).takesValue && rest != "" && rest[0] != '=' {
				args = slices.Insert(slices.Clone(args), 0, "-"+rest)
				word, value, valued = "-"+letter, "", false
			}
		}
		f, whole := flagNamed(name), []string{word}
		if !valued && f.takesValue {
			if len(args) == 0 {
				return a, api.Errorf(api.ExitUsage, "%s of `docker run` needs a value", word)
			}
			value, args = args[0], args[1:]
			whole = append(whole, value)
		}
		if err := a.add(f, value, whole); err != nil {
			return a, err
		}
	}
	return a, nil
}

// add adds one flag. whole is the flag as the user wrote it.
func (a *Arguments) add(f flag, value string, whole []string) error {
	if f.refusedWhy != "" {
		return api.Errorf(api.ExitUsage, "`docker run` flag %s is not supported: %s", whole[0], f.refusedWhy)
	}
	on := true
	if !f.takesValue && value != "" {
		var err error
		if on, err = strconv.ParseBool(value); err != nil {
			return api.Errorf(api.ExitUsage, "%s of `docker run`: %q is neither true nor false", whole[0], value)
		}
	}
	switch f.name {
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
