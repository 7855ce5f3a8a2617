package docker

import (
	"errors"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"kubevpn/internal/api"
)

func TestParseArgumentsReadsFlagsOfDockerRun(t *testing.T) {
	program, empty := "sh", ""
	tests := []struct {
		name, args string
		want       Arguments
	}{
		{"nothing", "", Arguments{}},
		{"passed-on", "-v /src:/app --memory=1g --cap-add SYS_PTRACE --privileged", Arguments{
			Rest: []string{"-v", "/src:/app", "--memory=1g", "--privileged"}, Capabilities: []string{"SYS_PTRACE"}}},
		{"letters", "-it", Arguments{Interactive: true, TTY: true}},
		{"letters-and-value", "-itv /a:/b", Arguments{Interactive: true, TTY: true, Rest: []string{"-v", "/a:/b"}}},
		{"value-with-letter", "-v/a:/b -m=1g", Arguments{Rest: []string{"-v/a:/b", "-m=1g"}}},
		{"words", "--interactive --tty=true", Arguments{Interactive: true, TTY: true}},
		{"off", "--tty=false", Arguments{}},
		{"ports", "-p 8080:80 -p81 --publish=82:82/udp", Arguments{Publish: []string{"8080:80", "81", "82:82/udp"}}},
		{"hosts", "--add-host db:10.0.0.1", Arguments{AddHosts: []string{"db:10.0.0.1"}}},
		{"entrypoint", "--entrypoint sh", Arguments{Entrypoint: &program}},
		{"no-entrypoint", "--entrypoint=", Arguments{Entrypoint: &empty}},
		{"so-anyway", "--rm --init", Arguments{}},
		{"value-like-a-flag", "--label -it", Arguments{Rest: []string{"--label", "-it"}}},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			got, err := ParseArguments(strings.Fields(tt.args))
			if err != nil {
				t.Fatal(err)
			}
			if d := cmp.Diff(tt.want, got); d != "" {
				t.Errorf("-want +got:\n%s", d)
			}
		})
	}
}

func TestParseArgumentsRejectsUnsupportedFlags(t *testing.T) {
	for args, want := range map[string]string{
		"--network host":     "of the cluster",
		"--net=host":         "of the cluster",
		"--dns 1.1.1.1":      "of the cluster",
		"-h me":              "host name",
		"--hostname=me":      "host name",
		"--name mine":        "by their names",
		"--name=mine":        "by their names",
		"-d":                 "ends with",
		"-itd":               "ends with",
		"--restart always":   "ends with",
		"-e PASSWORD=x":      "kubevpn dev --env",
		"--env-file f":       "kubevpn dev --env-file",
		"-P":                 "-p 8080:80",
		"busybox sh":         "not a flag",
		"-it -- busybox":     "not a flag",
		"--memory":           "needs a value",
		"--tty=perhaps":      "neither true nor false",
		"--entrypoint sh -c": "needs a value",
	} {
		_, err := ParseArguments(strings.Fields(args))
		var e *api.Error
		if !errors.As(err, &e) || e.Code != api.ExitUsage || !strings.Contains(e.Message+e.Hint, want) {
			t.Errorf("%s: %v, want a usage error with %q", args, err, want)
		}
	}
}
