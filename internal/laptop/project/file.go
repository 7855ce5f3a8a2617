package project

import (
	"bytes"
	"cmp"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/joho/godotenv"
	"github.com/spf13/pflag"
	"go.yaml.in/yaml/v3"

	"kubevpn/internal/api"
)

// Project is what a file lists. The values of variables are in it.
type Project struct {
	Name    string   `json:"name"`
	File    string   `json:"file"`    // absolute
	Environ []string `json:"environ"` // of its processes
	// Variables are those of env_file, sorted: NAME=VALUE. They are in Environ, too.
	Variables []string `json:"variables,omitempty"`
	Before    []string `json:"before,omitempty"` // a command, before anything starts
	After     []string `json:"after,omitempty"`  // after everything has ended
	Entries   []Entry  `json:"entries"`          // in the order of the file, connections first
	Cluster   []string `json:"cluster"`          // flags that select the cluster, from the defaults
}

// Entry is one command of kubevpn.
type Entry struct {
	Kind      string          `json:"kind"` // one of Kinds
	Name      string          `json:"name"`
	Args      []string        `json:"args"`              // of the command, without its name
	Program   []string        `json:"program,omitempty"` // what follows --
	Directory string          `json:"directory"`         // absolute
	Needs     map[string]Need `json:"needs,omitempty"`   // by name
	Health    *Healthcheck    `json:"health,omitempty"`
	Before    []string        `json:"before,omitempty"`
	After     []string        `json:"after,omitempty"`
}

// Command returns the command line of the entry, without the name of the program.
func (e Entry) Command() []string {
	args := append([]string{e.Kind}, e.Args...)
	if len(e.Program) > 0 {
		args = append(append(args, "--"), e.Program...)
	}
	return args
}

// Held is Command for a process that keeps what it makes until it ends.
func (e Entry) Held() []string {
	args := e.Command()
	switch e.Kind {
	case KindConnect:
		return slices.Insert(args, 1, "--attached")
	case kindDev:
		return args
	}
	return slices.Insert(args, 1, "--foreground")
}

// Need is a condition of compose's depends_on.
type Need string

const (
	Started   Need = "service_started"
	Healthy   Need = "service_healthy"
	Completed Need = "service_completed_successfully"
)

// Healthcheck is that of compose: https://github.com/compose-spec/compose-spec/blob/main/05-services.md#healthcheck
type Healthcheck struct {
	Test        []string      `json:"test"`
	Interval    time.Duration `json:"interval"`
	Timeout     time.Duration `json:"timeout"`
	StartPeriod time.Duration `json:"startPeriod"`
	Retries     int           `json:"retries"`
}

// Kinds are the commands that a project may list, in the order in which they start.
var Kinds = [...]string{"connect", "proxy", "clone", "expose", "dev"}

const (
	KindConnect, kindExpose, kindDev = "connect", "expose", "dev"

	// DefaultFile is the file that is read without --file.
	DefaultFile = "kubevpn.yaml"
	maxFile     = 1 << 20
	maxNodes    = 100_000 // with repeated aliases
)

// Commands are the commands of kubevpn.
type Commands interface {
	// New returns the flags of a new command that a project may set. check returns what is wrong with their values
	// and with arguments, as far as the command knows without a cluster.
	New(kind string) (flags *pflag.FlagSet, check func(args []string) error)
}

// Options configures Read.
type Options struct {
	File     string   // may be relative
	Profiles []string // entries with other profiles are left out
	Environ  []string
	Commands Commands
	Similar  func(name string, all []string) []string // names that were probably meant
}

// reader collects the project and all problems of its files.
type reader struct {
	Options
	files    map[*yaml.Node]string
	count    int
	vars     variables
	project  Project
	problems []problem
}

type problem struct {
	file         string
	line, column int
	text         string
}

func (p problem) String() string {
	return fmt.Sprintf("%s:%d:%d: %s", p.file, p.line, p.column, p.text)
}

// Read reads a project, and NAME.local.yaml beside NAME.yaml, whose values win. Its error lists all problems, in the
// order of the lines. It starts no program but git, for ${GIT_BRANCH}. Errors are *api.Error.
func Read(o Options) (*Project, error) {
	file, err := filepath.Abs(o.File)
	if err != nil {
		return nil, err
	}
	r := &reader{Options: o, files: map[*yaml.Node]string{}}
	r.project = Project{File: file, Name: filepath.Base(filepath.Dir(file))}
	root, err := r.load(file)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, api.Errorf(api.ExitUsage, "there is no %s", o.File).
			WithHint("`kubevpn init` writes one; -f names another file")
	} else if err != nil {
		return nil, err
	}
	local, err := r.load(strings.TrimSuffix(file, filepath.Ext(file)) + ".local" + filepath.Ext(file))
	if err == nil {
		r.merge(root, local)
	} else if !errors.Is(err, fs.ErrNotExist) {
		return nil, err
	}
	r.read(root)
	return &r.project, r.err()
}

// err returns all problems as one error.
func (r *reader) err() error {
	if len(r.problems) == 0 {
		return nil
	}
	slices.SortStableFunc(r.problems, func(a, b problem) int {
		return cmp.Or(strings.Compare(b.file, a.file), a.line-b.line, a.column-b.column,
			strings.Compare(a.text, b.text))
	})
	lines := slices.Compact(api.Texts(r.problems, problem.String))
	return api.Errorf(api.ExitUsage, "%s", strings.Join(lines, "\n")).
		WithHint("`kubevpn help up` shows a file, and docs/reference/project.schema.json has all keys")
}

func (r *reader) problem(n *yaml.Node, format string, args ...any) {
	r.problems = append(r.problems, problem{r.files[n], n.Line, n.Column, fmt.Sprintf(format, args...)})
}

// load returns the mapping of a file; nil: it is empty.
func (r *reader) load(file string) (*yaml.Node, error) {
	f, err := os.Open(file)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	text, err := io.ReadAll(io.LimitReader(f, maxFile+1))
	if err == nil && len(text) > maxFile {
		err = fmt.Errorf("it is larger than %d bytes", maxFile)
	}
	var document yaml.Node
	if err == nil {
		err = yaml.NewDecoder(bytes.NewReader(text)).Decode(&document)
	}
	name := filepath.Base(file)
	if err != nil && !errors.Is(err, io.EOF) {
		return nil, api.Errorf(api.ExitUsage, "%s: %w", name, err)
	}
	root := &yaml.Node{Kind: yaml.MappingNode, Line: 1, Column: 1}
	if len(document.Content) > 0 {
		root = r.resolve(document.Content[0], name)
	}
	r.files[root] = name
	if root.Kind != yaml.MappingNode {
		r.problem(root, "a project is a mapping")
		root = &yaml.Node{Kind: yaml.MappingNode}
	}
	return root, nil
}

// resolve returns a copy of a node without aliases and merge keys (https://yaml.org/type/merge.html).
func (r *reader) resolve(n *yaml.Node, file string) *yaml.Node {
	for n.Kind == yaml.AliasNode {
		n = n.Alias
	}
	out := *n
	out.Content = nil
	r.files[&out] = file
	if r.count++; r.count > maxNodes {
		if r.count == maxNodes+1 {
			r.problem(&out, "the file has more than %d values", maxNodes)
		}
		return &out
	}
	var merged []*yaml.Node
	for i := 0; i < len(n.Content); i++ {
		c := r.resolve(n.Content[i], file)
		if n.Kind == yaml.MappingNode && i%2 == 0 && c.Tag == "!!merge" {
			i++
			from := r.resolve(n.Content[i], file)
			merged = append(merged, from)
			if from.Kind == yaml.SequenceNode {
				merged = append(merged[:len(merged)-1], from.Content...)
			}
			continue
		}
		out.Content = append(out.Content, c)
	}
	for _, from := range merged {
		for key, value := range pairs(from) {
			if find(&out, key.Value) == nil {
				out.Content = append(out.Content, key, value)
			}
		}
	}
	return &out
}

// merge puts the values of over into to: mappings by key, everything else as a whole.
func (r *reader) merge(to, over *yaml.Node) {
	for key, value := range pairs(over) {
		at := find(to, key.Value)
		switch {
		case at == nil:
			to.Content = append(to.Content, key, value)
		case at.Kind == yaml.MappingNode && value.Kind == yaml.MappingNode:
			r.merge(at, value)
		default:
			file := r.files[value]
			*at = *value
			r.files[at] = file
		}
	}
}

// pairs yields the keys and values of a mapping; of another node, nothing.
func pairs(n *yaml.Node) func(yield func(key, value *yaml.Node) bool) {
	return func(yield func(key, value *yaml.Node) bool) {
		for i := 0; n.Kind == yaml.MappingNode && i+1 < len(n.Content); i += 2 {
			if !yield(n.Content[i], n.Content[i+1]) {
				return
			}
		}
	}
}

// find returns the value of a key, or nil.
func find(n *yaml.Node, name string) *yaml.Node {
	for key, value := range pairs(n) {
		if key.Value == name {
			return value
		}
	}
	return nil
}

// read reads the top of the file.
func (r *reader) read(root *yaml.Node) {
	dir := filepath.Dir(r.project.File)
	r.vars = variables{dir: dir, values: map[string]string{}}
	r.vars.add(r.Environ) // env_file itself has no others
	if n := find(root, "env_file"); n != nil {
		for _, file := range r.texts(n) {
			if !filepath.IsAbs(file) {
				file = filepath.Join(dir, file)
			}
			read, err := godotenv.Read(file)
			if err != nil {
				r.problem(n, "env_file: %v", err)
			}
			for name, value := range read {
				r.vars.values[name] = value
				r.project.Variables = append(r.project.Variables, name+"="+value)
			}
		}
	}
	r.vars.add(r.Environ) // which wins, as with compose
	slices.Sort(r.project.Variables)
	r.project.Environ = slices.Concat(r.project.Variables, r.Environ)
	for key, value := range pairs(root) {
		switch name := key.Value; {
		case name == "env_file", name == "defaults", strings.HasPrefix(name, "x-"), slices.Contains(Kinds[:], name):
		case name == "name":
			r.project.Name = r.text(value)
		case name == "before":
			r.project.Before = r.command(value)
		case name == "after":
			r.project.After = r.command(value)
		default:
			r.unknown(key, "key", append(topKeys[:], Kinds[:]...))
		}
	}
	r.entries(root, dir)
	flags, _ := r.Commands.New(KindConnect)
	for key, value := range pairs(cmp.Or(find(root, "defaults"), &yaml.Node{})) {
		if slices.Contains([]string{"kubeconfig", "context", "namespace"}, key.Value) {
			r.project.Cluster = append(r.project.Cluster, r.flag(flags, key, value)...)
		}
	}
}

var topKeys = [...]string{"name", "env_file", "defaults", "before", "after"}

// unknown reports a key that means nothing, and the one that was probably meant.
func (r *reader) unknown(key *yaml.Node, what string, all []string) {
	text := ""
	if similar := r.Similar(key.Value, all); len(similar) > 0 {
		text = ": did you mean " + strings.Join(similar, " or ") + "?"
	}
	r.problem(key, "unknown %s %q%s", what, key.Value, text)
}

// entries reads the entries of all kinds.
func (r *reader) entries(root *yaml.Node, dir string) {
	defaults := find(root, "defaults")
	r.checkDefaults(defaults)
	names := map[string]*yaml.Node{}
	left := map[string]bool{} // of other profiles
	for _, kind := range Kinds {
		for key, value := range pairs(cmp.Or(find(root, kind), &yaml.Node{})) {
			if names[key.Value] != nil {
				r.problem(key, "there is another entry %s, in line %d", key.Value, names[key.Value].Line)
			}
			names[key.Value] = key
			if e, active := r.entry(kind, dir, key, value, defaults); active {
				r.project.Entries = append(r.project.Entries, e)
			} else {
				left[e.Name] = true
			}
		}
		if n := find(root, kind); n != nil && n.Kind != yaml.MappingNode && n.Tag != "!!null" {
			r.problem(n, "%s is a mapping from names to entries", kind)
		}
	}
	if n := find(root, KindConnect); n == nil || len(n.Content) == 0 { // all entries use one
		key := &yaml.Node{Value: KindConnect}
		e, _ := r.entry(KindConnect, dir, key, &yaml.Node{Kind: yaml.MappingNode}, defaults)
		r.project.Entries = slices.Insert(r.project.Entries, 0, e)
		if names[e.Name] != nil {
			r.problem(names[e.Name], "the connection has the name %s", e.Name)
		}
	}
	for _, e := range r.project.Entries {
		for need := range e.Needs {
			at := names[e.Name]
			switch {
			case names[need] == nil:
				r.problem(at, "%s needs %s, which is no entry", e.Name, need)
			case left[need]:
				r.problem(at, "%s needs %s, which belongs to another profile", e.Name, need)
			case r.reaches(need, e.Name, map[string]bool{}):
				r.problem(at, "%s and %s need each other", e.Name, need)
			}
		}
	}
	r.checkTwice(names)
	if len(names) == 0 {
		r.problem(root, "nothing is listed: write %s", strings.Join(Kinds[:], ", "))
	}
}

// reaches reports whether the needs of an entry lead to another one.
func (r *reader) reaches(from, to string, seen map[string]bool) bool {
	if from == to || seen[from] {
		return from == to
	}
	seen[from] = true
	e := api.Find(r.project.Entries, func(e Entry) bool { return e.Name == from })
	for need := range cmp.Or(e, new(Entry)).Needs {
		if r.reaches(need, to, seen) {
			return true
		}
	}
	return false
}
