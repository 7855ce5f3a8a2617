package cli

import (
	"encoding/json"
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/jsonschema-go/jsonschema"
	"github.com/spf13/pflag"
	"go.yaml.in/yaml/v3"

	"kubevpn/internal/api"
	"kubevpn/internal/laptop/cli/command"
	"kubevpn/internal/laptop/cli/term"
	"kubevpn/internal/laptop/project"
)

// TestProjectsAreCheckedByTheCommands: what the flags of a command reject is a problem of the file, at its place.
func TestProjectsAreCheckedByTheCommands(t *testing.T) {
	file := filepath.Join(t.TempDir(), project.DefaultFile)
	if err := os.WriteFile(file, []byte(`
connect: {main: {netstak: gvisor, foreground: true}}
proxy:
  web: {workload: deployment/web, hedaers: [a=b], output: json}
  api: {workload: web}
  cart: {workload: deployment/cart, record: 3, headers: ["x=~("]}
  port: {workload: deployment/port, port: {http: 3000}}
dev:
  shop: {workload: deployment/shop}
clone:
  c: {workload: deployment/c, command: [a, b], restart-on-sync: true}
  d: {workload: deployment/d, command: ls, target-image: x, env: {A: b}, no-traffic: true}
expose:
  hook: {port: 80:x}
`), 0o600); err != nil {
		t.Fatal(err)
	}
	_, err := project.Read(project.Options{File: file, Commands: projectCommands{&command.Factory{}}, Similar: similar})
	if err == nil {
		t.Fatal("no problems")
	}
	want := []string{
		`2:18: unknown key of connect "netstak": did you mean netstack?`,
		`2:35: unknown key of connect "foreground"`,
		`4:35: unknown key of proxy "hedaers": did you mean headers?`,
		`4:51: unknown key of proxy "output"`,
		`5:3: api: "web" is not TYPE/NAME`,
		`6:3: cart: header "x": error parsing regexp: missing closing ): ` + "`(`",
		`7:37: port: --port: "http=3000": "3000" is not HOST:PORT`,
		"9:3: shop: `kubevpn dev` requires a command",
		"11:48: c: --restart-on-sync requires --sync",
		`14:3: hook: "80:x": "x" is not a local port`,
	}
	got := strings.Split(err.Error(), "\n")
	for i := range got {
		got[i] = strings.TrimPrefix(got[i], "kubevpn.yaml:")
	}
	if d := cmp.Diff(want, got); d != "" {
		t.Errorf("-want +got:\n%s", d)
	}
}

// TestProjectsFindTheKubeconfig: the entries and the user's command run in other directories than this process.
func TestProjectsFindTheKubeconfig(t *testing.T) {
	dir := t.TempDir()
	t.Chdir(dir)
	text := "defaults: {kubeconfig: east}\nproxy: {web: {workload: deployment/web}}\n"
	if err := errors.Join(os.Mkdir("shop", 0o700), os.WriteFile("shop/kubevpn.yaml", []byte(text), 0o600)); err != nil {
		t.Fatal(err)
	}
	o := &upOptions{f: &command.Factory{Environ: []string{"KUBECONFIG=west:/etc/north"}}, file: "shop/kubevpn.yaml"}
	p, err := o.read()
	if err != nil {
		t.Fatal(err)
	}
	east := []string{"--kubeconfig=" + filepath.Join(dir, "shop/east")}
	if want := []string{"KUBECONFIG=" + filepath.Join(dir, "west") + ":/etc/north"}; !slices.Equal(p.Environ, want) ||
		!slices.Equal(p.Cluster, east) || p.Entries[1].Args[0] != east[0] {
		t.Errorf("%q %q %q, want %q %q", p.Environ, p.Cluster, p.Entries[1].Args, want, east)
	}
}

// TestCommandOfAProjectHasTheStandardOutput: what its entries print does not mix with it.
func TestCommandOfAProjectHasTheStandardOutput(t *testing.T) {
	for _, program := range [][]string{nil, {"npm", "test"}} {
		var out, errout strings.Builder
		f := &command.Factory{Streams: term.Streams{Out: &out, Errout: &errout},
			Lookup: func(string) (string, bool) { return "", false }}
		(&upOptions{f: f, program: program}).show(&project.Project{})(api.Event{Entry: "web", Detail: "ready"})
		shown := map[bool]string{true: errout.String(), false: out.String()}
		if shown[program != nil] != "web | ready\n" || shown[program == nil] != "" {
			t.Errorf("with the command %q: standard output %q, error %q", program, out.String(), errout.String())
		}
	}
}

// projectSchema describes kubevpn.yaml by what project.Read looks at: the flags of the commands, and project.Keys.
func projectSchema() *jsonschema.Schema {
	ref := func(name string) func(string) *jsonschema.Schema {
		return func(text string) *jsonschema.Schema {
			return &jsonschema.Schema{Ref: "#/$defs/" + name, Description: text}
		}
	}
	value, list := ref("value"), ref("list")
	object := func(properties map[string]*jsonschema.Schema) *jsonschema.Schema {
		return &jsonschema.Schema{Type: "object", Properties: properties, AdditionalProperties: &jsonschema.Schema{Not: &jsonschema.Schema{}}}
	}
	commandLine := func(text string) *jsonschema.Schema {
		return &jsonschema.Schema{Types: []string{"string", "array"}, Items: value(""), Description: text}
	}
	special := map[string]func(string) *jsonschema.Schema{
		"command": commandLine, "before": commandLine, "after": commandLine, "workload": list, "port": list, "profiles": list,
		"needs": func(text string) *jsonschema.Schema {
			conditions := []any{string(project.Started), string(project.Healthy), string(project.Completed)}
			s := &jsonschema.Schema{Description: text, Types: []string{"string", "array", "object"}, Items: value("")}
			s.AdditionalProperties = object(map[string]*jsonschema.Schema{"condition": {Enum: conditions}})
			return s
		},
		"healthcheck": func(text string) *jsonschema.Schema {
			s := object(map[string]*jsonschema.Schema{"test": commandLine(""), "interval": value(""), "timeout": value(""), "start_period": value(""), "retries": value("")})
			s.Description, s.Required = text, []string{"test"}
			return s
		},
	}
	root := object(map[string]*jsonschema.Schema{
		"name": value("of the project (default: that of the directory)"), "env_file": list("files with variables for ${NAME} and for the programs"),
		"before": commandLine("a command before anything starts"), "after": commandLine("a command after everything has ended"),
	})
	root.Schema, root.Title, root.PatternProperties = "https://json-schema.org/draft/2020-12/schema", "kubevpn.yaml", map[string]*jsonschema.Schema{"^x-": {}}
	root.Defs = map[string]*jsonschema.Schema{ // variables may stand for any scalar
		"value": {Types: []string{"string", "number", "boolean"}},
		"list":  {Types: []string{"string", "number", "boolean", "array", "object"}, Items: value(""), AdditionalProperties: value("")},
	}
	defaults := map[string]*jsonschema.Schema{}
	for _, kind := range project.Kinds {
		entry := map[string]*jsonschema.Schema{}
		flags, _ := projectCommands{&command.Factory{}}.New(kind)
		flags.VisitAll(func(f *pflag.Flag) {
			if entry[f.Name] = value(f.Usage); project.IsList(f) {
				entry[f.Name] = list(f.Usage)
			}
			defaults[f.Name] = entry[f.Name].CloneSchemas()
		})
		for key, text := range project.Keys(kind) {
			if entry[key] = value(text); special[key] != nil {
				entry[key] = special[key](text)
			}
		}
		all := object(nil)
		e := object(entry)
		e.Type, e.Types = "", []string{"object", "null"}
		all.AdditionalProperties, all.Description = e, "entries by name, each a `kubevpn "+kind+"` with these flags"
		root.Properties[kind] = all
	}
	root.Properties["defaults"] = object(defaults)
	root.Properties["defaults"].Description = "flags of all entries whose commands have them"
	return root
}

func TestReferenceIsGeneratedForProjects(t *testing.T) {
	text, err := json.MarshalIndent(projectSchema(), "", "  ")
	if err != nil {
		t.Fatal(err)
	}
	file := filepath.Join(referenceDir, "project.schema.json")
	if *updateReference {
		if err := os.WriteFile(file, append(text, '\n'), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	got, err := os.ReadFile(file)
	if err != nil || string(got) != string(text)+"\n" {
		t.Errorf("%s differs from the commands; run `make docs` (%v)", file, err)
	}
}

// TestSchemaAgreesWithRead validates what Read accepts and what it rejects.
func TestSchemaAgreesWithRead(t *testing.T) {
	schema, err := projectSchema().Resolve(nil)
	if err != nil {
		t.Fatal(err)
	}
	for text, valid := range map[string]bool{
		"proxy: {web: {workload: deployment/web, headers: [a=b], record: 3, needs: [cart]}}\ndev: {cart: {workload: a/b, command: [x], env: {A: 1}, healthcheck: {test: ls}}}": true,
		"x-any: {a: 1}\nname: a\nconnect: {a: }\ndefaults: {namespace: shop}":                                                                                                  true,
		"proxy: {web: {workload: deployment/web, nosuch: 1}}":                                                                                                                  false,
		"nosuch: 1": false,
		"dev: {cart: {healthcheck: {interval: 1s}}}":           false,
		"dev: {cart: {needs: {web: {condition: no}}}}":         false,
		"proxy: {web: {workload: deployment/web, mirror: []}}": false,
	} {
		var object any
		if err := yaml.Unmarshal([]byte(text), &object); err != nil {
			t.Fatal(err)
		}
		if err := schema.Validate(object); (err == nil) != valid {
			t.Errorf("%s: %v", text, err)
		}
		file := filepath.Join(t.TempDir(), project.DefaultFile)
		if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		if _, err := project.Read(project.Options{File: file, Commands: projectCommands{&command.Factory{}}, Similar: similar}); (err == nil) != valid {
			t.Errorf("%s: Read: %v", text, err)
		}
	}
}
