package cli

import (
	"bufio"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
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
	f         *command.Factory
	file      string
	profiles  []string
	dryRun    bool
	detach    bool
	supervise int // this is the process that --detach starts, which closes this file when it serves requests; else 0
	wait      bool
	rootless  bool
	program   []string
	output    *term.Format
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
			return nil
		},
		RunE: func(cmd *cobra.Command, args []string) error {
			o.program = args
			return o.run(cmd.Context())
		},
	}
	o.addFile(cmd)
	flags := cmd.Flags()
	flags.StringArrayVar(&o.profiles, "profile", nil, "also start the entries of this profile; may be repeated")
	flags.BoolVar(&o.dryRun, "dry-run", false, "show what would start, restart and end, and change nothing")
	flags.BoolVarP(&o.detach, "detach", "d", false, "return when everything is ready; `kubevpn down` ends it")
	flags.BoolVar(&o.wait, "wait", false, "wait until everything is ready before the command (always, with a command)")
	flags.BoolVar(&o.rootless, "rootless", false,
		"without root and without changing this machine: intercepts work, and the command reaches the cluster as with "+
			"'kubevpn run' (default where this machine allows nothing else)")
	flags.IntVar(&o.supervise, "supervise", 0, "file descriptor that is closed when the process accepts requests")
	flags.Lookup("supervise").Hidden = true
	o.output.AddTo(cmd)
	return cmd
}

func newDown(f *command.Factory) *cobra.Command {
	o := &upOptions{f: f}
	cmd := &cobra.Command{
		Use:     "down",
		Short:   "End what kubevpn up has started",
		Long:    "End what `kubevpn up` has started from the same file, in this terminal or another one.",
		Example: command.Examples("End it", "kubevpn down", "That of another file", "kubevpn down -f shop/kubevpn.yaml"),
		RunE: func(cmd *cobra.Command, _ []string) error {
			c, err := o.client()
			if err != nil {
				return err
			}
			err = c.Down(cmd.Context(), o.out().Line)
			if errors.Is(err, project.ErrDown) {
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

// client returns a client of the process that keeps the project.
func (o *upOptions) client() (project.Client, error) {
	paths, err := o.f.Paths()
	if err != nil {
		return project.Client{}, err
	}
	file, err := filepath.Abs(o.file)
	return project.Client{Socket: project.SocketOf(paths, file)}, err
}

// out returns where the output of the entries goes.
func (o *upOptions) out() project.Output {
	out := project.Output{W: o.f.Out}
	if f := term.File(o.f.Out); f != nil && !o.f.Dumb && o.f.Getenv("NO_COLOR") == "" {
		out.Terminal = f
	}
	return out
}

func (o *upOptions) run(ctx context.Context) error {
	if o.supervise > 0 {
		return o.keep(ctx)
	}
	if !o.output.ForPeople() && !o.dryRun && !o.detach {
		return api.Errorf(api.ExitUsage, "-o json requires --dry-run or --detach").
			WithHint("`kubevpn status -o json` shows a project that is up")
	}
	o.rootless = o.rootless || o.withoutDevice(ctx)
	p, err := o.read()
	if err != nil {
		return err
	}
	c, err := o.client()
	if err != nil {
		return err
	}
	_, down := c.Project(ctx)
	switch {
	case o.dryRun:
		return o.preview(ctx, c, p)
	case down == nil:
		err = o.change(ctx, c, p)
	case o.detach:
		err = o.background(ctx, c, p)
	default:
		return o.foreground(ctx, p)
	}
	if err != nil || o.output.ForPeople() {
		return err
	}
	shown, err := c.Project(ctx)
	return cmp.Or(err, o.output.Print(o.f.Out, shown))
}

// read reads the project, for this machine.
func (o *upOptions) read() (*project.Project, error) {
	p, err := project.Read(project.Options{File: o.file, Profiles: o.profiles, Environ: o.f.Environ,
		Commands: projectCommands{o.f}, Similar: similar})
	if err != nil || !o.rootless {
		return p, err
	}
	p.Entries = slices.DeleteFunc(p.Entries, func(e project.Entry) bool { return e.Kind == project.KindConnect })
	for n := range p.Entries {
		switch e := &p.Entries[n]; e.Kind {
		case "dev":
			e.Args = append([]string{"--isolate"}, e.Args...)
		default:
			e.Args = append([]string{"--socks=127.0.0.1:0"}, e.Args...)
		}
	}
	return p, nil
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

// preview prints what would change.
func (o *upOptions) preview(ctx context.Context, c project.Client, p *project.Project) error {
	all, err := c.Differences(ctx, p)
	if err != nil || !o.output.ForPeople() {
		return cmp.Or(err, o.output.Print(o.f.Out, all))
	}
	for _, d := range all {
		fmt.Fprintf(o.f.Out, "%-8s %s: kubevpn %s\n", d.Change, d.Name,
			strings.Join(api.Texts(d.Command(), api.ShellQuote), " "))
	}
	return nil
}

// change changes a project that is up.
func (o *upOptions) change(ctx context.Context, c project.Client, p *project.Project) error {
	differences, err := c.Differences(ctx, p)
	if err != nil {
		return err
	}
	if !slices.ContainsFunc(differences, func(d project.Difference) bool { return d.Changes() }) {
		o.f.Note("%s is up, and nothing differs", p.Name)
	} else if err := o.apply(ctx, p, func() error { return c.Apply(ctx, p, o.out().Line) }); err != nil {
		return err
	}
	if len(o.program) == 0 {
		return nil
	}
	return o.command(ctx, p)
}

// apply runs do while this process holds the connections of the project: only this one may use the terminal, for
// questions and for sudo's password.
func (o *upOptions) apply(ctx context.Context, p *project.Project, do func() error) error {
	for _, e := range p.Entries {
		if e.Kind != project.KindConnect {
			continue
		}
		release, err := o.hold(ctx, p, e)
		if err != nil {
			return err
		}
		defer release()
	}
	return do()
}

// hold connects in a process that uses this terminal. It returns when the connection is ready.
func (o *upOptions) hold(ctx context.Context, p *project.Project, e project.Entry) (release func(), err error) {
	events, theirs, err := os.Pipe()
	if err != nil {
		return nil, err
	}
	defer events.Close()
	cmd := exec.Command(o.f.Executable, append([]string{"--events=3"}, e.Held()...)...)
	cmd.Env, cmd.Dir, cmd.ExtraFiles = p.Environ, e.Directory, []*os.File{theirs}
	cmd.Stdin, cmd.Stdout, cmd.Stderr = os.Stdin, os.Stderr, os.Stderr
	err = cmd.Start()
	theirs.Close()
	if err != nil {
		return nil, err
	}
	release = func() {
		_ = cmd.Process.Signal(os.Interrupt) // it may have ended
		_ = cmd.Wait()                       // it has said why
	}
	lines := bufio.NewScanner(events)
	lines.Buffer(nil, 1<<20)
	for lines.Scan() {
		var event api.Event
		if err := json.Unmarshal(lines.Bytes(), &event); err == nil && event.Held {
			go io.Copy(io.Discard, events)
			return release, nil
		}
	}
	release()
	if ctx.Err() != nil {
		return nil, ctx.Err()
	}
	return nil, command.ExitCode(cmd.ProcessState.ExitCode())
}

// foreground keeps the project in this process.
func (o *upOptions) foreground(ctx context.Context, p *project.Project) (err error) {
	set, serving, finish, err := o.serve(ctx, "")
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, finish()) }()
	err = o.apply(serving, p, func() error { return set.Apply(serving, *p, nil) })
	switch {
	case ctx.Err() != nil && len(o.program) == 0:
		return nil // Ctrl-C is the regular end
	case err == nil && len(o.program) == 0:
		fmt.Fprintln(o.f.Errout, "Everything is up. Ctrl-C ends it.")
		return set.Ended(serving)
	case err == nil:
		err = o.command(ctx, p)
	}
	if err != nil && ctx.Err() == nil && len(o.program) > 0 {
		o.report(ctx, p)
	}
	return err
}

// serve starts to serve a new Set. serving ends when a client has ended the Set. finish ends it.
func (o *upOptions) serve(ctx context.Context,
	log string) (set *project.Set, serving context.Context, finish func() error, err error) {
	paths, err := o.f.Paths()
	if err != nil {
		return nil, nil, nil, err
	}
	file, err := filepath.Abs(o.file)
	if err != nil {
		return nil, nil, nil, err
	}
	l, err := project.Listen(ctx, paths, file)
	if err != nil {
		return nil, nil, nil, err
	}
	set = project.NewSet(o.f.Executable, o.out())
	serving, stop := context.WithCancel(ctx)
	served := make(chan error, 1)
	go func() {
		defer stop()
		served <- set.Serve(serving, l, log)
	}()
	return set, serving, func() error {
		err := set.Down(context.WithoutCancel(ctx), nil)
		stop()
		return errors.Join(err, <-served)
	}, nil
}

// background starts a process that keeps the project, and returns when everything is ready.
func (o *upOptions) background(ctx context.Context, c project.Client, p *project.Project) error {
	paths, err := o.f.Paths()
	if err != nil {
		return err
	}
	if err := paths.MakeStateDir(); err != nil {
		return err
	}
	log, err := os.OpenFile(project.LogOf(paths, p.File), os.O_WRONLY|os.O_CREATE|os.O_TRUNC, 0o600)
	if err != nil {
		return err
	}
	defer log.Close()
	ready, theirs, err := os.Pipe()
	if err != nil {
		return err
	}
	defer ready.Close()
	cmd := exec.Command(o.f.Executable, "up", "--supervise=3", "--file="+p.File)
	cmd.Dir, cmd.Env, cmd.Stdout, cmd.Stderr, cmd.ExtraFiles = "/", o.f.Environ, log, log, []*os.File{theirs}
	daemonclient.Detach(cmd)
	err = cmd.Start()
	theirs.Close()
	if err != nil {
		return err
	}
	go cmd.Wait()                                // it lives longer, unless it fails
	if _, err := io.ReadAll(ready); err != nil { // ends when the process serves, or has failed
		return err
	}
	err = o.apply(ctx, p, func() error { return c.Apply(ctx, p, o.out().Line) })
	if errors.Is(err, project.ErrDown) {
		return api.Errorf(api.ExitDaemon, "the process that keeps the project did not start").
			WithHint("see %s for the cause", log.Name())
	}
	if err != nil {
		return errors.Join(err, c.Down(context.WithoutCancel(ctx), o.out().Line))
	}
	o.f.Note("Everything is up. `kubevpn down` ends it; its output is in %s", log.Name())
	return nil
}

// keep is the process that background starts.
func (o *upOptions) keep(ctx context.Context) error {
	paths, err := o.f.Paths()
	if err != nil {
		return err
	}
	_, serving, finish, err := o.serve(ctx, project.LogOf(paths, o.file))
	if err != nil {
		return err
	}
	if err := os.NewFile(uintptr(o.supervise), "ready").Close(); err != nil {
		return errors.Join(err, finish())
	}
	<-serving.Done()
	return finish()
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
		return command.ExitCode(cmp.Or(max(code, 0), 1))
	}
	return nil
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
	f.In = strings.NewReader("") // nothing is asked
	cmd, _, err := newRoot(&f, false).Find([]string{kind})
	if err != nil {
		panic(err) // a test lists all kinds
	}
	return cmd
}

func (c projectCommands) Flags(kind string) *pflag.FlagSet {
	out := pflag.NewFlagSet(kind, pflag.ContinueOnError)
	c.find(kind).Flags().VisitAll(func(f *pflag.Flag) {
		if !f.Hidden && !slices.Contains(notInProjects, f.Name) {
			out.AddFlag(f)
		}
	})
	return out
}

func (c projectCommands) Check(kind string, args []string) error {
	cmd := c.find(kind)
	if err := cmd.ParseFlags(args); err != nil {
		return err
	}
	args = cmd.Flags().Args()
	if err := cmd.ValidateArgs(args); err != nil || cmd.PreRunE == nil {
		return err
	}
	return cmd.PreRunE(cmd, args)
}
