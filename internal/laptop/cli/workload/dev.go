package workload

import (
	"context"
	"fmt"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strings"
	"syscall"

	"github.com/spf13/cobra"

	"kubevpn/internal/api"
	"kubevpn/internal/config"
	"kubevpn/internal/kube/podenv"
	"kubevpn/internal/laptop/cli/command"
	"kubevpn/internal/laptop/cli/term"
	"kubevpn/internal/laptop/dev"
	"kubevpn/internal/laptop/docker"
	"kubevpn/pkg/host/sandbox"
)

type devOptions struct {
	proxyOptions
	inbound   bool
	env       []string
	envFiles  []string
	fromPod   []string
	volumes   []string
	mountOver []string
	localhost []string
	isolate   bool
	viaPod    bool
	docker    dockerOptions
	program   []string
}

func newDev(f *command.Factory) *cobra.Command {
	o := &devOptions{proxyOptions: proxyOptions{f: f, output: term.NewFormat("text")}}
	cmd := &cobra.Command{
		Use:   "dev TYPE/NAME [flags] -- COMMAND...",
		Short: "Run a program on this machine as a container of a workload",
		Long: "Run a program on this machine in the environment of a container of a workload. The program sees the\n" +
			"environment variables, ConfigMaps, Secrets, downward API and service account token of the container\n" +
			"at the same paths. It uses the network and the names of the cluster. With --proxy or --headers it\n" +
			"also receives requests of the workload.\n\n" +
			"When the program ends, kubevpn removes everything that it created, and exits with the exit code of\n" +
			"the program. Secrets stay in memory.",
		Example: command.Examples(
			"Run a server that receives your requests",
			"kubevpn dev deployment/web --headers x-user=me -- go run ./cmd/web",
			"Debug a server that receives all requests", "kubevpn dev deployment/web --proxy -- dlv debug ./cmd/web",
			"Open a shell", "kubevpn dev deployment/web -- bash",
			"Run without sudo and without changing the network of this machine",
			"kubevpn dev deployment/web --isolate -- bash",
			"Connect with the identity of the pod: NetworkPolicies, mesh and allow-lists see the pod",
			"kubevpn dev deployment/web --via-pod -- ./server",
			"Use a database proxy that runs beside the container",
			"kubevpn dev deployment/web --localhost 5432 -- ./server",
			"Run the containers in Docker, with a shell in one of them",
			"kubevpn dev deployment/web --docker -it -- --entrypoint sh",
			"Replace a volume, such as a PersistentVolumeClaim, with a local directory",
			"kubevpn dev deployment/web --volume uploads=./testdata -- ./server",
			"Use the volume of the pod itself, and allow changes",
			"kubevpn dev deployment/web --volume uploads=remote:rw -- ./server",
			"Use another database",
			"kubevpn dev deployment/web --env DB_HOST=localhost --env-file .env -- ./server",
			"Use the Java options of the pod",
			"kubevpn dev deployment/web --env-from-pod JAVA_TOOL_OPTIONS -- java -jar web.jar",
			"Mount a volume of the pod over a directory of this machine",
			"kubevpn dev deployment/web --mount-over /usr/share/nginx/html -- nginx",
		),
		Args: func(cmd *cobra.Command, args []string) error {
			if err := o.docker.check(cmd); err != nil {
				return err
			}
			if o.isolate && o.docker.enabled {
				return api.Errorf(api.ExitUsage, "--isolate cannot be combined with --docker").
					WithHint("containers have their own network; remove --isolate")
			}
			if o.docker.enabled {
				return o.docker.args(cmd, args)
			}
			if n := cmd.ArgsLenAtDash(); n < 0 || n == len(args) {
				return api.Errorf(api.ExitUsage, "`kubevpn dev` requires a command").
					WithHint("write it after --: `kubevpn dev deployment/web -- ./server`")
			}
			return oneWorkload("write the command after --")(cmd, args)
		},
		PreRunE: o.checkSpec,
		RunE: func(cmd *cobra.Command, args []string) error {
			o.workloads, o.program = args[:1], args[1:]
			return f.Report(cmd.Context(), o.output, o.run)
		},
		ValidArgsFunction: o.flags.CompleteWorkloads,
	}
	o.addTo(cmd)
	o.flags.PickWorkload(cmd)
	return cmd
}

// addTo defines the flags.
func (o *devOptions) addTo(cmd *cobra.Command) {
	o.spec.addTo(cmd)
	cmd.Flag("container").Usage = "container that the program replaces " + defaultContainer
	command.CompleteWith(cmd, "container", o.flags.CompleteContainers)
	o.flags.AddWithoutImage(cmd, o.f, config.KeyMode, config.KeyRequireMatch)
	f := cmd.Flags()
	f.BoolVar(&o.isolate, "isolate", false,
		"run the program in its own network namespace (Linux): needs no sudo and no daemon, and does not change the "+
			"network of this machine")
	f.BoolVar(&o.viaPod, "via-pod", false,
		"connections of the program to the cluster leave from inside a pod of the workload; implies --isolate, unless "+
			"with --docker")
	o.flags.AddEgress(cmd, "via-pod")
	f.BoolVar(&o.inbound, "proxy", false,
		"send requests of the workload to the program: all requests, or those that a match selects, such as "+
			"--headers")
	f.StringArrayVar(&o.env, "env", nil,
		"NAME=VALUE overrides a variable of the container; NAME takes the value from this machine; may be repeated")
	f.StringArrayVar(&o.envFiles, "env-file", nil, "file with one --env value per line; may be repeated")
	f.StringArrayVar(&o.fromPod, "env-from-pod", nil,
		"NAME of a variable that takes the value of the pod although it changes how programs of this machine run, "+
			"such as NODE_OPTIONS or HOME; may be repeated")
	f.StringArrayVar(&o.mountOver, "mount-over", nil,
		"PATH at or below which volumes of the pod may hide system directories, the home directory or the working "+
			"directory; may be repeated")
	f.StringArrayVar(&o.volumes, "volume", nil,
		"NAME=DIRECTORY uses a directory of this machine in place of the volume NAME of the pod; NAME=remote[:rw] "+
			"mounts what the volume of a running pod holds, read-only or writable; may be repeated")
	f.StringArrayVar(&o.localhost, "localhost", nil,
		"PORT[:LOCAL] makes a port that other containers of the pod serve on localhost answer on this machine's; with "+
			"--isolate, all of them do; may be repeated")
	o.docker.addTo(cmd)
}

// wantsRequests reports whether the program receives requests of the workload.
func (o *devOptions) wantsRequests() bool {
	return o.inbound || o.spec.selects()
}

func (o *devOptions) run(ctx context.Context, on func(api.Event), quiet func()) error {
	if o.viaPod {
		o.isolate, o.flags.Via = !o.docker.enabled, o.workloads[0]
	}
	options := dev.Options{
		Args: o.program, Init: []string{command.SandboxCommand}, Environ: o.f.Environ, FromPod: o.fromPod,
		Stdin: os.Stdin, Stdout: os.Stdout, Stderr: os.Stderr, Show: on, Quiet: quiet,
	}
	if err := o.complete(&options); err != nil {
		return err
	}
	runner, err := dev.New(ctx, options) // checks the options, so before any change
	if err != nil {
		return err
	}
	on, o.flags.Here = runner.Show, options.Mode != dev.OnMachine
	o.flags.Own = o.flags.Here
	req, workload, err := o.attached(ctx, on)
	if err != nil {
		return err
	}
	if runner.Image, err = o.filesImage(ctx, &req, quiet); err != nil {
		return err
	}
	code, err := runner.Run(ctx, dev.Target{
		Cluster: o.flags.Cluster, Namespace: req.Connect.Namespace, Workload: workload, Container: o.spec.container,
		Hold: func(ctx context.Context, place sandbox.Place, on func(api.Event)) error {
			if place == nil {
				return o.intercept(ctx, req, on, quiet)
			}
			return o.flags.Hold(ctx, req, place, nil, o.output, on, quiet)
		},
	})
	if err == nil && code != 0 {
		return command.ExitCode(code)
	}
	return err
}

// attached returns the request to the daemon that lasts as long as the program: for the connection, and for an
// intercept if the program receives requests.
func (o *devOptions) attached(ctx context.Context,
	on func(api.Event)) (req api.InterceptRequest, workload string, err error) {
	if req, err = o.request(ctx, on, o.wantsRequests()); err != nil {
		return req, "", err
	}
	if slices.ContainsFunc(req.Spec.Ports, func(p api.PortMap) bool { return p.Host != "" }) &&
		(o.isolate || o.docker.enabled) {
		return req, "", api.Errorf(api.ExitUsage, "--port: with --isolate and --docker, requests go to the program, "+
			"and to no other host").WithHint("write it like --port 3000:8080")
	}
	req.Attached = true
	workload = req.Workloads[0]
	if o.isolate || o.docker.enabled && o.spec.container != "" { // without -c, the other containers are here
		req.Connect.Localhost = &o.spec.container
		if !o.viaPod {
			req.Connect.Via, req.Connect.Egress = workload, api.EgressNone
		}
	}
	if !o.wantsRequests() {
		req.Workloads = nil // the connection alone
	}
	return req, workload, nil
}

// complete sets the options of d from the flags for variables, volumes and the mode.
func (o *devOptions) complete(d *dev.Options) (err error) {
	if d.Env, err = o.environment(); err != nil {
		return err
	}
	if d.Volumes, err = o.directories(); err != nil {
		return err
	}
	for _, over := range o.mountOver {
		if !path.IsAbs(over) {
			return api.Errorf(api.ExitUsage, "--mount-over: %q is not an absolute path", over).
				WithHint("specify the path at which the pod mounts the volume")
		}
		d.MountOver = append(d.MountOver, path.Clean(over))
	}
	if d.Localhost, err = o.localhostPorts(); err != nil {
		return err
	}
	switch {
	case o.docker.enabled:
		d.Mode = dev.InDocker
		d.Docker, err = o.docker.config(o.f)
	case o.isolate:
		d.Mode = dev.Isolated
	}
	return err
}

// localhostPorts returns the ports of --localhost.
func (o *devOptions) localhostPorts() (ports []dev.LocalhostPort, err error) {
	if len(o.localhost) > 0 && (o.isolate || o.docker.enabled) {
		return nil, api.Errorf(api.ExitUsage, "--localhost: with --isolate, --via-pod and --docker -c, every port of "+
			"the pod's localhost answers on the program's").WithHint("remove --localhost")
	}
	for _, text := range o.localhost {
		p, err := parsePortMap(text)
		if err != nil || p.Name != "" || strings.Contains(text, "/") {
			return nil, api.Errorf(api.ExitUsage, "--localhost: %q is not PORT or PORT:LOCAL", text).
				WithHint("write it like --localhost 5432, or, for another port here, --localhost 5432:15432")
		}
		ports = append(ports, dev.LocalhostPort{Pod: p.Container, Local: p.Local})
	}
	return ports, nil
}

// environment returns the NAME=VALUE pairs of --env-file and then of --env.
func (o *devOptions) environment() ([]string, error) {
	var all []string
	add := func(from, entry string) error {
		name, _, given := strings.Cut(entry, "=")
		if name == "" || strings.ContainsAny(name, " \t\x00") {
			return api.Errorf(api.ExitUsage, "%s: %q is neither NAME=VALUE nor NAME", from, entry)
		}
		if !given {
			value, there := o.f.Lookup(name)
			if !there {
				return api.Errorf(api.ExitUsage, "%s: %s is not set in the environment of this machine", from, name).
					WithHint("set it, or write its value: %s=VALUE", name)
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

// filesImage returns the image for remote volumes; "" without any.
func (o *devOptions) filesImage(ctx context.Context, req *api.InterceptRequest, quiet func()) (string, error) {
	if !slices.ContainsFunc(o.volumes, isRemote) {
		return "", nil
	}
	return o.flags.Consenting(&req.Connect, o.output, quiet).Image(ctx, o.flags.Config, req.Connect.Namespace)
}

// isRemote reports whether a --volume is NAME=remote or NAME=remote:rw.
func isRemote(text string) bool {
	_, dir, _ := strings.Cut(text, "=")
	return dir == podenv.Remote || dir == podenv.RemoteWritable
}

// checkRemote returns an error if this machine cannot mount the volume of a pod.
func (o *devOptions) checkRemote() error {
	const instead = "`kubevpn cp` copies files of a volume, and --volume NAME=DIRECTORY uses the copy"
	if o.docker.enabled {
		return api.Errorf(api.ExitUsage, "--volume NAME=remote cannot be combined with --docker").WithHint(instead)
	}
	device, err := os.OpenFile("/dev/fuse", os.O_RDWR, 0)
	if err != nil {
		return api.Errorf(api.ExitPrivilege, "--volume NAME=remote needs FUSE: %w", err).
			WithHint("sudo modprobe fuse && sudo chmod 0666 /dev/fuse, as most distributions do. Or: " + instead)
	}
	return device.Close()
}

// directories returns podenv.Source.Here: the absolute directories of --volume by volume name.
func (o *devOptions) directories() (map[string]string, error) {
	all := map[string]string{}
	for _, text := range o.volumes {
		name, dir, given := strings.Cut(text, "=")
		if !given || name == "" || dir == "" {
			return nil, api.Errorf(api.ExitUsage, "--volume: %q is not NAME=DIRECTORY", text).
				WithHint("write it like --volume data=./testdata, or --volume data=remote for that of the pod")
		}
		if isRemote(text) {
			if err := o.checkRemote(); err != nil {
				return nil, err
			}
			all[name] = dir
			continue
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
	if err := oneWorkload("write flags of `docker run` after --")(cmd, args); err != nil {
		return err
	}
	o.arguments, err = docker.ParseArguments(args[1:])
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
