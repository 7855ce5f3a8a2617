package cli

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"log/slog"
	"net"
	"os"
	"os/signal"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"

	"k8s.io/klog/v2"

	"kubevpn/internal/api"
	"kubevpn/internal/config"
	"kubevpn/internal/kube/client"
	"kubevpn/internal/laptop/cli/daemonclient"
	"kubevpn/internal/laptop/cli/term"
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
	Hold func(
		ctx context.Context, req api.InterceptRequest, place sandbox.Place, proxy net.Listener,
		progress func(api.Event),
	) error
	// Reset removes the intercepts of workloads, with the rights of c.
	Reset func(ctx context.Context, c *client.Cluster, req api.ResetRequest, progress func(api.Event)) error
}

// app is the state that all commands share.
type app struct {
	Programs
	term.Streams
	lookup     func(string) (string, bool)
	environ    []string
	executable string // absolute path of this program; "" if unknown
	plugin     bool   // kubectl runs this program as its plugin
	log        *slog.Logger
}

// Main runs the command that os.Args names and returns the exit code of the process. On the first interrupt the command
// cleans up and ends. The second interrupt ends the process.
func Main(programs Programs) int {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	context.AfterFunc(ctx, stop) // the next signal is not caught

	executable, err := os.Executable()
	if err != nil {
		executable = "" // commands that need it report an error
	}
	a := &app{
		Programs: programs,
		Streams: term.Streams{In: os.Stdin, Out: &term.Cleaner{W: os.Stdout}, Errout: &term.Cleaner{W: os.Stderr},
			Dumb: os.Getenv("TERM") == "dumb"},
		lookup: os.LookupEnv, environ: os.Environ(), executable: executable,
		plugin: strings.HasPrefix(filepath.Base(os.Args[0]), "kubectl-"), log: slog.New(slog.DiscardHandler),
	}
	klog.SetSlogLogger(a.log) // errors contain the messages of client-go
	return a.main(ctx, os.Args[1:])
}

func (a *app) main(ctx context.Context, args []string) int {
	root := newRoot(a)
	root.SetArgs(args)
	root.SetIn(a.In)
	root.SetOut(a.Out)
	root.SetErr(a.Errout)
	err := unknownHelp(root, args)
	if err == nil {
		err = root.ExecuteContext(ctx)
	}
	if err == nil {
		return int(api.ExitOK)
	}
	if code, ok := errors.AsType[exitCode](err); ok {
		return int(code)
	}
	e := term.AsError(ctx, err)
	if a.plugin {
		named := *e
		named.Message, named.Hint = inPlugin(e.Message), inPlugin(e.Hint)
		e = &named
	}
	term.PrintError(a.Errout, e)
	return int(e.Code)
}

// setVerbosity logs to standard error what -v asks for: the requests of this process and its decisions.
func (a *app) setVerbosity() {
	if a.Verbosity <= 0 {
		return
	}
	var flags flag.FlagSet
	klog.InitFlags(&flags)
	_ = flags.Set("v", strconv.Itoa(a.Verbosity)) // an integer is valid
	// klog and slog number levels in opposite directions.
	level := &slog.HandlerOptions{Level: slog.Level(-a.Verbosity)}
	a.log = slog.New(slog.NewTextHandler(a.Errout, level))
	klog.SetSlogLogger(a.log)
}

// exitCode is an error that needs no message, because kubevpn or another program has printed it.
type exitCode int

func (c exitCode) Error() string { return fmt.Sprintf("exit code %d", int(c)) }

// paths returns the paths of the user's files.
func (a *app) paths() (config.Paths, error) { return config.Locate(a.getenv) }

// daemon returns a client of the daemon of this user, which may not run.
func (a *app) daemon() (*daemonclient.Client, error) {
	paths, err := a.paths()
	return daemonclient.New(daemonclient.Config{
		Paths: paths, Executable: a.executable, Environ: a.environ, StartHelper: a.StartHelper,
		Announce: func(line string) { a.Note("%s", line) }, Log: a.log,
	}), err
}

// status returns the status of the daemon. If none runs, the status has no connections.
func (a *app) status(ctx context.Context) (api.Status, error) {
	c, err := a.daemon()
	if err != nil {
		return api.Status{}, err
	}
	status, err := c.Status(ctx)
	if errors.Is(err, daemonclient.ErrNoDaemon) {
		status = api.Status{Version: version.Full(), Connections: []api.Connection{}, Intercepts: []api.Intercept{}}
		err = nil
	}
	status.TypeMeta, status.Machine = api.Type(api.KindStatus), a.Machine
	return status, err
}

func (a *app) getenv(name string) string {
	v, _ := a.lookup(name)
	return v
}
