package cli

import (
	"context"
	"fmt"
	"io"
	"log/slog"
	"os"

	"github.com/spf13/cobra"
	"golang.org/x/term"

	"kubevpn/internal/api"
	"kubevpn/internal/config"
	"kubevpn/internal/docker"
	"kubevpn/pkg/sandbox"
)

// dockerOptions are dev's with --docker.
type dockerOptions struct {
	wanted           bool
	image            string
	interactive, tty bool
	publish          []string
	arguments        docker.Arguments // behind --
}

func (o *dockerOptions) addTo(cmd *cobra.Command) {
	f := cmd.Flags()
	f.BoolVar(&o.wanted, "docker", false, "run the pod's containers with this machine's Docker Engine (with -c that one alone); behind -- go flags of docker run for the one whose terminal this is")
	f.StringVar(&o.image, "image", "", "with --docker: image of that container (default the pod's)")
	f.BoolVarP(&o.interactive, "interactive", "i", false, "with --docker: as docker run has it")
	f.BoolVarP(&o.tty, "tty", "t", false, "with --docker: as docker run has it")
	f.StringArrayVarP(&o.publish, "publish", "p", nil, "with --docker: port of this machine and of the containers, as docker run has it; may be repeated")
}

// check refuses flags that only --docker has a use for.
func (o *dockerOptions) check(cmd *cobra.Command) error {
	if o.wanted {
		return nil
	}
	for _, name := range []string{"image", "interactive", "tty", "publish"} {
		if cmd.Flags().Changed(name) {
			return api.Errorf(api.ExitUsage, "--%s is for containers", name).WithHint("with --docker the pod's containers run here")
		}
	}
	return nil
}

func (o *dockerOptions) args(cmd *cobra.Command, args []string) (err error) {
	n := cmd.ArgsLenAtDash()
	if n < 0 {
		n = len(args)
	}
	if n > 1 {
		return api.Errorf(api.ExitUsage, "`kubevpn dev` takes one workload").WithHint("flags of `docker run` go behind --")
	}
	if o.arguments, err = docker.ParseArguments(args[n:]); err != nil {
		return err
	}
	return checkWorkloads(cmd, args[:n])
}

// runDocker runs the workload's containers.
func (o *devOptions) runDocker(ctx context.Context, show func(api.Event), quiet func()) error {
	on := oneByOne(show) // the connection's events come beside those of the containers
	terminal := term.IsTerminal(int(os.Stdin.Fd()))
	if d := o.docker; (d.interactive || d.arguments.Interactive) && (d.tty || d.arguments.TTY) && !terminal {
		return api.Errorf(api.ExitUsage, "-t with -i needs a terminal, and the input is none").WithHint("-i alone takes the input as it is")
	}
	own, err := o.local()
	if err != nil {
		return err
	}
	engine, err := docker.Find(ctx)
	if err != nil {
		return err
	}
	paths, err := o.app.paths()
	if err != nil {
		return err
	}
	req, workload, err := o.attached(ctx, silent)
	if err != nil {
		return err
	}
	like, err := o.imitated(ctx, req.Connect, workload, on)
	if err != nil {
		return err
	}
	// Ctrl-C is the program's from when it runs.
	held, letGo := context.WithCancel(context.WithoutCancel(ctx))
	defer letGo()
	stop := context.AfterFunc(ctx, letGo)
	exit, err := docker.Run(held, docker.Config{
		Engine: engine, Kube: like.cluster.Kube(), Pod: like.pod, Workload: like.workload.Name, Container: like.container, Alone: o.spec.container != "",
		Image: o.docker.image, Interactive: o.docker.interactive, TTY: o.docker.tty, Terminal: terminal, Publish: o.docker.publish,
		Arguments: o.docker.arguments, Env: own.env, Volumes: own.volumes,
		// The other one is small where systemd makes it, and the desktop's.
		Places:     []docker.Place{{Paths: config.Paths{RuntimeDir: fmt.Sprintf("/dev/shm/kubevpn-%d", os.Getuid())}, Own: true}, {Paths: paths}},
		Executable: o.app.executable, Stdin: os.Stdin, Stdout: os.Stdout, Stderr: os.Stderr, Logger: slog.New(warner{warn: warnBy(on)}),
		Exec: like.exec(), Running: like.running,
		Connect: func(ctx context.Context, place *sandbox.Remote, ready func()) error {
			return o.app.Isolated(ctx, req, place, ready, on)
		},
		Begin: func() bool {
			quiet()
			return stop()
		},
		Step: func(text string, done bool) { on(api.Event{Step: text, Done: done}) },
		Pull: func() io.Writer {
			quiet()
			return os.Stderr
		},
		Warn: warnBy(on),
	})
	switch {
	case err != nil && ctx.Err() != nil:
		return ctx.Err()
	case err != nil:
		return err
	case exit != 0:
		return exitCode(exit)
	}
	return nil
}

// newContainer is the first process of a container.
func newContainer() *cobra.Command {
	return &cobra.Command{
		Use:     docker.Command + " ROLE [RUN]",
		Short:   "Be the first process of a container (started by dev --docker)",
		Example: examples("It is of no use by hand", "kubevpn dev deployment/web --docker"),
		Hidden:  true,
		Args:    cobra.RangeArgs(1, 2),
		RunE: func(_ *cobra.Command, args []string) error {
			exit, err := docker.Inside(args)
			if err == nil && exit != 0 {
				return exitCode(exit)
			}
			return err
		},
	}
}
