package doctor

import (
	"cmp"
	"context"
	"time"

	"k8s.io/apimachinery/pkg/util/duration"

	"kubevpn/internal/api"
	"kubevpn/internal/kube/client"
)

// expiresSoon is the time before the end of a credential in which the check warns, unless a plugin renews it.
const expiresSoon = 15 * time.Minute

// kubeconfig checks the user's kubeconfig, and whether the program of its credential plugin is there.
func kubeconfig(_ context.Context, f *facts) api.Finding {
	prepared, err := f.Prepare()
	var c *client.Cluster
	if err == nil {
		c, err = f.Load(prepared)
	}
	if err != nil {
		return failed(err, "no command of kubevpn knows which cluster to use")
	}
	f.prepared, f.cluster = prepared, c
	return ok("context %s: cluster %s, namespace %s, %s", prepared.Context, cmp.Or(prepared.Cluster, "without a name"),
		prepared.Namespace, c.Server())
}

// credentials runs the credential plugin, if there is one, and looks at the end of the credentials.
func credentials(ctx context.Context, f *facts) api.Finding {
	if hosts, err := f.cluster.OpenJump(ctx, client.Terminal{}); err != nil {
		return failed(err, "nothing behind the jump host "+hosts+" can be reached")
	}
	t := client.Terminal{}
	if f.cluster.NeedsTerminal() {
		t = f.Terminal
	}
	if _, err := f.cluster.Login(ctx, t); err != nil {
		return failed(err, "the API server does not accept requests of kubevpn or kubectl")
	}
	return credentialsOf(f.cluster.Credentials(), time.Now())
}

func credentialsOf(c client.Credentials, now time.Time) api.Finding {
	left := c.Expires.Sub(now)
	switch {
	case c.Expires.IsZero():
		return ok("%s", c.Kind)
	case left < 0:
		return broken(api.ExitCredentials, "the API server rejects requests of kubevpn and kubectl", "log in to the "+
			"cluster with its own tool, or fetch the kubeconfig again; `kubectl auth whoami` then answers",
			"%s expired %s ago, by this machine's clock", c.Kind, duration.HumanDuration(-left))
	case left < expiresSoon && !c.Renewed:
		return warning("the connection then waits for a login", "log in to the cluster with its own tool again",
			"%s expires in %s", c.Kind, duration.HumanDuration(left))
	}
	return ok("%s, valid for another %s", c.Kind, duration.HumanDuration(left))
}
