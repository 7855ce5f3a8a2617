package term

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

// Format is the value of -o.
type Format struct {
	value   string   // "json", "jsonpath"
	allowed []string // the first is the default, for people; one that ends with "=" takes a template
	path    *jsonpath.JSONPath
}

// NewFormat returns a format that must be one of allowed, and by default is the first.
func NewFormat(allowed ...string) *Format { return &Format{value: allowed[0], allowed: allowed} }

// JSONPath is the format that takes a template.
const JSONPath = "jsonpath="

// NewObjectFormat returns a format of a command that prints an object: those for people, and those of kubectl.
func NewObjectFormat(people ...string) *Format {
	return NewFormat(append(people, "json", "yaml", "name", JSONPath)...)
}

// String returns the name of the format, without a template.
func (f *Format) String() string { return f.value }

// Type returns the name of the value in the help.
func (f *Format) Type() string { return "format" }

// Wide reports whether tables have all columns.
func (f *Format) Wide() bool { return f.value == "wide" }

// Set sets the format to the value of the flag.
func (f *Format) Set(s string) error {
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
	if name == JSONPath {
		f.path = jsonpath.New("output").AllowMissingKeys(true)
		if err := f.path.Parse(text); err != nil {
			return err
		}
	}
	f.value = strings.TrimSuffix(name, "=")
	return nil
}

// ForPeople reports whether the output is for people. If it is for programs, no question may be asked.
func (f *Format) ForPeople() bool { return slices.Contains([]string{"text", "table", "wide"}, f.value) }

// list returns the formats for a text.
func (f *Format) list() string {
	return strings.ReplaceAll(strings.Join(f.allowed, ", "), "=", "=TEMPLATE")
}

// AddTo defines -o and its completion.
func (f *Format) AddTo(cmd *cobra.Command) {
	cmd.Flags().VarP(f, "output", "o", "output format: "+f.list())
	directive := cobra.ShellCompDirectiveNoFileComp
	if strings.HasSuffix(f.allowed[len(f.allowed)-1], "=") {
		directive |= cobra.ShellCompDirectiveNoSpace
	}
	_ = cmd.RegisterFlagCompletionFunc("output", cobra.FixedCompletions(f.allowed, directive)) // it has the flag
}

// Print writes an object in a format for programs. names are the lines of -o name.
func (f *Format) Print(w io.Writer, object any, names ...string) error {
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

// PrintResult prints the result of a command that shows its progress. In the formats text and json, the progress
// contains the result, so PrintResult prints nothing.
func (f *Format) PrintResult(w io.Writer, object any, names ...string) error {
	if f.value == "text" || f.value == "json" {
		return nil
	}
	return f.Print(w, object, names...)
}

// PrintLine is Print, but followed objects are one line of JSON each.
func (f *Format) PrintLine(w io.Writer, followed bool, object any) error {
	switch {
	case followed && f.value == "json":
		return json.NewEncoder(w).Encode(object)
	case followed && f.value == "yaml":
		fmt.Fprintln(w, "---")
	}
	return f.Print(w, object)
}
