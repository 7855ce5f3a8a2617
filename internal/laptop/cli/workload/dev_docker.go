package workload

import (
	"os"

	"github.com/spf13/cobra"

	"kubevpn/internal/api"
	"kubevpn/internal/laptop/cli/command"
	"kubevpn/internal/laptop/cli/term"
	"kubevpn/internal/laptop/docker"
)

// dockerOptions are the flags of `dev --docker`. Flags of `docker run` follow --; package docker parses them, because
// it also decides which of them a container of a pod may have.
type dockerOptions struct {
	enabled          bool
	image            string
	interactive, tty bool
	publish          []string
	arguments        docker.Arguments // after --
}

func (o *dockerOptions) addTo(cmd *cobra.Command) {
	f := cmd.Flags()
	f.BoolVar(&o.enabled, "docker", false,
		"run the pod's containers with the Docker Engine of this machine; with -c only that container. Flags of "+
			"docker run for the container that uses this terminal follow --")
	f.StringVar(&o.image, "image", "", "with --docker: the image of that container (default: the image of the pod)")
	f.BoolVarP(&o.interactive, "interactive", "i", false, "with --docker: keep standard input open, like docker run")
	f.BoolVarP(&o.tty, "tty", "t", false, "with --docker: allocate a pseudo-TTY, like docker run")
	f.StringArrayVarP(&o.publish, "publish", "p", nil,
		"with --docker: publish a port of the containers on this machine, like docker run; may be repeated")
}

// check rejects flags that require --docker, and flags that cannot be combined with it.
func (o *dockerOptions) check(cmd *cobra.Command) error {
	rejected, problem, hint := []string{"image", "interactive", "tty", "publish"}, "requires --docker",
		"--docker runs the pod's containers on this machine"
	if o.enabled {
		rejected, problem = []string{"env-from-pod", "mount-over"}, "cannot be combined with --docker"
		hint = "containers have all variables of the pod and their own file systems"
	}
	for _, name := range rejected {
		if cmd.Flags().Changed(name) {
			return api.Errorf(api.ExitUsage, "--%s %s", name, problem).WithHint("%s", hint)
		}
	}
	return nil
}

func (o *dockerOptions) args(cmd *cobra.Command, args []string) (err error) {
	n := cmd.ArgsLenAtDash()
	if n < 0 {
		n = len(args)
	}
	if err := checkWorkload(cmd, args[:n], "write flags of `docker run` after --"); err != nil {
		return err
	}
	o.arguments, err = docker.ParseArguments(args[n:])
	return err
}

// config returns the configuration from the flags.
func (o *dockerOptions) config(f *command.Factory) (docker.Config, error) {
	terminal := term.File(os.Stdin) != nil
	if (o.interactive || o.arguments.Interactive) && (o.tty || o.arguments.TTY) && !terminal {
		return docker.Config{}, api.Errorf(api.ExitUsage,
			"-i with -t requires a terminal, but standard input is not a terminal").
			WithHint("remove -t to use standard input as it is")
	}
	paths, err := f.Paths()
	return docker.Config{
		Image: o.image, Interactive: o.interactive, TTY: o.tty, Terminal: terminal, Publish: o.publish,
		Arguments: o.arguments,
		Paths:     paths, Executable: f.Executable,
	}, err
}
