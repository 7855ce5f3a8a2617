package workload

import (
	"encoding/json"
	"errors"
	"os"
	"os/exec"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"kubevpn/internal/api"
	"kubevpn/internal/kube/podenv"
)

func TestEnvironmentFormatsQuoteValues(t *testing.T) {
	tests := []struct{ value, dotenv, shell, docker string }{
		{"", "V=", "export V=''", "V="},
		{"plain-1.2/x:y@z", "V=plain-1.2/x:y@z", "export V='plain-1.2/x:y@z'", "V=plain-1.2/x:y@z"},
		{"two words", "V='two words'", "export V='two words'", "V=two words"},
		{" spaces ", "V=' spaces '", "export V=' spaces '", "V= spaces "},
		{"#comment", "V='#comment'", "export V='#comment'", "V=#comment"},
		{"a$HOME`id`$(id)", "V='a$HOME`id`$(id)'", "export V='a$HOME`id`$(id)'", "V=a$HOME`id`$(id)"},
		{`say "hi"`, `V='say "hi"'`, `export V='say "hi"'`, `V=say "hi"`},
		{"it's $5", `V="it's \$5"`, `export V='it'\''s $5'`, "V=it's $5"},
		{`back\slash`, `V="back\\slash"`, `export V='back\slash'`, `V=back\slash`},
		{"one\ntwo\n", `V="one\ntwo\n"`, "export V='one\ntwo\n'", ""},
		{"cr\r", `V="cr\r"`, "export V='cr\r'", ""},
		{"\x1b[31mred", "V='\x1b[31mred'", "export V='\x1b[31mred'", "V=\x1b[31mred"},
		{"grüße", "V='grüße'", "export V='grüße'", "V=grüße"},
	}
	for _, tt := range tests {
		for format, want := range map[string]string{"dotenv": tt.dotenv, "shell": tt.shell, "docker": tt.docker} {
			got, err := formatEnvironment(format, []podenv.Variable{{Name: "V", Value: tt.value}}, func(text string) { t.Error(text) })
			if want == "" {
				var e *api.Error
				if !errors.As(err, &e) || e.Code != api.ExitUsage || !strings.Contains(e.Message, "the value of V has several lines") {
					t.Errorf("%s: %q: error = %v", format, tt.value, err)
				}
				continue
			}
			if err != nil || string(got) != want+"\n" {
				t.Errorf("%s: %q is %q, %v; want %q", format, tt.value, got, err, want)
			}
		}
		text, err := formatEnvironment("json", []podenv.Variable{{Name: "V", Value: tt.value}}, nil)
		var all map[string]string
		if err := errors.Join(err, json.Unmarshal(text, &all)); err != nil || all["V"] != tt.value {
			t.Errorf("json: %q is %s, %v", tt.value, text, err)
		}
	}
}

// A shell that evaluates the output has exactly the values.
func TestShellReadsEnvironment(t *testing.T) {
	sh, err := exec.LookPath("sh")
	if err != nil {
		t.Skip(err)
	}
	values := map[string]string{
		"LINES": "one\ntwo\n\n", "QUOTES": `'"'` + "'\\''", "DOLLAR": "$HOME ${X} $(id) `id`", "BACK": `\n\\`, "STAR": "* ? [a]",
		"BANG": "!!", "EMPTY": "", "TAB": "\t x\t", "BYTES": "\x01\x7f\xff",
	}
	var variables []podenv.Variable
	for name, value := range values {
		variables = append(variables, podenv.Variable{Name: name, Value: value})
	}
	text, err := formatEnvironment("shell", variables, func(text string) { t.Error(text) })
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command(sh, "-c", string(text)+"\nexec env -0")
	cmd.Env = []string{"PATH=" + os.Getenv("PATH")}
	out, err := cmd.Output()
	if err != nil {
		t.Fatal(err)
	}
	got := map[string]string{}
	for entry := range strings.SplitSeq(string(out), "\x00") {
		if name, value, _ := strings.Cut(entry, "="); values[name] != "" || name == "EMPTY" {
			got[name] = value
		}
	}
	if d := cmp.Diff(values, got); d != "" {
		t.Errorf("(-want +got):\n%s", d)
	}
}

func TestEnvironmentLeavesOutInvalidNames(t *testing.T) {
	variables := []podenv.Variable{{Name: "A"}, {Name: "a.b-c"}, {Name: "x y"}, {Name: "#x"}, {Name: "n\nTOUCH"}, {Name: "1"}}
	for format, want := range map[string]string{
		"shell": "export A=''\n", "dotenv": "A=\na.b-c=\n", "docker": "A=\na.b-c=\n1=\n",
	} {
		warnings := 0
		got, err := formatEnvironment(format, variables, func(string) { warnings++ })
		if lines := strings.Count(want, "\n"); err != nil || string(got) != want || warnings != len(variables)-lines {
			t.Errorf("%s: %q, %v, %d warnings; want %q", format, got, err, warnings, want)
		}
	}
}
