package inspect

import (
	"cmp"
	"context"
	"fmt"
	"net/http"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"golang.org/x/net/http/httpguts"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"kubevpn/internal/api"
	"kubevpn/internal/config"
	"kubevpn/internal/inspect/why"
	"kubevpn/internal/inspect/why/trip"
	"kubevpn/internal/kube/client"
	"kubevpn/internal/kube/install"
	"kubevpn/internal/laptop/cli/command"
	"kubevpn/internal/laptop/cli/term"
)

type whyOptions struct {
	f       *command.Factory
	kube    command.ClusterFlags
	output  *term.Format
	headers []string
	method  string
	from    string
	timeout time.Duration
	req     *http.Request // of the URL and the flags
}

func newWhy(f *command.Factory) *cobra.Command {
	o := &whyOptions{f: f, output: term.NewObjectFormat("text")}
	cmd := &cobra.Command{
		Use:   "why URL",
		Short: "Explain what happens to a request to the cluster",
		Long: "Send one request from this machine, and show each hop of its path: the name, the route, the Service\n" +
			"and its endpoints, NetworkPolicies, the connection, the traffic agent, the program of this machine and\n" +
			"the answer. It names the cause if a hop fails, and its exit code tells causes apart. It reads objects\n" +
			"with your own rights, and skips a hop that it may not read. The request carries the\n" +
			"headers kubevpn-why and traceparent.\n\n" +
			"With --from, a pod of a workload sends the request, from an ephemeral container that kubevpn adds.\n" +
			"The container ends after ten minutes, and its entry stays in the pod until the pod ends, so kubevpn\n" +
			"asks first.",
		Example: command.Examples(
			"Explain why a Service does not answer", "kubevpn why http://web.default/",
			"Send a header, and another method", "kubevpn why web.default:8080/orders -H 'x-user: me' -X HEAD",
			"Send it from a pod of another workload", "kubevpn why http://web.default/ --from deployment/other -n shop",
			"Print the cause for a script",
			`kubevpn why http://web.default -o jsonpath='{.findings[?(@.verdict=="failed")].cause}'`,
		),
		Args: func(cmd *cobra.Command, args []string) (err error) {
			one := command.OneArg("takes one URL", "for example `kubevpn why http://web.default/`")
			if err = one(cmd, args); err == nil {
				o.req, err = o.request(args[0])
			}
			if err == nil && o.from == "" && cmd.Flags().Changed("namespace") {
				err = api.Errorf(api.ExitUsage, "--namespace is for --from").
					WithHint("write the namespace of a Service into the URL, like http://web.shop/")
			}
			return err
		},
		RunE:              func(cmd *cobra.Command, _ []string) error { return f.Report(cmd.Context(), nil, o.run) },
		ValidArgsFunction: cobra.NoFileCompletions,
	}
	flags := cmd.Flags()
	flags.StringArrayVarP(&o.headers, "header", "H", nil, "header of the request, 'NAME: VALUE'; may be repeated")
	flags.StringVarP(&o.method, "method", "X", http.MethodGet, "method of the request")
	flags.DurationVar(&o.timeout, "timeout", why.Timeout, "time limit for all hops together")
	flags.StringVar(&o.from, "from", "", "workload, TYPE/NAME, one of whose pods sends the request")
	command.CompleteWith(cmd, "from", o.kube.CompleteWorkloads)
	command.Complete(cmd, "method", "GET", "HEAD", "OPTIONS", "POST", "PUT", "PATCH", "DELETE")
	o.kube.AddTo(cmd, f)
	flags.Lookup("namespace").Usage = "namespace of the workload of --from"
	config.AddFlags(cmd, config.KeyYes)
	flags.Lookup("yes").Usage = "with --from: add the container without a question"
	o.output.AddTo(cmd)
	command.Pickable(cmd, f, "http://web.default/", o.services)
	return cmd
}

// services is a command.Lister of URLs of Services.
func (o *whyOptions) services(ctx context.Context, _ func(api.Event)) (what string, urls []string, err error) {
	l, err := o.kube.Login(ctx, func(api.Event) {})
	if err != nil {
		return "", nil, err
	}
	namespace := l.Prepared.Namespace
	all, err := l.Kube().CoreV1().Services(namespace).List(ctx, metav1.ListOptions{})
	for _, s := range all.Items { // empty after an error
		for _, p := range s.Spec.Ports {
			if scheme := map[int32]string{443: "https"}[p.Port]; p.Protocol == corev1.ProtocolTCP {
				urls = append(urls, fmt.Sprintf("%s://%s.%s:%d/", cmp.Or(scheme, "http"), s.Name, s.Namespace, p.Port))
			}
		}
	}
	return "Services with a TCP port in the namespace " + namespace, urls, l.ExplainContext(ctx, err)
}

// request builds the request from the URL and the flags.
func (o *whyOptions) request(text string) (*http.Request, error) {
	if !strings.Contains(text, "://") {
		text = "http://" + text
	}
	if !httpguts.ValidHeaderFieldName(o.method) { // both are tokens: RFC 9110
		return nil, api.Errorf(api.ExitUsage, "--method: %q is not a method", o.method)
	}
	r, err := http.NewRequest(strings.ToUpper(o.method), text, http.NoBody)
	if err != nil || r.URL.Hostname() == "" || r.URL.Scheme != "http" && r.URL.Scheme != "https" {
		return nil, api.Errorf(api.ExitUsage, "%q is not a URL that begins with http:// or https://", text).
			WithHint("for example `kubevpn why http://web.default/`")
	}
	if o.timeout < time.Second {
		return nil, api.Errorf(api.ExitUsage, "--timeout must be at least 1s")
	}
	for _, text := range o.headers {
		name, value, found := strings.Cut(text, ":")
		value = strings.TrimSpace(value)
		if !found || !httpguts.ValidHeaderFieldName(name) || !httpguts.ValidHeaderFieldValue(value) {
			return nil, api.Errorf(api.ExitUsage, "--header: %q is not a header", text).
				WithHint("write it like -H 'x-user: me'")
		}
		r.Header.Add(name, value)
	}
	if host := r.Header.Get("Host"); host != "" {
		r.Host = host
	}
	trip.Mark(r)
	return r, nil
}

func (o *whyOptions) run(ctx context.Context, on func(api.Event), quiet func()) error {
	l, err := o.kube.Login(ctx, func(api.Event) {}) // it shows no steps
	if err != nil {
		return err
	}
	cfg, err := whyConfig(ctx, o.f, l.Cluster, o.req, o.timeout)
	if err != nil {
		return err
	}
	if o.from != "" {
		if err := o.source(ctx, l, &cfg, on, quiet); err != nil {
			return err
		}
	}
	d := why.Explain(ctx, cfg)
	if ctx.Err() != nil {
		return ctx.Err()
	}
	quiet()
	printer := newFindingPrinter(o.f.Out)
	if o.output.ForPeople() {
		printer.findings(d)
	}
	return printer.finish(o.output, d)
}

// source lets a pod of --from send the request. It asks the user before it adds a container.
func (o *whyOptions) source(ctx context.Context, l command.Selection, cfg *why.Config, on func(api.Event),
	quiet func()) error {
	asks := command.Consenting{Factory: o.f, Cluster: l.Cluster, Consent: &api.Consent{}, Yes: l.Config.Yes,
		Batch: !o.output.ForPeople(), Quiet: quiet}
	if err := asks.Load(); err != nil {
		return err
	}
	_, pod, err := l.RunningPod(ctx, o.from)
	if err != nil {
		return err
	}
	image, err := install.Find(ctx, l.Cluster, cfg.Connection.ManagerNamespace, "", *asks.Consent)
	if err != nil {
		return err
	}
	s, err := why.NewPodRunner(ctx, l.Cluster, pod, image)
	if err != nil {
		return err
	}
	exec := client.Permission{Verb: "create", Resource: "pods/exec", Namespace: pod.Namespace}
	if r := install.Check(ctx, l.Cluster, []install.Rights{{Needs: []client.Permission{exec}}}); len(r[0].Missing) > 0 {
		return api.Errorf(api.ExitPermission, "you may not run a program in the pod %s: this requires the right to %s",
			pod.Name, exec).WithHint("Ask a cluster admin to run:\n%s", exec.GrantCommands(""))
	}
	if s.New {
		e := api.Errorf(api.ExitConsent, "--from adds the ephemeral container %s to the pod %s/%s: it ends after %.0f "+
			"minutes, and its entry stays in the pod until the pod ends", s.Container, pod.Namespace, pod.Name,
			why.Stay.Minutes()).
			WithHint("Without --from, `kubevpn why` sends the request from this machine.")
		if err := asks.Allow(ctx, e, on); err != nil {
			return err
		}
	}
	cfg.Pod, cfg.Run = pod, s.Run
	return s.Start(ctx)
}
