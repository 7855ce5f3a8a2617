package cli

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"

	"github.com/spf13/cobra"
	corev1 "k8s.io/api/core/v1"

	"kubevpn/internal/api"
	"kubevpn/internal/cluster"
	"kubevpn/internal/config"
	"kubevpn/internal/dev"
	"kubevpn/internal/podenv"
	"kubevpn/pkg/sandbox"
)

type devOptions struct {
	proxyOptions
	inbound  bool
	env      []string
	envFiles []string
	volumes  []string
	isolate  bool
	docker   dockerOptions
}

func newDev(a *app) *cobra.Command {
	o := &devOptions{proxyOptions: proxyOptions{app: a, output: newFormat("text")}}
	cmd := &cobra.Command{
		Use:   "dev TYPE/NAME [flags] -- COMMAND...",
		Short: "Run a program on this machine as a container of a workload",
		Long: "Dev runs a program of this machine with the environment of a workload's container, its ConfigMaps, Secrets,\n" +
			"downward API and service account token, at the paths where the container has them; with the cluster's\n" +
			"network and names; and, with --proxy or --headers, with its requests. All of it ends with the program, whose\n" +
			"exit code is the command's. Secrets are in memory only.",
		Example: examples(
			"A server that gets your requests", "kubevpn dev deployment/web --headers x-user=me -- go run ./cmd/web",
			"All requests, from a debugger", "kubevpn dev deployment/web --proxy -- dlv debug ./cmd/web",
			"A look around", "kubevpn dev deployment/web -- bash",
			"Without sudo, and this machine's network as it is", "kubevpn dev deployment/web --isolate -- bash",
			"Its containers here, a shell in one", "kubevpn dev deployment/web --docker -it -- --entrypoint sh",
			"With files of yours for those of a PersistentVolumeClaim", "kubevpn dev deployment/web --volume uploads=./testdata -- ./server",
			"With another database", "kubevpn dev deployment/web --env DB_HOST=localhost --env-file .env -- ./server",
		),
		Args: func(cmd *cobra.Command, args []string) error {
			n := cmd.ArgsLenAtDash()
			if err := errors.Join(o.docker.check(cmd), o.checkIsolate()); err != nil {
				return err
			}
			if o.docker.wanted {
				return o.docker.args(cmd, args)
			}
			if n < 0 || n == len(args) {
				return api.Errorf(api.ExitUsage, "`kubevpn dev` needs a command").WithHint("behind --: `kubevpn dev deployment/web -- ./server`")
			}
			if n > 1 {
				return api.Errorf(api.ExitUsage, "`kubevpn dev` takes one workload").WithHint("the command goes behind --")
			}
			return checkWorkloads(cmd, args[:n])
		},
		RunE: func(cmd *cobra.Command, args []string) error {
			o.workloads = args[:1]
			return a.report(cmd.Context(), o.output, func(ctx context.Context, on func(api.Event), quiet func()) error {
				if o.docker.wanted {
					return o.runDocker(ctx, on, quiet)
				}
				if o.isolate {
					return o.runIsolated(ctx, args[1:], on, quiet)
				}
				return o.run(ctx, args[1:], on, quiet)
			})
		},
		ValidArgsFunction: o.flags.kube.completeWorkloads(a),
	}
	o.spec.addTo(cmd)
	completeWith(cmd, "container", o.flags.kube.completeContainers(a))
	o.flags.addWithoutImage(cmd, a, config.KeyMode)
	f := cmd.Flags()
	f.BoolVar(&o.isolate, "isolate", false, "the program alone has the cluster's network and names, in namespaces of its own (Linux): no sudo, no daemon, nothing of this machine's network changes")
	f.BoolVar(&o.inbound, "proxy", false, "requests for the workload come to the program: all of them, without --headers, --path and --method")
	f.StringArrayVar(&o.env, "env", nil, "NAME=VALUE that wins over the container's, or NAME with this machine's value; may be repeated")
	f.StringArrayVar(&o.envFiles, "env-file", nil, "file of NAME=VALUE lines, as --env; may be repeated")
	f.StringArrayVar(&o.volumes, "volume", nil, "NAME=DIRECTORY, of this machine, that stands for a volume of the pod; may be repeated")
	o.docker.addTo(cmd)
	return cmd
}

// wantsRequests reports whether the program gets any.
func (o *devOptions) wantsRequests() bool {
	return o.inbound || len(o.spec.headers) > 0 || o.spec.path != "" || len(o.spec.methods) > 0 || len(o.spec.ports) > 0
}

func (o *devOptions) run(ctx context.Context, command []string, show func(api.Event), quiet func()) error {
	on := oneByOne(show) // the daemon's events come beside the program's
	own, err := o.local()
	if err != nil {
		return err
	}
	if err := sandbox.Allowed(false); err != nil { // before anything is begun for it
		return notAllowed(err, o.isolate)
	}
	req, workload, err := o.attached(ctx, on)
	if err != nil {
		return err
	}
	// The connection, and the intercept, are held until the program has ended. Ctrl-C is the program's from when it runs.
	held, letGo := context.WithCancel(context.WithoutCancel(ctx))
	defer letGo()
	stop := context.AfterFunc(ctx, letGo)
	ready, ended := make(chan struct{}), make(chan error, 1)
	begun := false
	go func() {
		_, err := o.app.ask(held, question{path: api.PathIntercept, body: req, held: true, quiet: quiet, on: func(e api.Event) {
			on(e)
			if !begun && e.Held {
				begun = true
				close(ready)
			}
		}})
		ended <- err
	}()
	select {
	case <-ready:
	case err := <-ended:
		if err == nil {
			err = errors.New("the daemon let go of the connection")
		}
		return err
	}
	gone := make(chan struct{})
	go func() {
		defer close(gone)
		err := <-ended
		if held.Err() == nil { // at once: all that the program sees is that nothing answers any more
			if err == nil {
				err = errors.New("the connection was ended")
			}
			err = fmt.Errorf("%w; the program goes on without the cluster", err)
		}
		if err != nil && !errors.Is(err, context.Canceled) {
			on(api.Event{Warning: err.Error()})
		}
	}()
	err = o.program(ctx, stop, req.Connect, workload, command, own, on, quiet)
	letGo()
	<-gone
	return err
}

// program runs the program. stop takes the end of ctx from what is held: the terminal's signals are the program's then.
func (o *devOptions) program(ctx context.Context, stop func() bool, connect api.ConnectRequest, workload string, command []string, own local, on func(api.Event), quiet func()) error {
	p, err := o.prepare(ctx, connect, workload, command, own, on, func(*dev.Config) {})
	if err != nil {
		return err
	}
	if !stop() {
		return ctx.Err()
	}
	quiet()
	status, err := p.Run(context.WithoutCancel(ctx))
	return o.ended(command[0], status, err)
}

// prepare reads what the workload's container has; more completes the Config of the program.
func (o *devOptions) prepare(ctx context.Context, connect api.ConnectRequest, workload string, command []string, own local, on func(api.Event), more func(*dev.Config)) (*dev.Program, error) {
	like, err := o.imitated(ctx, connect, workload, on)
	if err != nil {
		return nil, err
	}
	cfg := dev.Config{
		Kube: like.cluster.Kube(), Pod: like.pod, Container: like.container, Volumes: own.volumes, Running: like.running, Exec: like.exec(), Init: []string{sandboxCommand}, Args: command,
		Local: o.app.environ, Env: own.env, Stdin: os.Stdin, Stdout: os.Stdout, Stderr: os.Stderr, Logger: slog.New(warner{warn: warnBy(on)}), Warn: warnBy(on),
	}
	more(&cfg)
	return dev.Prepare(ctx, cfg)
}

// imitated is what a program is to be like.
type imitated struct {
	cluster   *cluster.Cluster
	workload  *cluster.Workload
	container string
	pod       *corev1.Pod
}

// running finds another pod of the workload, for when pod has gone.
func (i *imitated) running(ctx context.Context) (*corev1.Pod, error) {
	return dev.Running(ctx, i.cluster.Kube(), i.workload)
}

// exec runs a command in a container of the pod. It is nil if the pod does not run.
func (i *imitated) exec() podenv.Exec {
	if !podenv.Runs(i.pod) {
		return nil
	}
	return func(ctx context.Context, container string, command []string, stdout io.Writer) error {
		return i.cluster.Exec(ctx, i.pod.Namespace, i.pod.Name, container, command, nil, stdout)
	}
}

func (o *devOptions) imitated(ctx context.Context, connect api.ConnectRequest, workload string, on func(api.Event)) (*imitated, error) {
	c, err := cluster.Load(connect.Kubeconfig, cluster.Options{})
	if err != nil {
		return nil, err
	}
	w, err := c.Workload(ctx, connect.Namespace, workload)
	if err != nil {
		return nil, err
	}
	container, err := w.Container(o.spec.container)
	if err != nil {
		return nil, err
	}
	pod, lacks, err := dev.Pod(ctx, c.Kube(), w)
	if err != nil {
		return nil, c.Explain(err)
	}
	if lacks != "" {
		warnBy(on)(lacks)
	}
	return &imitated{cluster: c, workload: w, container: container.Name, pod: pod}, nil
}

func warnBy(on func(api.Event)) func(text string) {
	return func(text string) { on(api.Event{Warning: text}) }
}

// warner is a slog.Handler for what is done in this process, whose log nobody keeps: what is wrong is shown, and nothing else.
type warner struct {
	warn  func(text string)
	attrs string
	group string
}

func (w warner) Enabled(_ context.Context, level slog.Level) bool { return level >= slog.LevelWarn }

func (w warner) Handle(_ context.Context, r slog.Record) error {
	r.Attrs(func(a slog.Attr) bool {
		w = w.with(a)
		return true
	})
	text := r.Message
	if w.attrs != "" {
		text += " (" + w.attrs + ")"
	}
	w.warn(text)
	return nil
}

func (w warner) with(a slog.Attr) warner {
	if w.attrs != "" {
		w.attrs += ", "
	}
	w.attrs += fmt.Sprintf("%s%s: %v", w.group, a.Key, a.Value.Resolve())
	return w
}

func (w warner) WithAttrs(attrs []slog.Attr) slog.Handler {
	for _, a := range attrs {
		w = w.with(a)
	}
	return w
}

func (w warner) WithGroup(name string) slog.Handler {
	w.group += name + "."
	return w
}

// attached is the request for what the program has of the cluster for as long as it runs: the connection, and its requests if it
// gets any.
func (o *devOptions) attached(ctx context.Context, on func(api.Event)) (req api.InterceptRequest, workload string, err error) {
	if req, err = o.request(ctx, on); err != nil {
		return req, "", err
	}
	req.Attached = true
	workload = req.Workloads[0]
	if !o.wantsRequests() {
		req.Workloads = nil // the connection alone
	}
	return req, workload, nil
}

// silent is for requests that no daemon gets, whose flags all have an effect: what tells of those without is not asked.
func silent(api.Event) {}

// oneByOne shows one event at a time.
func oneByOne(show func(api.Event)) func(api.Event) {
	var mu sync.Mutex
	return func(e api.Event) {
		mu.Lock()
		defer mu.Unlock()
		show(e)
	}
}

// ended is what the command makes of the program's end, or of why it did not begin.
func (o *devOptions) ended(program string, status sandbox.ExitStatus, err error) error {
	switch {
	case errors.Is(err, os.ErrNotExist) && !found(program): // else it is another file that is missing
		return api.Errorf(api.ExitUsage, "%w", err)
	case errors.Is(err, sandbox.ErrNotAllowed): // what does not let it tells by nothing but a try
		return notAllowed(err, o.isolate)
	case err != nil:
		return err
	case status.Code != 0:
		return exitCode(status.Code)
	}
	return nil
}

// found reports whether there is such a program on this machine.
func found(program string) bool {
	_, err := exec.LookPath(program)
	return err == nil || errors.Is(err, exec.ErrDot)
}

// local is what the program has of this machine in place of what the container has.
type local struct {
	env     []string          // NAME=VALUE
	volumes map[string]string // absolute paths of directories, by the volume's name
}

func (o *devOptions) local() (l local, err error) {
	if l.env, err = o.environment(); err == nil {
		l.volumes, err = o.directories()
	}
	return l, err
}

// environment is what --env and --env-file say.
func (o *devOptions) environment() ([]string, error) {
	var all []string
	add := func(from, entry string) error {
		name, _, given := strings.Cut(entry, "=")
		if name == "" || strings.ContainsAny(name, " \t\x00") {
			return api.Errorf(api.ExitUsage, "%s: %q is neither NAME=VALUE nor NAME", from, entry)
		}
		if !given {
			value, there := o.app.lookup(name)
			if !there {
				return api.Errorf(api.ExitUsage, "%s: this machine's environment has no %s", from, name)
			}
			entry = name + "=" + value
		}
		all = append(all, entry)
		return nil
	}
	for _, path := range o.envFiles {
		b, err := os.ReadFile(path)
		if err != nil {
			return nil, api.Errorf(api.ExitUsage, "--env-file: %w", err)
		}
		n := 0
		for line := range strings.Lines(string(b)) {
			n++
			line = strings.TrimSpace(line)
			if line == "" || strings.HasPrefix(line, "#") {
				continue
			}
			if err := add(fmt.Sprintf("%s:%d", path, n), line); err != nil {
				return nil, err
			}
		}
	}
	for _, entry := range o.env {
		if err := add("--env", entry); err != nil {
			return nil, err
		}
	}
	return all, nil
}

// directories is what --volume says.
func (o *devOptions) directories() (map[string]string, error) {
	all := map[string]string{}
	for _, text := range o.volumes {
		name, dir, given := strings.Cut(text, "=")
		if !given || name == "" || dir == "" {
			return nil, api.Errorf(api.ExitUsage, "--volume: %q is not NAME=DIRECTORY", text)
		}
		info, err := os.Stat(dir)
		if err == nil && !info.IsDir() {
			err = &fs.PathError{Op: "open", Path: dir, Err: syscall.ENOTDIR}
		}
		if err == nil {
			all[name], err = filepath.Abs(dir)
		}
		if err != nil {
			return nil, api.Errorf(api.ExitUsage, "--volume: %w", err)
		}
	}
	return all, nil
}

// sandboxCommand is the hidden command that dev starts again as.
const sandboxCommand = "sandbox"

func newSandbox() *cobra.Command {
	return &cobra.Command{
		Use:     sandboxCommand,
		Short:   "Be the first process of a sandbox (started by dev)",
		Example: examples("It is of no use by hand", "kubevpn dev deployment/web -- ./server"),
		Hidden:  true,
		Args:    noArgs,
		RunE:    func(*cobra.Command, []string) error { return sandbox.Init() },
	}
}
