package workload

import (
	"context"
	"fmt"
	"slices"
	"strings"

	"github.com/spf13/cobra"
	"k8s.io/apimachinery/pkg/util/validation"

	"kubevpn/internal/api"
	"kubevpn/internal/laptop/cli/command"
	"kubevpn/internal/laptop/cli/term"
)

type exposeOptions struct {
	proxyOptions
	service api.CloneSpec
	ports   []api.PortMap
}

func newExpose(f *command.Factory) *cobra.Command {
	o := &exposeOptions{proxyOptions: proxyOptions{f: f, output: term.NewObjectFormat("text")}}
	o.service.Expose = true
	cmd := &cobra.Command{
		Use:   "expose NAME PORT[:LOCAL]...",
		Short: "Make a Service whose requests come to this machine",
		Long: "Make a Service NAME in the cluster whose requests come to a program on this machine, for what is\n" +
			"not deployed yet and for webhooks. PORT is that of the Service, and LOCAL that of this machine\n" +
			"(default: the same). The Service has an endpoint while your program listens. It exists until\n" +
			"`kubevpn leave`. If this machine disappears, Kubernetes deletes it within two minutes, with its pod.\n" +
			"The command connects first if necessary.",
		Example: command.Examples(
			"Pods reach the program on port 3000 as http://checkout", "kubevpn expose checkout 80:3000",
			"Two ports, one of them UDP", "kubevpn expose metrics 9090 udp/8125",
			"Also from outside of the cluster, by its Gateway or Ingress",
			"kubevpn expose hook 80:3000 --host hook.example.com",
			"End it", "kubevpn leave service/checkout",
		),
		Args: func(_ *cobra.Command, args []string) error { return o.parse(args) },
		RunE: func(cmd *cobra.Command, _ []string) error { return f.Report(cmd.Context(), o.output, o.run) },
	}
	o.spec.addRecord(cmd)
	o.spec.addCache(cmd)
	o.spec.addShortcut(cmd)
	o.flags.AddTo(cmd, f)
	cmd.Flags().StringVar(&o.service.Host, "host", "",
		"host name for requests from outside of the cluster, to the first port: of an HTTPRoute, if the cluster has a "+
			"Gateway, else of an Ingress")
	cmd.Flags().BoolVar(&o.foreground, "foreground", false,
		"run until Ctrl-C, then delete the Service, and disconnect if this command connected")
	o.addSocks(cmd)
	o.output.AddTo(cmd)
	return cmd
}

// parse reads NAME PORT[:LOCAL]...
func (o *exposeOptions) parse(args []string) error {
	if len(args) < 2 {
		return api.Errorf(api.ExitUsage, "`kubevpn expose` requires the name of a Service and a port").
			WithHint("write it like `kubevpn expose checkout 80:3000`")
	}
	o.service.Name = args[0]
	if errs := validation.IsDNS1035Label(args[0]); len(errs) > 0 {
		return api.Errorf(api.ExitUsage, "%q is not a valid name for a Service: %s", args[0], strings.Join(errs, "; ")).
			WithHint("write it like `kubevpn expose checkout 80:3000`")
	}
	if errs := validation.IsDNS1123Subdomain(o.service.Host); o.service.Host != "" && len(errs) > 0 {
		return api.Errorf(api.ExitUsage, "--host: %q is not a host name: %s", o.service.Host, strings.Join(errs, "; ")).
			WithHint("write it like --host hook.example.com")
	}
	for _, text := range args[1:] {
		p, err := parsePortMap(text)
		if err == nil && p.Name != "" {
			err = fmt.Errorf("%q is not a port", p.Name)
		}
		if err == nil && slices.ContainsFunc(o.ports, func(other api.PortMap) bool {
			return other.Protocol == p.Protocol && other.Container == p.Container
		}) {
			err = fmt.Errorf("%s names a port twice", text)
		}
		if err != nil {
			return api.Errorf(api.ExitUsage, "%w", err).
				WithHint("the port of the Service comes first: `kubevpn expose checkout 80:3000`")
		}
		o.ports = append(o.ports, p)
	}
	o.workloads = []string{"service/" + args[0]}
	return nil
}

func (o *exposeOptions) run(ctx context.Context, on func(api.Event), quiet func()) error {
	req, err := o.request(ctx, on, false)
	if err != nil {
		return err
	}
	req.Spec.Ports, req.Spec.Mode, req.Spec.Clone = o.ports, "", &o.service
	return o.ask(ctx, req, on, quiet)
}
