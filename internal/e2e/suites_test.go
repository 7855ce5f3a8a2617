//go:build e2e && linux

package e2e

import (
	"slices"
	"testing"

	"kubevpn/internal/api"
	"kubevpn/internal/lab"
)

// suite is one promise, checked on one cluster.
type suite struct {
	name string
	run  func(*testing.T, *world)
}

// everywhere is checked whatever serves ClusterIPs in the cluster, or nothing does.
var everywhere = []suite{
	{"connect", connectSuite},
	{"reach", reachSuite},
	{"faithful", faithfulSuite},
	{"services", servicesSuite},
	{"names", namesSuite},
}

// once is checked on one cluster, because kube-proxy has no part in it; in both netstacks, because they have.
var once = []suite{
	{"traces", tracesSuite},
	{"foreground", foregroundSuite},
	{"user", userSuite},
	{"clash", clashSuite},
	{"resolved", resolvedSuite},
	{"resolvconf", resolvConfSuite},
	{"transports", transportsSuite},
	{"faults", faultsSuite},
	{"two", twoSuite},
}

// installing is checked on one cluster and in one netstack. It is about what comes before any packet: what is told when there
// is nothing to connect to, who may install what (the gateway's part of that is the suite auto's), and the README's
// commands, which ask for no netstack.
var installing = []suite{
	{"errors", errorsSuite},
	{"rights", rightsSuite},
	{"readme", readmeSuite}, // the last: it uninstalls the manager
}

// intercepts is what becomes of a workload's requests, checked on one cluster, in the netstack that kubevpn chooses. What
// depends on the way that packets take is the suite proxied, and checked elsewhere too.
var intercepts = []suite{
	{"proxy", proxySuite},
	{"kinds", kindsSuite},
	{"tls", tlsSuite},
	{"bypassed", bypassedSuite},
	{"clone", cloneSuite},
	{"claims", cloneClaimsSuite},
	{"clonejob", cloneJobSuite},
	{"dev", devSuite},
	{"isolate", isolateSuite},
	{"docker", dockerSuite},
}

// whole is checked where the kernel serves ClusterIPs, so that laptops may have their packets forwarded by it.
var whole = []suite{
	{"packets", packetsSuite},
	{"laptops", laptopsSuite},
}

// bothNetstacks runs everywhere for what kubevpn chooses where the manager's namespace is as connect makes it (gvisor), then
// first and others; and then everywhere and others again for the system netstack, which leaves the namespace another.
func bothNetstacks(t *testing.T, w *world, first []suite, others ...suite) {
	runSuites(t, w, everywhere, first, others)
	t.Run("auto", func(t *testing.T) { autoSuite(t, w) })
	t.Run("system", func(t *testing.T) { runSuites(t, w.in("system"), everywhere, whole, others) })
}

func runSuites(t *testing.T, w *world, suites ...[]suite) {
	for _, list := range suites {
		for _, s := range list {
			t.Run(s.name, func(t *testing.T) {
				w.tellLeaks(t)
				s.run(t, w)
			})
		}
	}
}

func TestIPTables(t *testing.T) {
	bothNetstacks(t, newWorld(t, lab.Config{Name: "e2e-ipt", ProxyMode: lab.ProxyIPTables}), slices.Concat(intercepts, installing), once...)
}

// TestNFTablesDualStack is by port-forward alone. Elsewhere it is the laptop's choice, which is api-proxy while that works.
func TestNFTablesDualStack(t *testing.T) {
	w := newWorld(t, lab.Config{Name: "e2e-nft", ProxyMode: lab.ProxyNFTables, IPv6: true}).by(api.TransportPortForward)
	bothNetstacks(t, w, []suite{{"faults", faultsSuite}}, suite{"isolate", isolateReachSuite}, suite{"ipv6", ipv6Suite}, suite{"proxied", proxiedSuite})
}

func TestNoKubeProxy(t *testing.T) {
	runSuites(t, newWorld(t, lab.Config{Name: "e2e-none", ProxyMode: lab.ProxyNone}), everywhere, []suite{{"proxied", proxiedSuite}, {"auto", autoSuite}, {"laptops", laptopsSuite}})
}
