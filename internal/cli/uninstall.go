package cli

import (
	"context"
	"encoding/json"
	"fmt"
	"log/slog"
	"net"
	"time"

	"github.com/spf13/cobra"

	"kubevpn/internal/api"
	"kubevpn/internal/cluster"
	"kubevpn/internal/config"
	"kubevpn/internal/install"
	"kubevpn/internal/version"
	"kubevpn/pkg/transport"
)

type uninstallOptions struct {
	app      *app
	kube     kubeFlags
	settings settingFlags
	force    bool
}

func newUninstall(a *app) *cobra.Command {
	o := &uninstallOptions{app: a}
	cmd := &cobra.Command{
		Use:   "uninstall",
		Short: "Remove the traffic manager from a cluster",
		Long: "Uninstall removes everything that kubevpn put into the cluster, and nothing else. It does not when somebody\n" +
			"is connected, unless it is told to.",
		Example: examples(
			"Remove the traffic manager from the current context's cluster", "kubevpn uninstall",
			"From a namespace of your choice", "kubevpn uninstall --manager-namespace tools",
			"Although others are connected", "kubevpn uninstall --force",
		),
		Args: noArgs,
		RunE: func(cmd *cobra.Command, _ []string) error { return o.run(cmd.Context()) },
	}
	o.kube.addTo(cmd, a)
	o.settings.addTo(cmd, config.KeyManagerNamespace)
	cmd.Flags().BoolVar(&o.force, "force", false, "also when somebody is connected")
	return cmd
}

func (o *uninstallOptions) run(ctx context.Context) error {
	cfg, err := o.settings.load(o.app)
	if err != nil {
		return err
	}
	c, _, err := o.kube.load(o.app)
	if err != nil {
		return err
	}
	p := o.app.newProgress()
	defer p.stop()
	opts := install.RemoveOptions{Namespace: cfg.ManagerNamespace, Progress: p.show}
	if !o.force {
		opts.Guard = func(ctx context.Context, namespace, pod string) error {
			n, err := countSessions(ctx, c, namespace, pod)
			if err != nil && ctx.Err() == nil {
				p.show(api.Event{Warning: fmt.Sprintf("whether somebody is connected cannot be told: %v", err)})
				return nil
			}
			return refuseIfConnected(n, err)
		}
	}
	removed, err := install.Remove(ctx, c, opts)
	p.stop()
	if err != nil {
		return explain(ctx, c, err)
	}
	for _, r := range removed {
		if r.Kept != "" {
			fmt.Fprintf(o.app.out, "kept     %s: %s\n", r, r.Kept)
			continue
		}
		fmt.Fprintf(o.app.out, "removed  %s\n", r)
	}
	if len(removed) == 0 {
		fmt.Fprintln(o.app.errout, "nothing of kubevpn is installed there")
	}
	return nil
}

func refuseIfConnected(sessions int, err error) error {
	if err != nil || sessions == 0 {
		return err
	}
	who := "a laptop is"
	if sessions > 1 {
		who = fmt.Sprintf("%d laptops are", sessions)
	}
	return api.Errorf(api.ExitInstall, "%s connected through this traffic manager", who).
		WithHint("`kubevpn disconnect` ends your own connection; --force ends those of others too")
}

// countTimeout bounds asking the traffic manager who is connected.
const countTimeout = 10 * time.Second

// countSessions asks the manager how many laptops are connected, without this question.
func countSessions(ctx context.Context, c *cluster.Cluster, namespace, pod string) (int, error) {
	ctx, cancel := context.WithTimeout(ctx, countTimeout)
	defer cancel()
	type answer struct {
		sessions int
		err      error
	}
	answers := make(chan answer, 1)
	give := func(a answer) {
		select {
		case answers <- a:
		default: // the first one counts
		}
	}
	client := transport.NewClient(transport.ClientConfig{
		Links:  1,
		Logger: slog.New(slog.DiscardHandler),
		Dial: func(ctx context.Context) (net.Conn, error) {
			conn, err := c.PortForward(ctx, namespace, pod, api.ManagerPort)
			if err != nil {
				give(answer{err: err})
			}
			return conn, err
		},
		OnSession: func(ctx context.Context, s *transport.Session) {
			n, err := greet(ctx, s)
			give(answer{n, err})
		},
	})
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		_ = client.Run(ctx) // ends with ctx, and what it met has been given
	}()
	defer func() {
		cancel()
		<-ended
	}()
	select {
	case a := <-answers:
		return a.sessions, a.err
	case <-ctx.Done():
		return 0, ctx.Err()
	}
}

// leaveTimeout is how long a session that has just ended may still be counted: its last word may be overtaken by us.
const leaveTimeout = time.Second

// greet says hello as a session does and reads the number of others in the answer, the lowest within leaveTimeout.
func greet(ctx context.Context, s *transport.Session) (int, error) {
	stream, err := s.Open(ctx, transport.Request{Proto: transport.ProtoControl})
	if err != nil {
		return 0, err
	}
	defer stream.Close()
	if err := json.NewEncoder(stream).Encode(api.ClientHello{Protocol: api.Protocol, Version: version.String()}); err != nil {
		return 0, err
	}
	others, known := 0, false
	for answers := json.NewDecoder(stream); ; {
		var m api.ControlMessage
		switch err := answers.Decode(&m); {
		case err != nil && known:
			return others, nil
		case err != nil:
			return 0, err
		case m.Error != nil:
			return 0, m.Error
		case m.Hello != nil:
			others, known = max(m.Hello.State.Sessions-1, 0), true
			if err := stream.SetReadDeadline(time.Now().Add(leaveTimeout)); err != nil {
				return others, nil
			}
		case !known:
			return 0, fmt.Errorf("its first message is not a greeting")
		case m.State != nil:
			others = min(others, max(m.State.Sessions-1, 0))
		}
		if known && others == 0 {
			return 0, nil
		}
	}
}
