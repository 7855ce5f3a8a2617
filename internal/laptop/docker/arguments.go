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
	name       string
	takesValue bool
	refusedWhy string // empty: it is supported
}

// switches are the flags that take no value. docker gets an unknown flag unchanged, and it is assumed to take one.
var switches = []string{"detach", "disable-content-trust", "help", "init", "interactive", "no-healthcheck",
	"oom-kill-disable", "privileged", "publish-all", "quiet", "read-only", "rm", "sig-proxy", "tty", "use-api-socket"}

// letters are the short names of switches, and of the other flags that kubevpn handles itself.
var letters = map[string]string{"d": "detach", "i": "interactive", "P": "publish-all", "q": "quiet", "t": "tty",
	"e": "env", "h": "hostname", "p": "publish"}

// refused are the flags that are not supported.
var refused = []struct {
	names []string
	why   string
}{
	{[]string{"detach", "restart"}, "the container ends with this command"},
	{[]string{"domainname", "hostname", "uts"}, "the container gets the pod's host name"},
	{[]string{"dns", "dns-opt", "dns-option", "dns-search", "ip", "ip6", "link", "link-local-ip", "mac-address", "net",
		"net-alias", "network", "network-alias"}, "the container uses the network and the DNS of the cluster"},
	{[]string{"publish-all", "expose"}, "publish each port with -p 8080:80"},
	{[]string{"help"}, "`docker run --help` lists the flags"},
	{[]string{"sig-proxy"}, "`kubevpn dev` forwards signals itself"},
	{[]string{"env"},
		"use `kubevpn dev --env NAME=VALUE`, which keeps the value out of the engine's configuration"},
	{[]string{"env-file"},
		"use `kubevpn dev --env-file FILE`, which keeps the values out of the engine's configuration"},
	{[]string{"name"}, "kubevpn finds its containers by their names"},
}

// flagNamed returns the flag with a name or a short name.
func flagNamed(name string) flag {
	name = cmp.Or(letters[name], name)
	f := flag{name: name, takesValue: !slices.Contains(switches, name)}
	for _, r := range refused {
		if slices.Contains(r.names, name) {
			f.refusedWhy = r.why
		}
	}
	return f
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
