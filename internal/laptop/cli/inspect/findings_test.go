package inspect

import (
	"errors"
	"strings"
	"testing"

	"kubevpn/internal/api"
	"kubevpn/internal/laptop/cli/command"
	"kubevpn/internal/laptop/cli/term"
)

// found is a diagnosis with a finding of each kind.
var found = api.Diagnosis{Findings: []api.Finding{
	{Section: "GET http://web/", Name: "name", Verdict: api.VerdictOK, Seen: "web: 10.96.0.80", Notes: []string{"search shop", "options ndots:5"}, Seconds: 0.0006},
	{Section: "GET http://web/", Name: "policy", Verdict: api.VerdictWarning, Cause: "nothing enforces it", Seconds: 0.000_01},
	{Section: "Names", Name: "root helper", Verdict: api.VerdictFailed, Code: api.ExitPrivilege, Cause: "no sudo", Effect: "no device",
		Fix: "sudo one\n  two\n"},
	{Section: "Names", Name: "later", Verdict: api.VerdictFailed, Code: api.ExitNetwork, Cause: "another"},
}}

func TestFindingsArePrintedForPeople(t *testing.T) {
	var out strings.Builder
	p := newFindingPrinter(&out)
	for _, f := range found.Findings {
		p.finding(f)
	}
	err := p.finish(term.NewObjectFormat("text"), found)
	if code, ok := errors.AsType[command.ExitCode](err); !ok || api.ExitCode(code) != api.ExitPrivilege {
		t.Errorf("got %v, want the code of the first failed check", err)
	}
	want := `GET http://web/
  ok       name           600µs   web: 10.96.0.80
           note:    search shop
                    options ndots:5
  warning  policy         -       nothing enforces it

Names
  failed   root helper    -       no sudo
           effect:  no device
           fix:     sudo one
                    two
  failed   later          -       another

2 failed, 1 warnings, 1 ok, 0 skipped
`
	if got := out.String(); got != want {
		t.Errorf("got\n%s", got)
	}
}

func TestFindingsArePrintedForScripts(t *testing.T) {
	for format, want := range map[string]string{
		"name": "finding/name\nfinding/policy\nfinding/root-helper\nfinding/later\n",
		`jsonpath={.findings[?(@.verdict=="failed")].cause}`: "no sudo another",
	} {
		output := term.NewObjectFormat("text")
		if err := output.Set(format); err != nil {
			t.Fatal(err)
		}
		var out strings.Builder
		_ = newFindingPrinter(&out).finish(output, found) // the exit code
		if got := out.String(); strings.TrimSpace(got) != strings.TrimSpace(want) {
			t.Errorf("%s: got %q, want %q", format, got, want)
		}
	}
}
