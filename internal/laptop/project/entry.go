package project

import (
	"cmp"
	"maps"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/pflag"
	"go.yaml.in/yaml/v3"
)

// Keys returns the keys of an entry that are not flags, and what they mean.
func Keys(kind string) map[string]string {
	all := map[string]string{
		"profiles": "names of profiles; without --profile NAME, the entry is left out",
		"needs":    "names of entries that must have started before, or a mapping from names to a condition",
		"before":   "a command on this machine before the entry starts",
		"after":    "a command on this machine after the entry has ended",
	}
	switch kind {
	case KindConnect:
		delete(all, "needs") // connections come first
	case kindExpose:
		all["port"] = "PORT or PORT:LOCAL, or a list of them"
	default:
		all["workload"] = "TYPE/NAME"
	}
	if kind == kindDev || kind == "clone" {
		all["command"] = "the program: a list of words, or a text for the shell"
	}
	if kind == kindDev {
		all["directory"] = "where the program runs (default: the directory of the file)"
		all["healthcheck"] = "as in compose: test, interval, timeout, retries, start_period"
	}
	return all
}

// entry reads one entry. active is false if it belongs to other profiles; then it is checked all the same.
func (r *reader) entry(kind, dir string, key, value, defaults *yaml.Node) (e Entry, active bool) {
	e, active = Entry{Kind: kind, Name: key.Value, Directory: dir}, true
	flags, check := r.Commands.New(kind)
	at := map[string]*yaml.Node{} // keys by the flag
	var words, ports []string
	if value.Kind != yaml.MappingNode && value.Tag != "!!null" {
		r.problem(value, "%s is a mapping of keys", e.Name)
	}
	for k, v := range pairs(value) {
		_, own := Keys(kind)[k.Value]
		switch {
		case !own && flags.Lookup(k.Value) == nil:
			r.unknown(k, "key of "+kind, names(kind, flags))
		case !own:
			at[k.Value] = k
			e.Args = append(e.Args, r.flag(flags, k, v)...)
		case k.Value == "workload":
			words = r.texts(v)
		case k.Value == "port":
			ports = r.texts(v)
		case k.Value == "command":
			e.Program = r.command(v)
		case k.Value == "directory":
			if e.Directory = r.text(v); !filepath.IsAbs(e.Directory) {
				e.Directory = filepath.Join(dir, e.Directory)
			}
		case k.Value == "profiles":
			active = slices.ContainsFunc(r.texts(v), func(p string) bool { return slices.Contains(r.Profiles, p) })
		case k.Value == "needs":
			e.Needs = r.needs(v)
		case k.Value == "before":
			e.Before = r.command(v)
		case k.Value == "after":
			e.After = r.command(v)
		case k.Value == "healthcheck":
			e.Health = r.health(v)
		}
	}
	for k, v := range pairs(cmp.Or(defaults, &yaml.Node{})) {
		if find(value, k.Value) == nil && flags.Lookup(k.Value) != nil {
			at[k.Value] = k
			e.Args = append(e.Args, r.flag(flags, k, v)...)
		}
	}
	if kind == kindExpose {
		words = append([]string{e.Name}, ports...)
	}
	e.Args = append(e.Args, words...)
	if len(e.Program) > 0 {
		words = slices.Concat(words, []string{"--"}, e.Program)
	}
	r.check(e.Name, key, at, func() error { return check(words) })
	return e, active
}

// names returns all keys of an entry.
func names(kind string, flags *pflag.FlagSet) (all []string) {
	for name := range Keys(kind) {
		all = append(all, name)
	}
	flags.VisitAll(func(f *pflag.Flag) { all = append(all, f.Name) })
	return all
}

// check reports what the command itself finds wrong, at the key of the flag that its error names.
func (r *reader) check(name string, key *yaml.Node, at map[string]*yaml.Node, check func() error) {
	for _, p := range r.problems {
		if p.line >= key.Line && slices.ContainsFunc(slices.Collect(maps.Values(at)), func(n *yaml.Node) bool {
			return n.Line == p.line
		}) {
			return // what follows from a wrong value helps nobody
		}
	}
	err := check()
	if err == nil {
		return
	}
	if flag, found := strings.CutPrefix(err.Error(), "--"); found {
		key = cmp.Or(at[strings.FieldsFunc(flag, func(c rune) bool { return c == ':' || c == ' ' })[0]], key)
	}
	r.problem(key, "%s: %v", name, err)
}

// checkTwice reports entries that intercept a workload that another one intercepts: the last one would replace it.
func (r *reader) checkTwice(keys map[string]*yaml.Node) {
	taken := map[string]string{}
	for _, e := range r.project.Entries {
		intercepts := e.Kind == "proxy" || e.Kind == "clone" && !slices.Contains(e.Args, "--no-traffic=true")
		var place, words []string
		for _, arg := range e.Args {
			name, _, _ := strings.Cut(strings.TrimPrefix(arg, "--"), "=")
			switch {
			case !strings.HasPrefix(arg, "--"):
				words = append(words, arg)
			case slices.Contains([]string{"context", "namespace", "kubeconfig"}, name):
				place = append(place, arg)
			case e.Kind == kindDev && slices.Contains(matches, name):
				intercepts = true
			}
		}
		slices.Sort(place)
		for _, word := range words {
			at := strings.Join(append(place, word), " ")
			if other := taken[at]; intercepts && other != "" {
				r.problem(keys[e.Name], "%s intercepts %s, as %s does: the last one would replace the other", e.Name,
					word, other)
			} else if intercepts {
				taken[at] = e.Name
			}
		}
	}
}

// matches are the flags with which `kubevpn dev` intercepts.
var matches = []string{"proxy", "headers", "baggage", "cookie", "query", "path", "method", "grpc-method", "port"}

// checkDefaults reports defaults that no command has.
func (r *reader) checkDefaults(defaults *yaml.Node) {
	var all []string
	for _, kind := range Kinds {
		flags, _ := r.Commands.New(kind)
		flags.VisitAll(func(f *pflag.Flag) { all = append(all, f.Name) })
	}
	for key := range pairs(cmp.Or(defaults, &yaml.Node{})) {
		if !slices.Contains(all, key.Value) {
			r.unknown(key, "default", all)
		}
	}
}

// flag returns the arguments for a flag: --NAME=VALUE, several times for a list and for a mapping.
func (r *reader) flag(flags *pflag.FlagSet, key, value *yaml.Node) (args []string) {
	add := func(n *yaml.Node, text string) {
		if err := flags.Set(key.Value, text); err != nil {
			r.problem(n, "%s: %q is not of the type %s", key.Value, text, flags.Lookup(key.Value).Value.Type())
			return
		}
		args = append(args, "--"+key.Value+"="+text)
	}
	if value.Kind != yaml.ScalarNode && !IsList(flags.Lookup(key.Value)) {
		r.problem(value, "%s takes one value", key.Value)
		return nil
	}
	switch value.Kind {
	case yaml.MappingNode:
		for k, v := range pairs(value) {
			add(v, k.Value+"="+r.text(v))
		}
	case yaml.SequenceNode:
		for _, v := range value.Content {
			add(v, r.text(v))
		}
	default:
		text := r.text(value)
		if key.Value == "kubeconfig" && !filepath.IsAbs(text) {
			text = filepath.Join(r.vars.dir, text) // programs run in other directories
		}
		add(value, text)
	}
	return args
}

// IsList reports whether a flag may be repeated.
func IsList(f *pflag.Flag) bool {
	return strings.HasSuffix(f.Value.Type(), "Slice") || strings.HasSuffix(f.Value.Type(), "Array")
}

// needs reads a list of names, or a mapping from names to {condition: ...}.
func (r *reader) needs(n *yaml.Node) map[string]Need {
	all := map[string]Need{}
	if n.Kind != yaml.MappingNode {
		for _, name := range r.texts(n) {
			all[name] = Started
		}
		return all
	}
	for key, value := range pairs(n) {
		all[key.Value] = Started
		for k, v := range pairs(value) {
			all[key.Value] = Need(r.text(v))
			if known := []Need{Started, Healthy, Completed}; k.Value != "condition" {
				r.problem(k, "unknown key %q: write condition", k.Value)
			} else if !slices.Contains(known, all[key.Value]) {
				r.problem(v, "condition: %q is none of %s, %s and %s", all[key.Value], Started, Healthy, Completed)
			}
		}
	}
	return all
}

// health reads a healthcheck. Unlike compose's, its default interval is a second, because programs here start fast.
func (r *reader) health(n *yaml.Node) *Healthcheck {
	h := &Healthcheck{Interval: time.Second, Timeout: 30 * time.Second, Retries: 3}
	for key, value := range pairs(n) {
		switch key.Value {
		case "test":
			h.Test = r.command(value)
			switch {
			case len(h.Test) > 1 && h.Test[0] == "CMD":
				h.Test = h.Test[1:]
			case len(h.Test) == 2 && h.Test[0] == "CMD-SHELL":
				h.Test = shell(h.Test[1])
			}
		case "retries":
			text := r.text(value)
			count, err := strconv.Atoi(text)
			if h.Retries = count; err != nil || count < 1 {
				r.problem(value, "retries: %q is not a positive number", text)
			}
		case "interval", "timeout", "start_period":
			to := map[string]*time.Duration{"interval": &h.Interval, "timeout": &h.Timeout,
				"start_period": &h.StartPeriod}[key.Value]
			text := r.text(value)
			d, err := time.ParseDuration(text)
			if *to = d; err != nil || d < 0 || d == 0 && to != &h.StartPeriod {
				r.problem(value, "%s: %q is not a duration such as 10s", key.Value, text)
			}
		default:
			r.problem(key, "unknown key %q of healthcheck", key.Value)
		}
	}
	if len(h.Test) == 0 {
		r.problem(n, "healthcheck requires test")
	}
	return h
}
