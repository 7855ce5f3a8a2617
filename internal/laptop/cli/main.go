package cli

import (
	"context"
	"errors"
	"flag"
	"log/slog"
	"os"
	"os/signal"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"

	"k8s.io/klog/v2"

	"kubevpn/internal/api"
	"kubevpn/internal/laptop/cli/command"
	"kubevpn/internal/laptop/cli/term"
)

// Main runs the command that os.Args names and returns the exit code of the process. On the first interrupt the command
// cleans up and ends. The second interrupt ends the process.
func Main(programs command.Programs) int {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	context.AfterFunc(ctx, stop) // the next signal is not caught

	executable, _ := os.Executable() // commands that need it report an error
	f := &command.Factory{
		Programs: programs,
		Streams: term.Streams{In: os.Stdin, Out: &term.Cleaner{W: os.Stdout}, Errout: &term.Cleaner{W: os.Stderr},
			Dumb: os.Getenv("TERM") == "dumb"},
		Lookup: os.LookupEnv, Environ: os.Environ(), Executable: executable, Log: slog.New(slog.DiscardHandler),
	}
	klog.SetSlogLogger(f.Log) // errors contain the messages of client-go
	return run(ctx, f, strings.HasPrefix(filepath.Base(os.Args[0]), "kubectl-"), os.Args[1:])
}

// run runs the command that args name. plugin means that kubectl runs this program as its plugin.
func run(ctx context.Context, f *command.Factory, plugin bool, args []string) int {
	root := newRoot(f, plugin)
	f.Args = args
	root.SetArgs(args)
	root.SetIn(f.In)
	root.SetOut(f.Out)
	root.SetErr(f.Errout)
	err := unknownHelp(root, args)
	if err == nil {
		err = root.ExecuteContext(ctx)
	}
	if err == nil {
		return int(api.ExitOK)
	}
	if code, ok := errors.AsType[command.ExitCode](err); ok {
		return int(code)
	}
	e := term.AsError(ctx, err)
	if plugin {
		named := *e
		named.Message, named.Hint = inPlugin(e.Message), inPlugin(e.Hint)
		e = &named
	}
	term.PrintError(f.Errout, e)
	return int(e.Code)
}

// setVerbosity logs to standard error what -v asks for: the requests of this process and its decisions.
func setVerbosity(f *command.Factory) {
	if f.Verbosity <= 0 {
		return
	}
	var flags flag.FlagSet
	klog.InitFlags(&flags)
	_ = flags.Set("v", strconv.Itoa(f.Verbosity)) // an integer is valid
	// klog and slog number levels in opposite directions.
	level := &slog.HandlerOptions{Level: slog.Level(-f.Verbosity)}
	f.Log = slog.New(slog.NewTextHandler(f.Errout, level))
	klog.SetSlogLogger(f.Log)
}
