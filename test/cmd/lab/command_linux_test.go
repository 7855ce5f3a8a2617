package main

import (
	"bytes"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

func TestEveryCommandHasAnExample(t *testing.T) {
	for _, c := range (&program{}).root().Commands() {
		if c.Short == "" || c.Example == "" {
			t.Errorf("%s lacks a description or an example", c.Name())
		}
	}
}

func TestErrorsHaveAMessageAndAnExitCode(t *testing.T) {
	t.Setenv("KUBEVPN_LAB_DIR", t.TempDir())
	for _, test := range []struct {
		args []string
		want string
	}{
		{[]string{"status"}, "lab: lab: lab is not up: run 'lab up'\n"},
		{[]string{"--name", "six", "kubectl", "get", "pods"}, "lab: six: lab is not up: run 'lab up'\n"},
		{[]string{"kubectl", "--name=six", "get", "pods"}, "lab: six: lab is not up: run 'lab up'\n"},
		{[]string{"status", "-o", "xml"}, "lab: output \"xml\": want json\n"},
		{[]string{"up", "--nodes", "0"}, "lab: --nodes: want at least 1\n"},
		{[]string{"up", "--name", "X"}, "lab: name \"X\": want lower-case letters, digits and dashes, at most 16, a letter first\n"},
		{[]string{"up", "--proxy-mode", "none", "--proxy-config", "ipvs.strictARP=true"}, "lab: kube-proxy settings need a proxy mode other than none\n"},
		{[]string{"up", "--proxy-config", "strictARP"}, "lab: invalid argument \"strictARP\" for \"--proxy-config\" flag: strictARP must be formatted as key=value\n"},
		{[]string{"exec", "laptop"}, "lab: requires at least 2 arg(s), only received 1\n"},
		{[]string{"fly"}, "lab: unknown command \"fly\" for \"lab\"\n"},
	} {
		var out, err bytes.Buffer
		if code := run(test.args, strings.NewReader(""), &out, &err); code != 1 || err.String() != test.want || out.Len() > 0 {
			t.Errorf("%v: exit code %d, output %q, errors %q", test.args, code, out.String(), err.String())
		}
	}
}

func TestOwnFlagsTakesOnlyALeadingName(t *testing.T) {
	for _, test := range []struct {
		args, rest []string
		name       string
	}{
		{[]string{"get", "pods", "--name", "x"}, []string{"get", "pods", "--name", "x"}, ""},
		{[]string{"--name", "six", "get", "--name=y"}, []string{"get", "--name=y"}, "six"},
		{[]string{"--name=six", "get"}, []string{"get"}, "six"},
		{[]string{"--name"}, []string{"--name"}, ""},
		{nil, nil, ""},
	} {
		var p program
		rest := p.ownFlags(test.args)
		if diff := cmp.Diff(test.rest, rest); diff != "" || p.config.Name != test.name {
			t.Errorf("%v: name %q (-want +got):\n%s", test.args, p.config.Name, diff)
		}
	}
}
