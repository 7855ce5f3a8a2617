package cli

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"os/signal"
	"strings"
	"syscall"

	"k8s.io/klog/v2"

	"kubevpn/internal/api"
	"kubevpn/internal/config"
)

// Programs are the parts of kubevpn that are not commands. All must be set.
type Programs struct {
	// RunDaemon runs this user's daemon until ctx ends or it has nothing to do. It calls ready once it answers.
	RunDaemon func(ctx context.Context, paths config.Paths, ready func()) error
	// StartHelper starts the root helper, with sudo where this is not root, on the user's terminal, and returns
	// the socket that speaks to it.
	StartHelper func(ctx context.Context) (*os.File, error)
	// RunHelper is the helper process: what StartHelper started runs it.
	RunHelper func(ctx context.Context) error
	// Foreground keeps one connection in this process until ctx ends. It returns nil if it was connected by then.
	Foreground func(ctx context.Context, paths config.Paths, req api.ConnectRequest, progress func(api.Event)) error
	// Isolated makes a connection, and intercepts if the request has any, for a place in this process, calls ready when all of it
	// is there, and keeps it until ctx ends, which is no error.
	Isolated func(ctx context.Context, req api.InterceptRequest, place Place, ready func(), progress func(api.Event)) error
	// Reset removes every intercept of workloads, with the user's own rights.
	Reset func(ctx context.Context, req api.ResetRequest, progress func(api.Event)) error
}

// app is what every command has at hand.
type app struct {
	Programs
	in         io.Reader
	out        io.Writer // results
	errout     io.Writer // everything else
	lookup     func(string) (string, bool)
	environ    []string
	executable string // absolute; "" if it is not known
}

// Main runs the command that os.Args names and returns the process's exit code. The first interrupt ends what
// is being done, and waits for that; the second ends the process.
func Main(programs Programs) int {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	context.AfterFunc(ctx, stop) // the next signal is not caught

	klog.SetSlogLogger(slog.New(slog.DiscardHandler)) // what client-go has to say is in the errors; the daemon keeps it

	executable, err := os.Executable()
	if err != nil {
		executable = "" // where it matters, that is said
	}
	a := &app{
		Programs: programs, in: os.Stdin, out: os.Stdout, errout: os.Stderr,
		lookup: os.LookupEnv, environ: os.Environ(), executable: executable,
	}
	return a.main(ctx, os.Args[1:])
}

func (a *app) main(ctx context.Context, args []string) int {
	root := newRoot(a)
	root.SetArgs(args)
	root.SetIn(a.in)
	root.SetOut(a.out)
	root.SetErr(a.errout)
	err := root.ExecuteContext(ctx)
	var code exitCode
	switch {
	case err == nil:
		return int(api.ExitOK)
	case errors.As(err, &code):
		return int(code)
	case ctx.Err() != nil && errors.Is(err, context.Canceled):
		err = api.Errorf(api.ExitInterrupted, "interrupted")
	}
	e := api.AsError(err)
	printError(a.errout, e)
	return int(e.Code)
}

// exitCode is an error that was told already, or whose teller is another program.
type exitCode int

func (c exitCode) Error() string { return fmt.Sprintf("exit code %d", int(c)) }

// printError writes what happened and, indented, what to do next.
func printError(w io.Writer, e *api.Error) {
	fmt.Fprintf(w, "Error: %s\n", e.Message)
	if e.Hint == "" {
		return
	}
	for line := range strings.Lines(e.Hint) {
		fmt.Fprintf(w, "  %s\n", strings.TrimRight(line, "\n"))
	}
}

// paths says where the user's files are.
func (a *app) paths() (config.Paths, error) { return config.Locate(a.getenv) }

func (a *app) getenv(name string) string {
	v, _ := a.lookup(name)
	return v
}
