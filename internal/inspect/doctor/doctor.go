// Package doctor checks what `kubevpn connect` needs, on this machine and in a cluster, and changes nothing. It works
// without a daemon, without a cluster and without root, as far as possible.
//
//	Run ─▶ all checks at once; a check waits only for the one that it needs
//	         │                        kubeconfig ─▶ credentials ─▶ address ─▶ answer ─┬─▶ networks, rights, kube-proxy
//	         │                                                                        └─▶ manager ─▶ transports
//	         ▼
//	       Finding: ok, warning, failed or skipped; in the order of the list
//
//	checks.go      the list
//	machine.go     kernel, TUN device, root helper, storage, daemon; machine_linux.go and machine_other.go
//	networks.go    how names are resolved here; other VPNs, and networks that overlap those of the cluster
//	apiserver.go   kubeconfig and credentials; the way to the API server, its answer and the clocks
//	manager.go     the traffic manager, the rights of the user, kube-proxy, port-forwards and the transports
package doctor

import (
	"cmp"
	"context"
	"net/netip"
	"sync"
	"time"

	"kubevpn/internal/api"
	"kubevpn/internal/config"
	"kubevpn/internal/inspect/check"
	"kubevpn/internal/kube/client"
	"kubevpn/internal/kube/install"
)

// Config configures Run.
type Config struct {
	// Load reads the user's kubeconfig, and makes a client for it. Errors are *api.Error.
	Load func() (client.Prepared, *client.Cluster, error)
	// Terminal is for a credential plugin that requires one. Others run without a terminal.
	Terminal client.Terminal
	// Timeout limits the first answer of the API server. 0: defaultTimeout.
	Timeout  time.Duration
	Settings api.ConnectSettings
	Paths    config.Paths
	Machine  string // its kind, if it is not a usual one: container, WSL 1, WSL 2
	// Status asks the daemon. If none runs, the status has no connections, and the version of this program.
	Status func(context.Context) (api.Status, error)
	// What the program of this machine knows: the state of the root helper's service, the routes that a connection
	// would have, and a session with the traffic manager in a pod.
	HelperService func(context.Context) (api.HelperService, error)
	Foresee       func(found client.CIDRs, r api.ConnectRequest, path []netip.Addr, devices, own []string, inPod bool) (
		api.Foresight, error)
	Try func(ctx context.Context, c *client.Cluster, namespace, pod string) (api.ManagerHello, []api.Transport, error)
	// Found is called with each finding, in the order of the list. Calls do not overlap. May be nil.
	Found func(api.Finding)
}

const defaultTimeout = 10 * time.Second

// facts are what checks find out for those that need them. Each field has one writer, which ends before its readers
// begin.
type facts struct {
	Config
	prepared client.Prepared // by kubeconfig
	cluster  *client.Cluster // by kubeconfig

	status  func() (api.Status, error)         // of the daemon: see Config
	manager func() (install.Inspection, error) // for checks that need an answer of the API server

	// by session
	transports     []api.Transport
	managerVersion string
	missing        []string
}

// Run runs all checks. It returns when all have ended, which takes a bounded time. If ctx ends before, the checks that
// have not ended are skipped.
func Run(ctx context.Context, cfg Config) api.Diagnosis {
	if cfg.Timeout == 0 {
		cfg.Timeout = defaultTimeout
	}
	f := &facts{Config: cfg}
	f.status = sync.OnceValues(func() (api.Status, error) { return cfg.Status(ctx) })
	f.manager = sync.OnceValues(func() (install.Inspection, error) {
		ctx, cancel := context.WithTimeout(ctx, check.Timeout)
		defer cancel()
		i, err := install.Inspect(ctx, f.cluster, install.Options{
			Namespace: f.Settings.ManagerNamespace, FallbackNamespace: f.prepared.Namespace, Image: f.Settings.Image,
		})
		if err != nil {
			err = f.cluster.Explain(err) // also check.Timeout
		}
		return i, err
	})
	return diagnose(ctx, f, checks())
}

// diagnose runs the checks. It reads only the facts of checks that succeeded: one that is left behind may still write.
func diagnose(ctx context.Context, f *facts, list []check.Check[*facts]) api.Diagnosis {
	d := api.Diagnosis{TypeMeta: api.Type(api.KindDiagnosis), Findings: check.Run(ctx, f, list, f.Found)}
	for _, found := range d.Findings {
		if found.Name == checkKubeconfig && found.Verdict == api.VerdictOK {
			f.cluster.Release()
		}
	}
	return d
}

// warning returns a finding about something that works less well.
func warning(effect, fix, cause string, args ...any) api.Finding {
	f := check.Warning(cause, args...)
	f.Effect, f.Fix = effect, cmp.Or(fix, "kubevpn connect -v 6   # prints the requests")
	return f
}

// broken returns a finding about something that does not work.
func broken(code api.ExitCode, effect, fix, cause string, args ...any) api.Finding {
	f := warning(effect, fix, cause, args...)
	f.Verdict, f.Code = api.VerdictFailed, code
	return f
}

// failed returns the finding for an error. Its hint is the fix.
func failed(err error, effect string) api.Finding {
	e := api.AsError(err)
	return broken(e.Code, effect, e.Hint, "%s", e.Message)
}
