package command

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"os"
	"runtime"

	"kubevpn/internal/api"
	"kubevpn/internal/config"
	"kubevpn/internal/kube/client"
	"kubevpn/internal/laptop/cli/daemonclient"
	"kubevpn/internal/laptop/cli/term"
	"kubevpn/internal/laptop/hostservice"
	"kubevpn/internal/process/version"
	"kubevpn/pkg/host/sandbox"
)

// Programs are the parts of kubevpn that cmd/kubevpn injects. All functions must be set.
type Programs struct {
	// Machine is the kind of this machine, if it is not a usual one: container, WSL 1, WSL 2.
	Machine string
	// RunDaemon runs the daemon of this user until ctx ends or the daemon is idle. It calls ready when the daemon
	// accepts requests.
	RunDaemon func(ctx context.Context, paths config.Paths, ready func()) error
	// StartHelper starts the root helper: by the service, or with sudo, if this process does not run as root. It calls
	// announce with a line for the user before sudo may ask for a password on the terminal, or once the service is
	// ready. It returns the socket to the helper, which the caller owns.
	StartHelper func(ctx context.Context, announce func(line string)) (*os.File, error)
	// RunHelper runs the helper in the process that StartHelper started.
	RunHelper func(ctx context.Context) error
	// Hold keeps a connection, and the intercepts of the request, in this process until ctx ends. It returns nil if
	// they were established before; progress receives an event with Held then. They are for the programs of place, or
	// for programs that use a proxy on the listener, or, if both are nil, for this machine, which needs root. It may be
	// called again with the listener after an error before the connection was established.
	Hold func(ctx context.Context, req api.InterceptRequest, place sandbox.Place, proxy net.Listener,
		progress func(api.Event)) error
	// Reset removes the intercepts of workloads, with the rights of c.
	Reset func(ctx context.Context, c *client.Cluster, req api.ResetRequest, progress func(api.Event)) error
}

// Factory gives the commands what they need: their streams, the environment, and clients of the daemon and of clusters.
type Factory struct {
	Programs
	term.Streams
	Lookup     func(string) (string, bool)
	Environ    []string
	Args       []string // of the command line
	Executable string   // absolute path of this program; "" if unknown
	Log        *slog.Logger
}

// ExitCode is an error that needs no message, because kubevpn or another program has printed it.
type ExitCode int

func (c ExitCode) Error() string { return fmt.Sprintf("exit code %d", int(c)) }

// SandboxCommand names the hidden command as which dev and run start this program in a sandbox.
const SandboxCommand = "sandbox"

// Paths returns the paths of the user's files.
func (f *Factory) Paths() (config.Paths, error) { return config.Locate(f.Getenv) }

// Getenv returns a variable of the environment.
func (f *Factory) Getenv(name string) string {
	v, _ := f.Lookup(name)
	return v
}

// Daemon returns a client of the daemon of this user, which may not run.
func (f *Factory) Daemon() *daemonclient.Client {
	return daemonclient.New(daemonclient.Config{
		Locate: f.Paths, Executable: f.Executable, Environ: f.Environ, StartHelper: f.StartHelper,
		Announce: func(line string) { f.Note("%s", line) }, Log: f.Log,
	})
}

// Status returns the status of the daemon. If none runs, the status has no connections.
func (f *Factory) Status(ctx context.Context) (api.Status, error) {
	status, err := f.Daemon().Status(ctx)
	if errors.Is(err, daemonclient.ErrNoDaemon) {
		status = api.Status{Version: version.Full(), Connections: []api.Connection{}, Intercepts: []api.Intercept{}}
		err = nil
	}
	status.TypeMeta, status.Machine = api.Type(api.KindStatus), f.Machine
	return status, err
}

// Version returns the versions of this program, the daemon and the service.
func (f *Factory) Version(ctx context.Context) (api.Version, error) {
	v := api.Version{
		TypeMeta: api.Type(api.KindVersion),
		Version:  version.String(), Commit: version.Commit(), Go: runtime.Version(),
		Platform: runtime.GOOS + "/" + runtime.GOARCH, Image: config.Default().Image,
	}
	status, err := f.Daemon().Status(ctx)
	switch {
	case err == nil:
		v.Daemon = &status.Version
	case !errors.Is(err, daemonclient.ErrNoDaemon):
		return v, err
	}
	s, err := hostservice.Status(ctx)
	v.Service = s.Version
	return v, err
}

// LoginTerminal returns the terminal on which a credential plugin can ask the user.
func (f *Factory) LoginTerminal() client.Terminal {
	t := client.Terminal{Stdin: term.File(f.In)}
	if file := term.File(f.Errout); file != nil {
		t.Stderr = file
	} else if t.Stdin != nil {
		t.Stderr = f.Errout
	}
	return t
}
