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
	"fmt"
	"net/netip"
	"sync"
	"time"

	"kubevpn/internal/api"
	"kubevpn/internal/config"
	"kubevpn/internal/kube/client"
	"kubevpn/internal/kube/install"
)

// Config configures Run.
type Config struct {
	// Prepare reads the user's kubeconfig, and Load makes a client for it. Errors are *api.Error.
	Prepare func() (client.Prepared, error)
	Load    func(client.Prepared) (*client.Cluster, error)
	// Terminal is for a credential plugin that requires one. Others run without a terminal.
	Terminal client.Terminal
	// Timeout limits the first answer of the API server. 0: defaultTimeout.
	Timeout  time.Duration
	Settings api.ConnectSettings
	Paths    config.Paths
	Machine  string // its kind, if it is not a usual one: container, WSL 1, WSL 2
	// Status asks the daemon. It returns nil and no error if none runs.
	Status func(context.Context) (*api.Status, error)
	// What the program of this machine knows: the state of the root helper's service, the routes that a connection
	// would have, and a session with the traffic manager in a pod.
	HelperService func(context.Context) (api.HelperService, error)
	Foresee       func(found client.CIDRs, r api.ConnectRequest, path []netip.Addr, devices []string, inPod bool) (
		api.Foresight, error)
	Try func(ctx context.Context, c *client.Cluster, namespace, pod string) (api.ManagerHello, []api.Transport, error)
	// Found is called with each finding, in the order of the list. Calls do not overlap. May be nil.
	Found func(api.Finding)
}

const (
	defaultTimeout = 10 * time.Second
	// checkTimeout limits a check, without the time for the check that it needs. Checks with a timeout of their own end
	// earlier.
	checkTimeout = 20 * time.Second
	// abandonTimeout is the time after its end in which a check must return.
	abandonTimeout = 2 * time.Second
)

// check is one check. do returns a finding without the fields that the runner knows: section, name and time.
type check struct {
	section, name string
	needs         string // the name of an earlier check; this one is skipped unless that is ok or a warning
	do            func(context.Context, *facts) api.Finding
}

// facts are what checks find out for those that need them. Each field has one writer, which ends before its readers
// begin.
type facts struct {
	Config
	prepared client.Prepared // by kubeconfig
	cluster  *client.Cluster // by kubeconfig

	status  func() (*api.Status, error)        // of the daemon; nil: none runs
	manager func() (install.Inspection, error) // for checks that need an answer of the API server

	// by session
	transports     []api.Transport
	managerVersion string
	missing        []string

	rights []api.Right // by rights, for the Diagnosis
}

// Run runs all checks. It returns when all have ended, which takes a bounded time. If ctx ends before, the checks that
// have not ended are skipped.
func Run(ctx context.Context, cfg Config) api.Diagnosis {
	if cfg.Timeout == 0 {
		cfg.Timeout = defaultTimeout
	}
	f := &facts{Config: cfg}
	f.status = sync.OnceValues(func() (*api.Status, error) { return cfg.Status(ctx) })
	f.manager = sync.OnceValues(func() (install.Inspection, error) {
		ctx, cancel := context.WithTimeout(ctx, checkTimeout)
		defer cancel()
		i, err := install.Inspect(ctx, f.cluster, install.Options{
			Namespace: f.Settings.ManagerNamespace, FallbackNamespace: f.prepared.Namespace, Image: f.Settings.Image,
		})
		if err != nil {
			err = f.cluster.Explain(err) // also checkTimeout
		}
		return i, err
	})
	return diagnose(ctx, f, checks())
}

// diagnose runs the checks. It reads only the facts of checks that succeeded: one that is left behind may still write.
func diagnose(ctx context.Context, f *facts, list []check) api.Diagnosis {
	d := api.Diagnosis{TypeMeta: api.Type(api.KindDiagnosis), Findings: run(ctx, f, list)}
	for _, found := range d.Findings {
		switch {
		case found.State != api.FindingOK:
		case found.Name == checkRights:
			d.Rights = f.rights
		case found.Name == checkKubeconfig:
			f.cluster.Release()
		}
	}
	return d
}

// ended is a check that runs or has ended.
type ended struct {
	done chan struct{} // closed when the Finding is set
	api.Finding
}

// run runs the checks at once, and reports their findings in the order of the list.
func run(ctx context.Context, f *facts, list []check) (findings []api.Finding) {
	all := make(map[string]*ended, len(list))
	for _, c := range list {
		all[c.name] = &ended{done: make(chan struct{})}
	}
	for _, c := range list {
		go func() {
			e := all[c.name]
			defer close(e.done)
			e.Finding = c.find(ctx, f, all[c.needs])
			e.Section, e.Name = c.section, c.name
		}()
	}
	for _, c := range list {
		e := all[c.name]
		<-e.done
		findings = append(findings, e.Finding)
		if f.Found != nil {
			f.Found(e.Finding)
		}
	}
	return findings
}

// find runs a check after the one that it needs, if any, has succeeded. It leaves behind a check that does not return
// within its timeout, or when ctx ends.
func (c check) find(ctx context.Context, f *facts, needed *ended) (found api.Finding) {
	if needed != nil {
		<-needed.done
		switch needed.State {
		case api.FindingFailed:
			return skipped("the check %q failed", c.needs)
		case api.FindingSkipped:
			return skipped("%s", needed.Seen)
		}
	}
	began := time.Now()
	defer func() { found.Seconds = time.Since(began).Seconds() }()
	bounded, cancel := context.WithTimeout(ctx, checkTimeout)
	defer cancel()
	result := make(chan api.Finding, 1)
	go func() { result <- c.do(bounded, f) }()
	select {
	case found = <-result:
	case <-ctx.Done():
	case <-time.After(checkTimeout + abandonTimeout):
		return broken(api.ExitUnexpected, "what it checks is unknown", "kubevpn doctor -v 6",
			"the check did not end within %v", checkTimeout)
	}
	if ctx.Err() != nil {
		return skipped("interrupted")
	}
	return found
}

func ok(format string, args ...any) api.Finding {
	return api.Finding{State: api.FindingOK, Seen: api.CleanLine(fmt.Sprintf(format, args...))}
}

func skipped(format string, args ...any) api.Finding {
	return api.Finding{State: api.FindingSkipped, Seen: api.CleanLine(fmt.Sprintf(format, args...))}
}

// warning returns a finding about something that works less well.
func warning(effect, fix, cause string, args ...any) api.Finding {
	return api.Finding{State: api.FindingWarning, Cause: api.CleanLine(fmt.Sprintf(cause, args...)),
		Effect: api.CleanLine(effect),
		Fix:    api.Clean(cmp.Or(fix, "kubevpn connect -v 6   # prints the requests"))}
}

// broken returns a finding about something that does not work.
func broken(code api.ExitCode, effect, fix, cause string, args ...any) api.Finding {
	f := warning(effect, fix, cause, args...)
	f.State, f.Code = api.FindingFailed, code
	return f
}

// failed returns the finding for an error. Its hint is the fix.
func failed(err error, effect string) api.Finding {
	e := api.AsError(err)
	return broken(e.Code, effect, e.Hint, "%s", e.Message)
}
