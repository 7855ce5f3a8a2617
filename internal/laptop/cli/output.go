package cli

import (
	"encoding/json"
	"fmt"
	"io"
	"slices"
	"strings"

	"github.com/spf13/cobra"
	apijson "k8s.io/apimachinery/pkg/util/json"
	"k8s.io/client-go/util/jsonpath"
	"sigs.k8s.io/yaml"

	"kubevpn/internal/api"
)

// format is the value of -o.
type format struct {
	value   string   // "json", "jsonpath"
	allowed []string // the first is the default, for people; one that ends with "=" takes a template
	path    *jsonpath.JSONPath
}

func newFormat(allowed ...string) *format { return &format{value: allowed[0], allowed: allowed} }

const formatJSONPath = "jsonpath="

// newObjectFormat returns a format of a command that prints an object: those for people, and those of kubectl.
func newObjectFormat(people ...string) *format {
	return newFormat(append(people, "json", "yaml", "name", formatJSONPath)...)
}

func (f *format) String() string { return f.value }
func (f *format) Type() string   { return "format" }

func (f *format) Set(s string) error {
	name, text, found := strings.Cut(s, "=")
	if found {
		name += "="
	}
	if !slices.Contains(f.allowed, name) {
		return fmt.Errorf("must be one of %s", f.list())
	}
	if found && text == "" {
		return fmt.Errorf("%s requires a template", name)
	}
	if name == formatJSONPath {
		f.path = jsonpath.New("output").AllowMissingKeys(true)
		if err := f.path.Parse(text); err != nil {
			return err
		}
	}
	f.value = strings.TrimSuffix(name, "=")
	return nil
}

// forPeople reports whether the output is for people. If it is for programs, no question may be asked.
func (f *format) forPeople() bool { return slices.Contains([]string{"text", "table", "wide"}, f.value) }

// list returns the formats for a text.
func (f *format) list() string {
	return strings.ReplaceAll(strings.Join(f.allowed, ", "), "=", "=TEMPLATE")
}

// addTo defines -o and its completion.
func (f *format) addTo(cmd *cobra.Command) {
	cmd.Flags().VarP(f, "output", "o", "output format: "+f.list())
	directive := cobra.ShellCompDirectiveNoFileComp
	if strings.HasSuffix(f.allowed[len(f.allowed)-1], "=") {
		directive |= cobra.ShellCompDirectiveNoSpace
	}
	completeWith(cmd, "output", cobra.FixedCompletions(f.allowed, directive))
}

// print writes an object in a format for programs. names are the lines of -o name.
func (f *format) print(w io.Writer, object any, names ...string) error {
	switch f.value {
	case "json":
		enc := json.NewEncoder(w)
		enc.SetIndent("", "  ")
		return enc.Encode(object)
	case "yaml":
		text, err := yaml.Marshal(object)
		if err != nil {
			return fmt.Errorf("cannot encode the output as YAML: %w", err)
		}
		_, err = w.Write(text)
		return err
	case "name":
		for _, name := range names {
			fmt.Fprintln(w, name)
		}
		return nil
	}
	text, err := json.Marshal(object)
	if err != nil {
		return fmt.Errorf("cannot encode the output: %w", err)
	}
	var data any
	if err := apijson.Unmarshal(text, &data); err != nil { // integers stay integers
		return fmt.Errorf("cannot decode the output: %w", err)
	}
	if err := f.path.Execute(w, data); err != nil {
		return api.Errorf(api.ExitUsage, "-o %s: %w", f.value, err)
	}
	return nil
}

// printResult prints the result of a command that shows its progress. In the formats text and json, the progress
// contains the result, so printResult prints nothing.
func (f *format) printResult(w io.Writer, object any, names ...string) error {
	if f.value == "text" || f.value == "json" {
		return nil
	}
	return f.print(w, object, names...)
}
