package daemon

import (
	"context"
	"log/slog"
	"strings"

	"kubevpn/internal/api"
	"kubevpn/internal/config"
	"kubevpn/internal/kube/client"
	"kubevpn/internal/kube/workloads"
	"kubevpn/internal/laptop/clone"
	"kubevpn/internal/laptop/connection"
	"kubevpn/internal/laptop/intercept"
	"kubevpn/pkg/wakeup"
)

// factory makes connections of internal/laptop/connection, and intercepts of internal/laptop/intercept and
// internal/laptop/clone.
type factory struct{}

func (factory) Identify(kubeconfig []byte) (client.IDs, error) { return client.Identify(kubeconfig) }

func (factory) Prepare(req api.ConnectRequest, logger *slog.Logger) (*connection.Prepared, error) {
	return connection.Prepare(req, logger)
}

func (factory) NewConnection(cfg connection.Config) (Connection, error) {
	c, err := connection.New(cfg)
	if err != nil {
		return nil, err // a bare return of (c, err) would be a typed nil in the interface
	}
	return c, nil
}

// Workload asks the cluster only about kinds that are not built into Kubernetes.
func (factory) Workload(ctx context.Context, account api.ConnectRequest, name string) (string, error) {
	var c *client.Cluster
	defer func() {
		if c != nil {
			c.Release()
		}
	}()
	return workloadName(ctx, account.Namespace, name, func() (_ *client.Cluster, err error) {
		c, err = clusterOf(account, nil, nil)
		return c, err
	})
}

func workloadName(ctx context.Context, namespace, name string, load func() (*client.Cluster, error)) (string, error) {
	kind, rest, _ := strings.Cut(name, "/")
	if known, ok := workloads.BuiltinKind(kind); ok {
		return known.Type + "/" + rest, nil
	}
	c, err := load()
	if err != nil {
		return "", err
	}
	w, err := workloads.New(c).Workload(ctx, namespace, name)
	if err != nil {
		return "", err
	}
	return w.String(), nil
}

func (factory) NewIntercept(account api.ConnectRequest, c Connection, cfg intercept.Config) (Intercept, error) {
	own, err := clusterOf(account, cfg.Logger, c.Cluster())
	if err != nil {
		return nil, err
	}
	cfg.Cluster, cfg.Session, cfg.Image, cfg.Objects = own, c, agentImage(account.Image), account.Objects
	var i Intercept
	switch {
	case cfg.Spec.Clone == nil:
		i, err = intercept.New(cfg)
	case cfg.Spec.Clone.Expose:
		i, err = newExposed(cfg)
	default:
		i, err = newCloned(cfg)
	}
	switch {
	case err != nil:
		return nil, err // i is a typed nil
	case own == c.Cluster():
		return i, nil
	}
	return releasing{i, own, c}, nil
}

// newVia returns from where the flows of c leave. localhost is that of the program; nil: it has none.
func newVia(req api.ConnectRequest, c *connection.Connection, owner Owner, localhost intercept.Localhost,
	events *eventLog, logger *slog.Logger) (connection.Via, error) {
	cfg := intercept.ViaConfig{Egress: req.Egress, Config: intercept.Config{
		Cluster: c.Cluster(), Session: c, Namespace: req.Namespace, Workload: req.Via, Image: agentImage(req.Image),
		Objects: req.Objects, Owner: owner.Name, Key: owner.Key, Progress: events.add, Logger: logger,
	}}
	if req.Localhost != nil {
		cfg.Localhost, cfg.Replaces = localhost, *req.Localhost
	}
	v, err := intercept.NewVia(cfg)
	if err != nil {
		return nil, err // v is a typed nil
	}
	return v, nil
}

// releasing is an Intercept that owns its Cluster.
type releasing struct {
	Intercept
	cluster *client.Cluster
	over    Connection
}

func (r releasing) Run(ctx context.Context) error {
	defer r.cluster.Release()
	defer wakeup.Go(ctx, func(ctx context.Context) {
		_ = r.cluster.Follow(ctx, r.over.Moved) // ctx's error
	})()
	return r.Intercept.Run(ctx)
}

func newCloned(cfg intercept.Config) (*cloned, error) {
	key, err := Owner{Key: cfg.Key}.keyHash()
	if err != nil {
		return nil, err
	}
	c := &cloned{}
	spec := *cfg.Spec.Clone
	if strings.HasPrefix(cfg.Workload, "cronjob/") {
		if !cfg.Spec.Match.IsZero() {
			return nil, api.Errorf(api.ExitUsage, "%s is a CronJob and receives no requests", cfg.Workload).
				WithHint("remove --headers and the other flags that select requests")
		}
		spec.NoTraffic = true
	}
	if !spec.NoTraffic {
		cfg.Clone = true
		if c.intercept, err = intercept.New(cfg); err != nil {
			return nil, err
		}
	}
	of := cloneConfig(cfg, key)
	of.Spec, of.OnPods = spec, c.onPods
	c.clone = clone.New(of)
	return c, nil
}

// cloneConfig returns the configuration of a clone for an intercept.
func cloneConfig(cfg intercept.Config, key string) clone.Config {
	image, needsSecret := cfg.Session.Image, cfg.Session.NeedsPullSecret
	if cfg.Image != "" {
		image, needsSecret = func(context.Context) (string, error) { return cfg.Image, nil }, nil
	}
	return clone.Config{
		Cluster: workloads.New(cfg.Cluster), Namespace: cfg.Namespace, Workload: cfg.Workload, Spec: *cfg.Spec.Clone,
		Image: image, NeedsPullSecret: needsSecret, Owner: cfg.Owner, Key: key, Progress: cfg.Progress,
		Objects: cfg.Objects, Logger: cfg.Logger,
	}
}

// newExposed returns an intercept of a pod that is made for it.
func newExposed(cfg intercept.Config) (*cloned, error) {
	key, err := Owner{Key: cfg.Key}.keyHash()
	if err != nil {
		return nil, err
	}
	agent := workloads.Agent{Owner: key, OwnerName: cfg.Owner, Objects: cfg.Objects}
	exposed, err := intercept.Expose(cfg.Spec.Ports, agent)
	if err != nil {
		return nil, err
	}
	of := cloneConfig(cfg, key)
	of.Make = func(image string) (clone.Made, error) {
		agent.Image = image
		e, err := intercept.Expose(cfg.Spec.Ports, agent)
		return clone.Made{Template: e.Template, Ports: e.Ports, Annotations: e.Annotations}, err
	}
	c := &cloned{clone: clone.New(of)}
	cfg.Workload, cfg.Exposed = "job/"+cfg.Spec.Clone.Name, &exposed
	c.intercept, err = intercept.New(cfg)
	return c, err
}

// clusterOf returns the API of a cluster with the rights of account, which may differ from those of the connection. It
// returns connected, which may be nil, if that has the same account. If it only has the same context, both share the
// result of the credential plugin. In both cases connected uses account's credential from then on.
func clusterOf(account api.ConnectRequest, logger *slog.Logger, connected *client.Cluster) (*client.Cluster, error) {
	if connected != nil && connected.HasAccount(account.Kubeconfig) {
		return connected, connected.SetCredential(account.Credential)
	}
	o := client.Options{Logger: logger, Credential: account.Credential}
	if connected != nil && connected.Context() == account.Context {
		o.LoginOf = connected
	}
	return client.Load(account.Kubeconfig, o)
}

// agentImage returns the image that the user asked for, or "" for that of the traffic manager, which the nodes can
// pull.
func agentImage(asked string) string {
	if asked == config.Default().Image {
		return ""
	}
	return asked
}
