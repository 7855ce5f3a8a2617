package helper

import (
	"errors"
	"os"
	"strings"
	"testing"
	"testing/fstest"

	"kubevpn/internal/api"
	"kubevpn/pkg/datapath/tun"
)

func TestMachineOf(t *testing.T) {
	release := func(text string) fstest.MapFS {
		return fstest.MapFS{"proc/sys/kernel/osrelease": {Data: []byte(text + "\n")}}
	}
	inside := release("5.15.167.4-microsoft-standard-WSL2")
	inside[".dockerenv"] = &fstest.MapFile{}
	for name, tt := range map[string]struct {
		root fstest.MapFS
		want Machine
	}{
		"linux":            {release("6.1.0-28-amd64"), Usual},
		"macos":            {fstest.MapFS{}, Usual},
		"wsl2":             {release("5.15.167.4-microsoft-standard-WSL2"), WSL2},
		"wsl1":             {release("4.4.0-19041-Microsoft"), WSL1},
		"docker":           {fstest.MapFS{".dockerenv": {}}, Container},
		"docker_on_wsl":    {inside, Container},
		"podman":           {fstest.MapFS{"run/.containerenv": {}}, Container},
		"pod":              {fstest.MapFS{"var/run/secrets/kubernetes.io/serviceaccount/token": {}}, Container},
		"azure_is_no_wsl1": {release("6.8.0-1017-azure"), Usual},
	} {
		if got := machineOf(tt.root); got != tt.want {
			t.Errorf("%s: %q, want %q", name, got, tt.want)
		}
	}
}

func TestExplainTUNNamesTheMachine(t *testing.T) {
	for machine, want := range map[Machine]string{
		Usual: "modprobe tun", WSL2: "modprobe tun", Container: "--device /dev/net/tun", WSL1: "wsl --set-version",
	} {
		for _, cause := range []error{tun.ErrNoTUN, os.ErrPermission} {
			e := api.AsError(explainTUN(cause, machine))
			if e.Code != api.ExitNoTUN || !strings.Contains(e.Hint, want) || !strings.Contains(e.Hint, "--socks") {
				t.Errorf("%q, %v: %+v", machine, cause, e)
			}
		}
	}
	if e := api.AsError(explainTUN(errors.New("busy"), Container)); e.Code != api.ExitNetwork || e.Hint != "" {
		t.Errorf("%+v", e)
	}
}
