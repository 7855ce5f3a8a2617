package doctor

import (
	"cmp"
	"context"
	"net"
	"time"

	"k8s.io/apimachinery/pkg/util/duration"
	utilversion "k8s.io/apimachinery/pkg/util/version"
	"k8s.io/client-go/discovery"

	"kubevpn/internal/api"
	"kubevpn/internal/inspect/check"
	"kubevpn/internal/kube/client"
)

// expiresSoon is the time before the end of a credential in which the check warns, unless a plugin renews it.
const expiresSoon = 15 * time.Minute

// kubeconfig checks the user's kubeconfig, and whether the program of its credential plugin is there.
func kubeconfig(_ context.Context, f *facts) api.Finding {
	prepared, c, err := f.Load()
	if err != nil {
		return failed(err, "no command of kubevpn knows which cluster to use")
	}
	f.prepared, f.cluster = prepared, c
	return check.OK("context %s: cluster %s, namespace %s, %s", prepared.Context, cmp.Or(prepared.Cluster,
		"without a name"), prepared.Namespace, c.Server())
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
		return check.OK("%s", c.Kind)
	case left < 0:
		return broken(api.ExitCredentials, "the API server rejects requests of kubevpn and kubectl", "log in to the "+
			"cluster with its own tool, or fetch the kubeconfig again; `kubectl auth whoami` then answers",
			"%s expired %s ago, by this machine's clock", c.Kind, duration.HumanDuration(-left))
	case left < expiresSoon && !c.Renewed:
		return warning("the connection then waits for a login", "log in to the cluster with its own tool again",
			"%s expires in %s", c.Kind, duration.HumanDuration(left))
	}
	return check.OK("%s, valid for another %s", c.Kind, duration.HumanDuration(left))
}

// maxSkew is the difference of clocks that Kubernetes tolerates in tokens.
const maxSkew = time.Minute

const nothingWorks = "no command of kubevpn or kubectl reaches the cluster"

// address opens a TCP connection to the API server, or to the proxy before it.
func address(ctx context.Context, f *facts) api.Finding {
	path, err := f.cluster.Path()
	if err != nil {
		return failed(err, nothingWorks)
	}
	ctx, cancel := context.WithTimeout(ctx, f.Timeout)
	defer cancel()
	if err := f.cluster.Resolve(ctx); err != nil {
		return failed(f.cluster.Explain(err), nothingWorks)
	}
	conn, err := f.cluster.DialContext(ctx, "tcp", path.Address)
	switch {
	case err != nil && path.Proxy != "":
		e := f.cluster.Explain(err)
		return broken(e.Code, nothingWorks, "curl -v "+api.ShellQuote(path.Proxy)+"   # the proxy must answer; see "+
			"HTTPS_PROXY, NO_PROXY and the kubeconfig's proxy-url",
			"the proxy %s before the API server: %v", path.Proxy, e)
	case err != nil:
		return failed(f.cluster.Explain(err), nothingWorks)
	}
	defer conn.Close()
	switch remote := conn.RemoteAddr(); {
	case path.Jump != "":
		return check.OK("by the SSH jump host %s", path.Jump)
	case path.Proxy != "":
		return check.OK("by the proxy %s", path.Proxy)
	case remote != nil && remote.String() != path.Address:
		return check.OK("directly to %s (%v)", path.Address, remote)
	}
	return check.OK("directly to %s", path.Address)
}

// answer checks whether the API server answers and knows the user.
func answer(ctx context.Context, f *facts) api.Finding {
	bounded, cancel := context.WithTimeout(ctx, f.Timeout)
	defer cancel()
	namespace := cmp.Or(f.Settings.ManagerNamespace, "kubevpn")
	if err := f.cluster.Reach(bounded, namespace, f.prepared.Namespace); err != nil {
		if bounded.Err() != nil && ctx.Err() == nil {
			return silent(f)
		}
		return failed(err, nothingWorks)
	}
	v, err := discovery.ToServerVersionInterfaceWithContext(f.cluster.Kube().Discovery()).ServerVersionWithContext(ctx)
	if err != nil {
		return check.OK("it answers, and knows you")
	}
	return serverOf(v.GitVersion)
}

// serverOf judges the API server's version. A version of an unknown form passes.
func serverOf(version string) api.Finding {
	if v, err := utilversion.ParseGeneric(version); err == nil && v.LessThan(utilversion.MajorMinor(1, 31)) {
		return warning("parts of kubevpn may not work", "kubectl version   # upgrade the cluster to 1.31 or newer",
			"Kubernetes %s knows you; kubevpn is tested with 1.31 and newer", version)
	}
	return check.OK("Kubernetes %s knows you", version)
}

// silent is the finding for an API server, or what is before it, that accepts a connection and never answers.
func silent(f *facts) api.Finding {
	path, _ := f.cluster.Path()                   // it had one before
	host, _, _ := net.SplitHostPort(path.Address) // and the host with it
	return broken(api.ExitUnreachable, nothingWorks, "ping -c 3 -M do -s 1372 "+api.ShellQuote(host)+"   # no answer, "+
		"but one with -s 1000: sudo ip link set DEVICE mtu 1280\nOtherwise check the network or the VPN that the "+
		"cluster needs.", "the API server accepts the connection and does not answer within %v: a firewall or a load "+
		"balancer drops the rest, or the path loses large packets (MTU)", f.Timeout)
}

// clock compares this machine's clock with that of the API server.
func clock(ctx context.Context, f *facts) api.Finding {
	skew, err := f.cluster.Skew(ctx)
	if err != nil {
		return check.Skipped("%v", err)
	}
	return clockOf(skew)
}

func clockOf(skew time.Duration) api.Finding {
	if skew.Abs() <= maxSkew {
		return check.OK("within %v of that of the API server", max(time.Second, skew.Abs().Round(time.Second)))
	}
	how := "ahead of"
	if skew > 0 {
		how = "behind"
	}
	return warning("certificates and tokens look expired, or not yet valid", "sudo timedatectl set-ntp true",
		"this machine's clock is %v %s that of the API server", skew.Abs().Round(time.Second), how)
}
