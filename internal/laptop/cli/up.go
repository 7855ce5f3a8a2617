package cli

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"syscall"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"kubevpn/internal/api"
	"kubevpn/internal/laptop/cli/command"
	"kubevpn/internal/laptop/cli/daemonclient"
	"kubevpn/internal/laptop/cli/term"
	"kubevpn/internal/laptop/hostservice"
	"kubevpn/internal/laptop/project"
)

// upOptions are the flags of up and down.
type upOptions struct {
	f        *command.Factory
	file     string
	profiles []string
	dryRun   bool
	detach   bool
	wait     bool
	rootless bool
	program  []string
	output   *term.Format
}

func newUp(f *command.Factory) *cobra.Command {
	o := &upOptions{f: f, output: term.NewFormat("text", "json")}
	cmd := &cobra.Command{
		Use:   "up [-- COMMAND...]",
		Short: "Start what kubevpn.yaml lists: connections, intercepts, clones, programs",
		Long: "Start what kubevpn.yaml lists, and keep it until Ctrl-C or `kubevpn down`. The file lists commands\n" +
			"of kubevpn and their flags:\n\n" +
			"  defaults: {namespace: shop, headers: [\"x-user=${USER}\"]}\n" +
			"  proxy:\n" +
			"    web: {workload: deployment/web, port: [3000:8080]}\n" +
			"  dev:\n" +
			"    cart:\n" +
			"      workload: deployment/cart\n" +
			"      command: [go, run, ./cmd/cart]\n" +
			"      healthcheck: {test: curl -fs localhost:8080/healthz}\n" +
			"      needs: [web]\n\n" +
			"kubevpn.local.yaml beside it changes values for you alone. If the project is up already, the command\n" +
			"changes only what differs. With a COMMAND, it runs the command when everything is ready, ends\n" +
			"everything after it, and exits with its exit code; if anything fails, it writes a report.",
		Example: command.Examples(
			"Start everything, with its output, until Ctrl-C", "kubevpn up",
			"In the background", "kubevpn up -d", "kubevpn down",
			"Show what would change", "kubevpn up --dry-run",
			"Also the entries of a profile", "kubevpn up --profile debug",
			"Run tests in a pipeline", "kubevpn up --wait -- npm test",
		),
		Args: func(cmd *cobra.Command, args []string) error {
			if n := cmd.ArgsLenAtDash(); n < 0 && len(args) > 0 || n > 0 {
				return api.Errorf(api.ExitUsage, "`kubevpn up` takes no names, but got %q", args[0]).
					WithHint("name the file with -f, and write a command after --")
			}
			if o.detach && len(args) > 0 {
				return api.Errorf(api.ExitUsage, "--detach cannot be combined with a command")
			}
			o.detach = o.detach || o.wait && len(args) == 0 // as with compose
			return nil
		},
		RunE: func(cmd *cobra.Command, args []string) error {
			o.program = args
			return f.Report(cmd.Context(), o.output, o.run)
		},
	}
	o.addFile(cmd)
	flags := cmd.Flags()
	flags.StringArrayVar(&o.profiles, "profile", nil, "also start the entries of this profile; may be repeated")
	flags.BoolVar(&o.dryRun, "dry-run", false, "show what would start, restart and end, and change nothing")
	flags.BoolVarP(&o.detach, "detach", "d", false, "return when everything is ready; 'kubevpn down' ends it")
	flags.BoolVar(&o.wait, "wait", false,
		"like --detach, or with a command, which always waits until everything is ready")
	flags.BoolVar(&o.rootless, "rootless", false,
		"without root and without changing this machine: intercepts work, and the command reaches the cluster as with "+
			"'kubevpn run' (default where this machine allows nothing else)")
	o.output.AddTo(cmd)
	return cmd
}

func newDown(f *command.Factory) *cobra.Command {
	o := &upOptions{f: f}
	cmd := &cobra.Command{
		Use:   "down",
		Short: "End what kubevpn up has started",
		Long:  "End what `kubevpn up` has started from the same file, in this terminal or another one.",
		Example: command.Examples("End it", "kubevpn down",
			"That of another file", "kubevpn down -f shop/kubevpn.yaml"),
		RunE: func(cmd *cobra.Command, _ []string) error {
			file, err := filepath.Abs(o.file)
			if err != nil {
				return err
			}
			err = f.Daemon().Down(cmd.Context(), file, o.show(&project.Project{}))
			e := api.AsError(err)
			if errors.Is(err, daemonclient.ErrNoDaemon) || e != nil && e.Code == api.ExitNotConnected {
				fmt.Fprintln(f.Errout, "not up")
				return nil
			}
			return err
		},
	}
	o.addFile(cmd)
	return cmd
}

func (o *upOptions) addFile(cmd *cobra.Command) {
	cmd.Flags().StringVarP(&o.file, "file", "f", project.DefaultFile, "file that lists the entries")
	_ = cmd.MarkFlagFilename("file", "yaml", "yml") // the flag exists
}

// colours of the names of entries, as SGR parameters: see console_codes(4) of Linux.
var colours = [...]int{36, 33, 32, 35, 34, 96, 93, 92, 95, 94}

// show returns a function that prints the output of entries behind their names.
func (o *upOptions) show(p *project.Project) func(api.Event) {
	width, index := 0, map[string]int{}
	for n, e := range p.Entries {
		width, index[e.Name] = max(width, len(e.Name)), n
	}
	out := o.f.Out
	if len(o.program) > 0 {
		out = o.f.Errout // the standard output is that of the user's command
	}
	terminal := term.File(out)
	if o.f.Dumb || o.f.Getenv("NO_COLOR") != "" {
		terminal = nil
	}
	return func(e api.Event) {
		switch name, text := api.Clean(e.Entry), api.Clean(e.Detail); {
		case e.Entry == "":
		case terminal != nil:
			fmt.Fprintf(terminal, "\x1b[%dm%-*s |\x1b[0m %s\n", colours[index[e.Entry]%len(colours)], width, name, text)
		default:
			fmt.Fprintf(out, "%-*s | %s\n", width, name, text)
		}
	}
}

func (o *upOptions) run(ctx context.Context, on func(api.Event), quiet func()) error {
	if runtime.GOOS == "windows" {
		return api.Errorf(api.ExitUsage, "`kubevpn up` does not run on Windows").
			WithHint("run the commands of the file one by one")
	}
	o.rootless = o.rootless || o.withoutDevice(ctx)
	p, err := o.read()
	if err != nil {
		return err
	}
	if o.output.ForPeople() {
		on = o.show(p)
	}
	req := project.Request{Project: *p, Attached: !o.detach, DryRun: o.dryRun}
	if o.dryRun {
		return o.f.Daemon().Up(ctx, req, on)
	}
	release, err := o.hold(ctx, p)
	if err != nil {
		return err
	}
	err = o.keep(ctx, req, on, release)
	if errors.Is(err, context.Canceled) && len(o.program) == 0 {
		return nil // Ctrl-C is the regular end
	}
	return err
}

// keep has the daemon make the project. It calls ready when everything is up, and returns when the user's command has
// ended, if there is one; else when the project has, unless it is detached.
func (o *upOptions) keep(ctx context.Context, req project.Request, on func(api.Event), ready func()) (err error) {
	held, end := context.WithCancel(ctx)
	defer end()
	up, ended := make(chan struct{}), make(chan error, 1)
	go func() {
		ended <- o.f.Daemon().Up(held, req, func(e api.Event) {
			on(e)
			if e.Held {
				close(up)
			}
		})
	}()
	select {
	case err := <-ended: // it is detached, or was up before
		ready()
		switch {
		case err != nil && len(o.program) > 0 && ctx.Err() == nil:
			o.report(ctx, &req.Project)
			return err
		case err == nil && len(o.program) > 0:
			return o.command(ctx, &req.Project)
		case err == nil:
			o.f.Note("Everything is up. `kubevpn down` ends it.")
		}
		return err
	case <-up:
	}
	ready()
	if len(o.program) == 0 {
		fmt.Fprintln(o.f.Errout, "Everything is up. Ctrl-C ends it.")
		return <-ended
	}
	running, stop := context.WithCancel(ctx)
	over := make(chan error, 1)
	go func() {
		over <- <-ended
		stop() // without the project, what the command sees means nothing
	}()
	err = o.command(running, &req.Project)
	end()
	if cleanup := <-over; cleanup != nil && !errors.Is(cleanup, context.Canceled) {
		o.report(ctx, &req.Project)
		return cleanup
	}
	return err
}

// read reads the project, for this machine.
func (o *upOptions) read() (*project.Project, error) {
	environ, err := absoluteKubeconfig(o.f.Environ)
	if err != nil {
		return nil, err
	}
	p, err := project.Read(project.Options{File: o.file, Profiles: o.profiles, Environ: environ,
		Commands: projectCommands{o.f}, Similar: similar})
	if err != nil || !o.rootless {
		return p, err
	}
	p.Entries = slices.DeleteFunc(p.Entries, func(e project.Entry) bool { return e.Kind == project.KindConnect })
	for n := range p.Entries {
		e, flag := &p.Entries[n], "--socks=127.0.0.1:0"
		if e.Kind == "dev" {
			flag = "--isolate"
		}
		e.Args = append([]string{flag}, e.Args...)
	}
	return p, nil
}

// absoluteKubeconfig returns an environment with absolute paths in KUBECONFIG, because the entries of a project run in
// other directories.
func absoluteKubeconfig(environ []string) ([]string, error) {
	environ = slices.Clone(environ)
	for n, entry := range environ {
		list, found := strings.CutPrefix(entry, "KUBECONFIG=")
		if !found {
			continue
		}
		files := filepath.SplitList(list)
		for i, file := range files {
			abs, err := filepath.Abs(file)
			if err != nil {
				return nil, err
			}
			if file != "" {
				files[i] = abs
			}
		}
		environ[n] = "KUBECONFIG=" + strings.Join(files, string(filepath.ListSeparator))
	}
	return environ, nil
}

// withoutDevice reports whether this machine allows no connection of the whole machine.
func (o *upOptions) withoutDevice(ctx context.Context) bool {
	if runtime.GOOS != "linux" {
		return false
	}
	if _, err := os.Stat("/dev/net/tun"); err != nil {
		return true
	}
	if os.Geteuid() == 0 {
		return false
	}
	if s, err := hostservice.Status(ctx); err == nil && s.Active && s.Allowed {
		return false
	}
	_, err := exec.LookPath("sudo")
	return err != nil
}

// hold makes the connections of the project in processes that use this terminal, for questions and for sudo's password.
// It returns when they are ready. release lets them end.
func (o *upOptions) hold(ctx context.Context, p *project.Project) (release func(), err error) {
	var all []*exec.Cmd
	release = func() {
		for _, cmd := range all {
			_ = cmd.Process.Signal(os.Interrupt) // it may have ended, and has said why
			_ = cmd.Wait()
		}
		all = nil
	}
	for _, e := range p.Entries {
		if e.Kind != project.KindConnect {
			continue
		}
		events, theirs, err := os.Pipe()
		if err != nil {
			return nil, err
		}
		defer events.Close()
		cmd := exec.CommandContext(ctx, o.f.Executable, append([]string{"--events=3"}, e.Held()...)...)
		cmd.Cancel = func() error { return cmd.Process.Signal(os.Interrupt) }
		cmd.Env, cmd.Dir, cmd.ExtraFiles = p.Environ, e.Directory, []*os.File{theirs}
		cmd.Stdin, cmd.Stdout, cmd.Stderr = os.Stdin, os.Stderr, os.Stderr
		err = cmd.Start()
		theirs.Close()
		if err != nil {
			return nil, err
		}
		all = append(all, cmd)
		held := false
		for lines := json.NewDecoder(events); !held; {
			var event api.Event
			if err := lines.Decode(&event); err != nil {
				release()
				return nil, cmp.Or(ctx.Err(), error(command.ExitCode(cmd.ProcessState.ExitCode())))
			}
			held = event.Held
		}
	}
	return release, nil
}

// command runs the user's command, which reaches the cluster.
func (o *upOptions) command(ctx context.Context, p *project.Project) error {
	args := o.program
	if o.rootless {
		args = slices.Concat([]string{o.f.Executable, "run"}, p.Cluster, []string{"--"}, args)
	}
	cmd := exec.CommandContext(ctx, args[0], args[1:]...)
	cmd.Env, cmd.Stdin, cmd.Stdout, cmd.Stderr = p.Environ, os.Stdin, os.Stdout, os.Stderr
	cmd.Cancel = func() error { return cmd.Process.Signal(syscall.SIGTERM) }
	err := cmd.Run()
	if cmd.ProcessState == nil {
		return api.Errorf(api.ExitUsage, "cannot run the command: %w", err)
	}
	if code := cmd.ProcessState.ExitCode(); code != 0 {
		err = command.ExitCode(cmp.Or(max(code, 0), 1))
	} else {
		err = o.failed(ctx, p)
	}
	if err != nil && ctx.Err() == nil {
		o.report(ctx, p)
	}
	return err
}

// failed returns an error if an entry has failed while the command ran: what the command saw means nothing then.
func (o *upOptions) failed(ctx context.Context, p *project.Project) error {
	status, err := o.f.Status(ctx)
	for _, other := range status.Projects {
		for _, e := range other.Entries {
			if other.File == p.File && e.State == api.ProjectFailed {
				err = errors.Join(err, api.Errorf(api.ExitLost, "%s failed while the command ran: %s", e.Name,
					e.Detail))
			}
		}
	}
	return err
}

// report writes a report beside the project. It does not fail the command any further.
func (o *upOptions) report(ctx context.Context, p *project.Project) {
	cmd := exec.CommandContext(ctx, o.f.Executable, append([]string{"report"}, p.Cluster...)...)
	cmd.Dir, cmd.Env, cmd.Stdout, cmd.Stderr = filepath.Dir(p.File), p.Environ, os.Stderr, os.Stderr
	if err := cmd.Run(); err != nil {
		fmt.Fprintf(o.f.Errout, "! no report: %v\n", err)
	}
}

// projectCommands are the commands as a project sees them.
type projectCommands struct{ f *command.Factory }

// notInProjects are flags that say how a command runs, which `kubevpn up` decides.
var notInProjects = []string{"output", "foreground", "attached", "reconnect", "upgrade", "socks", "add-header", "help",
	"interactive", "tty", "portmap"}

func (c projectCommands) find(kind string) *cobra.Command {
	f := *c.f
	f.In = strings.NewReader("")            // nothing is asked
	for _, group := range commandGroups() { // not newRoot: a file has many entries
		for _, cmd := range group.commands(&f) {
			if cmd.Name() == kind {
				(&cobra.Command{Use: "kubevpn"}).AddCommand(cmd) // which messages name
				return cmd
			}
		}
	}
	panic("there is no command " + kind) // a test lists all kinds
}

func (c projectCommands) New(kind string) (flags *pflag.FlagSet, check func(args []string) error) {
	cmd := c.find(kind)
	flags = pflag.NewFlagSet(kind, pflag.ContinueOnError)
	cmd.Flags().VisitAll(func(f *pflag.Flag) {
		if !f.Hidden && !slices.Contains(notInProjects, f.Name) {
			flags.AddFlag(f)
		}
	})
	return flags, func(args []string) error {
		if err := cmd.ParseFlags(args); err != nil {
			return err
		}
		args = cmd.Flags().Args()
		if err := cmd.ValidateArgs(args); err != nil || cmd.PreRunE == nil {
			return err
		}
		return cmd.PreRunE(cmd, args)
	}
}
