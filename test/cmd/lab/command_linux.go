package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"os/signal"
	"strings"
	"syscall"
	"time"

	"github.com/spf13/cobra"

	"kubevpn/test/lab"
)

// program contains what all commands share.
type program struct {
	in       io.Reader
	out, err io.Writer
	config   lab.Config
}

// exitError is the exit code of a program that ran in the lab: lab exits with the same code and prints nothing.
type exitError int

func (e exitError) Error() string { return fmt.Sprintf("exit code %d", int(e)) }

func run(args []string, in io.Reader, out, err io.Writer) int {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM)
	defer stop()
	p := &program{in: in, out: out, err: err}
	p.config.Progress = err
	root := p.root()
	root.SetArgs(args)
	root.SetIn(in)
	root.SetOut(out)
	root.SetErr(err)
	failure := root.ExecuteContext(ctx)
	var exit exitError
	switch {
	case failure == nil:
		return 0
	case errors.As(failure, &exit):
		return int(exit)
	case errors.Is(failure, context.Canceled):
		fmt.Fprintln(err, "lab: interrupted")
		return 130 // as in a shell after Ctrl-C
	}
	fmt.Fprintln(err, "lab:", failure)
	return 1
}

func (p *program) root() *cobra.Command {
	root := &cobra.Command{
		Use:   "lab",
		Short: "A real Kubernetes cluster on this machine, with a laptop beside it",
		Long: `A real Kubernetes cluster on this machine, with a laptop beside it.

The nodes, a router and the laptop are network namespaces. The laptop reaches the
API server through the router, and neither pods nor Services. It needs root, Go, and
Debian with access to its packages.`,
		Example: `  lab up                                  # two nodes, kube-proxy in iptables mode
  lab up --name six --nodes 3 --proxy-mode nftables --ipv6
  lab kubectl get pods -A -o wide
  lab exec laptop -- curl http://www.outside.test
  lab exec node1 -- ctr -n k8s.io images ls
  lab load bin/kubevpn-image.tar
  lab down`,
		SilenceUsage:  true,
		SilenceErrors: true,
	}
	root.PersistentFlags().StringVar(&p.config.Name, "name", lab.DefaultName, "lab's name; several run side by side")
	root.PersistentFlags().StringVar(&p.config.Kubernetes, "kubernetes", "",
		"an older `version` of Kubernetes for up and build: 1.34, 1.31; default $KUBEVPN_LAB_KUBERNETES or the newest")
	root.AddCommand(p.up(), p.down(), p.status(), p.exec(), p.kubectl(), p.load(), p.kubeconfig(), p.restart(),
		p.join(), p.line(), p.build(), p.install())
	return root
}

func (p *program) up() *cobra.Command {
	mode, modes := string(lab.ProxyIPTables), []string(nil)
	c := &cobra.Command{
		Use:   "up",
		Short: "Start a lab; missing packages and programs are installed and built first",
		Example: `  lab up
  lab up --nodes 1 --proxy-mode none
  lab up --name six --ipv6`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			p.config.ProxyMode = lab.ProxyMode(mode)
			for _, m := range modes {
				p.config.NodeModes = append(p.config.NodeModes, lab.ProxyMode(m))
			}
			if p.config.Nodes < 1 {
				return errors.New("--nodes: want at least 1")
			}
			return lab.New(p.config).Up(cmd.Context())
		},
	}
	c.Flags().IntVar(&p.config.Nodes, "nodes", 2, fmt.Sprintf("number of nodes, 1 to %d", lab.MaxNodes))
	c.Flags().StringVar(&mode, "proxy-mode", mode,
		"kube-proxy's `mode`: iptables, nftables, ipvs, or none for no kube-proxy")
	c.Flags().StringSliceVar(&modes, "node-proxy-modes", nil,
		"the `modes` of nodes 1, 2, ... where they differ from --proxy-mode, as during a migration: ipvs,nftables")
	c.Flags().StringToStringVar(&p.config.ProxySettings, "proxy-config", nil,
		"a `field=value` of KubeProxyConfiguration, as in ipvs.strictARP=true")
	c.Flags().BoolVar(&p.config.IPv6, "ipv6", false, "IPv6 besides IPv4, for nodes, pods, Services and the laptop")
	c.Flags().IntVar(&p.config.Ranges, "ranges", 1,
		"one of two `sets` of address ranges, 1 or 2; joined labs need different sets")
	return c
}

func (p *program) down() *cobra.Command {
	all := false
	c := &cobra.Command{
		Use:   "down",
		Short: "Remove a lab and all its remains",
		Example: `  lab down
  lab down --all`,
		Args: cobra.NoArgs,
		RunE: func(*cobra.Command, []string) error {
			names := []string{p.config.Name}
			if all {
				var err error
				if names, err = lab.List(p.config.Dir); err != nil {
					return err
				}
			}
			var errs []error
			for _, name := range names {
				config := p.config
				config.Name = name
				removed, err := lab.New(config).Down()
				if err == nil && !removed {
					fmt.Fprintf(p.err, "lab %q is not up: nothing to remove\n", name)
				}
				errs = append(errs, err)
			}
			return errors.Join(errs...)
		},
	}
	c.Flags().BoolVar(&all, "all", false, "remove every lab on this machine")
	return c
}

func (p *program) status() *cobra.Command {
	output := ""
	c := &cobra.Command{
		Use:     "status",
		Short:   "Show a lab's nodes and processes; fails when it is not up",
		Example: "  lab status -o json",
		Args:    cobra.NoArgs,
		RunE: func(*cobra.Command, []string) error {
			if output != "" && output != "json" {
				return fmt.Errorf("output %q: want json", output)
			}
			l, err := lab.Attach(p.config)
			if err != nil {
				return err
			}
			status, err := l.Status()
			if err != nil {
				return err
			}
			if output == "json" {
				encoder := json.NewEncoder(p.out)
				encoder.SetIndent("", "  ")
				err = encoder.Encode(status)
			} else {
				_, err = fmt.Fprint(p.out, status)
			}
			if err == nil && !status.Up {
				return exitError(1)
			}
			return err
		},
	}
	c.Flags().StringVarP(&output, "output", "o", "", "`format`: json")
	return c
}

func (p *program) exec() *cobra.Command {
	return &cobra.Command{
		Use:   "exec laptop|router|node1|... -- COMMAND...",
		Short: "Run a command in one of the lab's places",
		Example: `  lab exec laptop -- curl http://www.outside.test
  lab exec laptop -- bash
  lab exec node2 -- ctr -n k8s.io containers ls`,
		Args: cobra.MinimumNArgs(2),
		RunE: func(cmd *cobra.Command, args []string) error {
			l, err := lab.Attach(p.config)
			if err != nil {
				return err
			}
			command, err := l.Command(context.WithoutCancel(cmd.Context()), args[0], args[1:]...)
			if err != nil {
				return err
			}
			return p.pass(command)
		},
	}
}

func (p *program) kubectl() *cobra.Command {
	return &cobra.Command{
		Use:   "kubectl ARGUMENTS...",
		Short: "Run kubectl, of the cluster's version, on the laptop as the admin",
		Example: `  lab kubectl get pods -A -o wide
  lab --name six kubectl logs deploy/web`,
		DisableFlagParsing: true,
		RunE: func(cmd *cobra.Command, args []string) error {
			args = p.ownFlags(args)
			l, err := lab.Attach(p.config)
			if err != nil {
				return err
			}
			command, err := l.Kubectl(context.WithoutCancel(cmd.Context()), lab.Admin, args...)
			if err != nil {
				return err
			}
			return p.pass(command)
		},
	}
}

// ownFlags takes a leading --name from kubectl's arguments. All arguments after it belong to kubectl.
func (p *program) ownFlags(args []string) []string {
	for len(args) > 0 {
		if name, found := strings.CutPrefix(args[0], "--name="); found {
			p.config.Name, args = name, args[1:]
		} else if args[0] == "--name" && len(args) > 1 {
			p.config.Name, args = args[1], args[2:]
		} else {
			break
		}
	}
	return args
}

func (p *program) load() *cobra.Command {
	return &cobra.Command{
		Use:     "load IMAGE.tar",
		Short:   "Import an image archive into every node's containerd",
		Example: "  lab load bin/kubevpn-image.tar",
		Args:    cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			l, err := lab.Attach(p.config)
			if err != nil {
				return err
			}
			return l.Load(cmd.Context(), args[0])
		},
	}
}

func (p *program) kubeconfig() *cobra.Command {
	user := lab.Admin
	c := &cobra.Command{
		Use:   "kubeconfig",
		Short: "Print the path of a user's kubeconfig",
		Long: `Print the path of a user's kubeconfig. It works on the laptop (and on the nodes): the
machine itself does not reach the API server.`,
		Example: `  lab exec laptop -- kubevpn connect --kubeconfig $(lab kubeconfig)
  lab kubeconfig --user dev`,
		Args: cobra.NoArgs,
		RunE: func(*cobra.Command, []string) error {
			l, err := lab.Attach(p.config)
			if err != nil {
				return err
			}
			file, err := l.Kubeconfig(user)
			if err == nil {
				fmt.Fprintln(p.out, file)
			}
			return err
		},
	}
	c.Flags().StringVar(&user, "user", user,
		"the `user`: admin; dev, a developer with the role edit in the namespace default; or token, the same with a "+
			"bearer token")
	return c
}

func (p *program) restart() *cobra.Command {
	return &cobra.Command{
		Use:   "restart PROCESS",
		Short: "Kill one of the lab's processes and start it again",
		Example: `  lab restart kube-apiserver
  lab restart kubelet-node2`,
		Args: cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			l, err := lab.Attach(p.config)
			if err != nil {
				return err
			}
			return l.Restart(cmd.Context(), args[0])
		},
	}
}

func (p *program) join() *cobra.Command {
	return &cobra.Command{
		Use:   "join OTHER",
		Short: "Connect two labs' routers: one laptop, two clusters",
		Example: `  lab up && lab up --name two --ranges 2
  lab join two`,
		Args: cobra.ExactArgs(1),
		RunE: func(_ *cobra.Command, args []string) error {
			l, err := lab.Attach(p.config)
			if err != nil {
				return err
			}
			config := p.config
			config.Name = args[0]
			other, err := lab.Attach(config)
			if err != nil {
				return err
			}
			return l.Join(other)
		},
	}
}

func (p *program) line() *cobra.Command {
	line := lab.Line{RTT: 60 * time.Millisecond}
	mbps, loss := 100.0, 0.0
	c := &cobra.Command{
		Use:     "line",
		Short:   "Put a slow, far or lossy line between the laptop and the cluster, until Ctrl-C",
		Example: "  lab line --rtt 40ms --mbps 200 --loss 0.1",
		Args:    cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			l, err := lab.Attach(p.config)
			if err != nil {
				return err
			}
			line.Rate, line.Loss = mbps*1e6, loss/100
			stop, err := l.Stretch(line)
			if err != nil {
				return err
			}
			fmt.Fprintf(p.out, "The laptop's line: %s. Ctrl-C ends it.\n", line)
			<-cmd.Context().Done()
			return stop()
		},
	}
	flags := c.Flags()
	flags.DurationVar(&line.RTT, "rtt", line.RTT, "round trip without a queue")
	flags.Float64Var(&mbps, "mbps", mbps, "megabits a second, each way; 0: no limit")
	flags.Float64Var(&loss, "loss", loss, "percentage of lost packets, each way")
	flags.Float64Var(&line.Burst, "burst", 0,
		"mean number of packets that are lost one after the other; 0: each by itself")
	flags.DurationVar(&line.Queue, "queue", lab.LineQueue, "maximum time of a packet in the queue")
	return c
}

func (p *program) build() *cobra.Command {
	return &cobra.Command{
		Use:   "build",
		Short: "Build Kubernetes, etcd, CoreDNS and the lab's images into the cache",
		Long: `Build Kubernetes, etcd, CoreDNS and the lab's images into the cache, which is
$KUBEVPN_CACHE, $XDG_CACHE_HOME or ~/.cache, and in it kubevpn-lab.`,
		Example: "  KUBEVPN_CACHE=/ci/cache lab build",
		Args:    cobra.NoArgs,
		RunE:    func(cmd *cobra.Command, _ []string) error { return lab.New(p.config).Build(cmd.Context()) },
	}
}

func (p *program) install() *cobra.Command {
	return &cobra.Command{
		Use:     "install",
		Short:   "Install the Debian packages that a lab needs",
		Example: "  lab install",
		Args:    cobra.NoArgs,
		RunE:    func(cmd *cobra.Command, _ []string) error { return lab.New(p.config).Install(cmd.Context()) },
	}
}

// pass runs a command on our own terminal, from which it receives signals directly.
func (p *program) pass(command *exec.Cmd) error {
	command.Stdin, command.Stdout, command.Stderr = p.in, p.out, p.err
	if file, ok := p.in.(*os.File); ok {
		command.Stdin = file
	}
	err := command.Run()
	if exit, ok := errors.AsType[*exec.ExitError](err); ok {
		return exitError(exit.ExitCode())
	}
	return err
}
