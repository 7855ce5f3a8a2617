package doctor

import (
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"net"
	"time"

	utilversion "k8s.io/apimachinery/pkg/util/version"

	"kubevpn/internal/api"
	"kubevpn/internal/kube/client"
)

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
	began := time.Now()
	conn, err := f.cluster.DialContext(ctx, "tcp", path.Address)
	took := time.Since(began)
	if err != nil {
		return failed(unanswering(f.cluster.Explain(err), path), nothingWorks)
	}
	defer conn.Close()
	return ok("%s, connected in %s", describePath(path, conn.RemoteAddr()), milliseconds(took))
}

// unanswering adds the path to the error.
func unanswering(e *api.Error, p client.Path) *api.Error {
	if p.Proxy == "" {
		return e
	}
	return api.Errorf(e.Code, "the proxy %s before the API server: %w", p.Proxy, e).
		WithHint("curl -v %s   # the proxy must answer; see HTTPS_PROXY, NO_PROXY and the kubeconfig's proxy-url",
			api.ShellQuote(p.Proxy))
}

func describePath(p client.Path, remote net.Addr) string {
	switch {
	case p.Jump != "":
		return "by the SSH jump host " + p.Jump
	case p.Proxy != "":
		return "by the proxy " + p.Proxy
	case remote != nil && remote.String() != p.Address:
		return fmt.Sprintf("directly to %s (%v)", p.Address, remote)
	}
	return "directly to " + p.Address
}

func milliseconds(d time.Duration) string { return fmt.Sprintf("%.1f ms", d.Seconds()*1e3) }

// answer checks whether the API server answers and knows the user.
func answer(ctx context.Context, f *facts) api.Finding {
	bounded, cancel := context.WithTimeout(ctx, f.Timeout)
	defer cancel()
	namespace := cmp.Or(f.Settings.ManagerNamespace, "kubevpn")
	if err := f.cluster.Reach(bounded, namespace, f.prepared.Namespace); err != nil {
		e := api.AsError(err)
		if bounded.Err() != nil && ctx.Err() == nil {
			e = silent(f)
		}
		return failed(e, nothingWorks)
	}
	began := time.Now()
	text, err := f.cluster.Kube().Discovery().RESTClient().Get().AbsPath("/version").DoRaw(ctx)
	took := time.Since(began)
	var version struct {
		GitVersion string `json:"gitVersion"`
	}
	if err != nil || json.Unmarshal(text, &version) != nil {
		return ok("it answers, and knows you")
	}
	return serverOf(version.GitVersion, took)
}

// serverOf judges the API server's version. A version of an unknown form passes.
func serverOf(version string, took time.Duration) api.Finding {
	if v, err := utilversion.ParseGeneric(version); err == nil && v.LessThan(utilversion.MajorMinor(1, 31)) {
		return warning("Kubernetes "+version+" knows you; kubevpn is tested with 1.31 and newer",
			"parts of kubevpn may not work", "kubectl version   # upgrade the cluster to 1.31 or newer")
	}
	return ok("Kubernetes %s knows you; round trip %s", version, milliseconds(took))
}

// silent is the error for an API server, or what is before it, that accepts a connection and never answers.
func silent(f *facts) *api.Error {
	host := ""
	if path, err := f.cluster.Path(); err == nil {
		host, _, _ = net.SplitHostPort(path.Address)
	}
	return api.Errorf(api.ExitUnreachable, "the API server accepts the connection and does not answer within %v: a "+
		"firewall or a load balancer drops the rest, or the path loses large packets (MTU)", f.Timeout).
		WithHint("ping -c 3 -M do -s 1372 %s   # no answer, but one with -s 1000: sudo ip link set DEVICE mtu 1280\n"+
			"Otherwise check the network or the VPN that the cluster needs.", api.ShellQuote(host))
}

// clock compares this machine's clock with that of the API server.
func clock(ctx context.Context, f *facts) api.Finding {
	skew, err := f.cluster.Skew(ctx)
	if err != nil {
		return skipped("%v", err)
	}
	return clockOf(skew)
}

func clockOf(skew time.Duration) api.Finding {
	if skew.Abs() <= maxSkew {
		return ok("within %v of that of the API server", max(time.Second, skew.Abs().Round(time.Second)))
	}
	how := "ahead of"
	if skew > 0 {
		how = "behind"
	}
	return warning(fmt.Sprintf("this machine's clock is %v %s that of the API server", skew.Abs().Round(time.Second),
		how), "certificates and tokens look expired, or not yet valid", "sudo timedatectl set-ntp true")
}
