package doctor

import (
	"cmp"
	"context"
	"errors"
	"os"
	"os/exec"
	"regexp"
	"runtime"

	"kubevpn/internal/api"
	"kubevpn/internal/inspect/check"
	"kubevpn/internal/process/version"
	"kubevpn/pkg/host/sandbox"
)

// withoutDevice is the command that connects a machine that cannot have a device.
const withoutDevice = "kubevpn connect --socks 127.0.0.1:1080"

// fixInBrackets matches the commands that sandbox.Allowed proposes.
var fixInBrackets = regexp.MustCompile(`sudo [^()]+`)

// namespaces checks whether `run` and `dev` may isolate programs.
func namespaces(context.Context, *facts) api.Finding {
	err := sandbox.Allowed(true)
	_, noDevice := os.Stat("/dev/net/tun")
	switch {
	case err == nil:
		return check.OK("programs of `kubevpn run` and `kubevpn dev` can have namespaces")
	case errors.Is(err, errors.ErrUnsupported):
		return check.Skipped("namespaces for programs exist on Linux only")
	case errors.Is(err, sandbox.ErrNoTUN) && noDevice != nil:
		return check.Skipped("a network for one program needs the device, see above")
	}
	fix := cmp.Or(fixInBrackets.FindString(err.Error()), "kubevpn run --socks 127.0.0.1:0 -- COMMAND")
	return warning("`kubevpn run` gives programs a proxy instead of a network of their own, and `kubevpn dev` may "+
		"fail; `kubevpn connect` works", fix, "%v", err)
}

// rootHelper checks how `connect` would start the root helper.
func rootHelper(ctx context.Context, f *facts) api.Finding {
	if runtime.GOOS == "windows" {
		return check.Skipped("Windows has no root helper: only `kubevpn run` and `kubevpn connect --socks` work")
	}
	if os.Geteuid() == 0 {
		return rootCapability()
	}
	s, err := f.HelperService(ctx)
	switch {
	case err != nil:
		return failed(err, "`kubevpn connect` may not get the rights of root")
	case s.Allowed && s.Version != version.Full():
		return warning("`kubevpn connect` fails if they do not understand each other", "kubevpn service install",
			"the service runs kubevpn %s, and this is %s", s.Version, version.Full())
	case s.Allowed:
		return check.OK("the service starts it, without a password")
	}
	if _, err := exec.LookPath("sudo"); err == nil {
		return check.OK("sudo starts it, and may ask for a password")
	}
	fix := "ask root to run `kubevpn service install`, or connect without root:\n"
	if s.Installed {
		fix = "kubevpn service status   # it says who may use the service\n"
	}
	return broken(api.ExitPrivilege, "`kubevpn connect` cannot create its device", fix+withoutDevice,
		"you are not root, sudo is not installed, and no service starts the root helper for you")
}

// daemon checks the daemon and what its connections report.
func daemon(_ context.Context, f *facts) api.Finding {
	status, err := f.status()
	switch own := version.Full(); {
	case err != nil:
		return failed(err, "no command that uses the daemon works")
	case status.Version != own:
		return warning("`kubevpn connect` fails while the daemon has connections", "kubevpn quit",
			"the daemon is kubevpn %s, and this is %s", status.Version, own)
	}
	for _, c := range status.Connections {
		if found := OfConnection(c); found.Verdict != api.VerdictOK {
			return found
		}
	}
	if len(status.Connections) == 0 {
		return check.OK("no connection; `kubevpn connect` makes one, and starts the daemon unless it runs")
	}
	return check.OK("it has %s", api.Count(len(status.Connections), "connection"))
}

// OfConnection returns the finding about a connection of the daemon.
func OfConnection(c api.Connection) api.Finding {
	name := "the connection " + c.ID + " to " + c.Cluster
	switch e := c.Error; {
	case e != nil && c.Status == api.StatusFailed:
		return broken(e.Code, "programs do not reach that cluster", e.Hint, "%s is %s: %s", name, c.Status, e.Message)
	case e != nil:
		return warning("flows of that connection wait until it works again", e.Hint, "%s is %s: %s", name, c.Status,
			e.Message)
	}
	for _, probe := range c.Checks {
		if !probe.OK {
			return warning("programs may not reach that either", "kubevpn status -o wide",
				"%s did not reach the %s %s: %s", name, probe.What, probe.Target, probe.Seen)
		}
	}
	if len(c.Warnings) > 0 {
		return warning("a part of the connection works less well", "kubevpn status", "%s has a warning: %s", name,
			c.Warnings[0])
	}
	return check.OK("%s works", name)
}
