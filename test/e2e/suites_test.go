//go:build e2e && linux

package e2e

import (
	"os"
	"slices"
	"testing"

	"kubevpn/internal/api"
	"kubevpn/test/lab"
)

// suite is a set of checks that runs on one cluster.
type suite struct {
	name string
	run  func(*testing.T, *world)
}

// both runs in both netstacks, on one cluster.
var both = []suite{
	{"connect", connectSuite},
	{"reach", reachSuite},
	{"faithful", faithfulSuite},
	{"services", servicesSuite},
	{"names", namesSuite},
	{"roundtrips", roundTripsSuite},
	{"faults", faultsSuite},
	{"far", farSuite},
	{"flows", flowsSuite},
}

// kubeProxy runs in every mode of kube-proxy, and without it.
var kubeProxy = []suite{{"reach", reachSuite}, {"services", servicesSuite}}

// below runs on one cluster and in one netstack. It tests what lies below both: the rights of users on a laptop, what
// kubevpn leaves on it, how it chooses and changes transports, which networks and names it takes, and how a machine
// resolves names, for which gvisor receives the packets in either. In both netstacks, the suite faults moves flows from
// transport to transport.
var below = []suite{
	{"traces", tracesSuite},
	{"foreground", foregroundSuite},
	{"overlap", overlapSuite},
	{"domains", domainsSuite},
	{"two", twoSuite},
	{"user", userSuite},
	{"transports", transportsSuite},
	{"resolved", resolvedSuite},
	{"resolvconf", resolvConfSuite},
}

// installing runs on one cluster and in one netstack. It tests what precedes any packet: the messages when a
// connection is impossible, the permissions to install (the suite auto tests those of the gateway), and the commands
// of the README.
var installing = []suite{
	{"errors", errorsSuite},
	{"login", loginSuite},
	{"flags", flagsSuite},
	{"rights", rightsSuite},
	{"helm", helmSuite},
	{"registry", registrySuite},
	{"readme", readmeSuite}, // last, because it uninstalls the manager
}

// intercepts tests intercepts and clones on one cluster, in the netstack that kubevpn chooses, and `kubevpn why`. The
// suite proxied tests what depends on the packet path, on other clusters too.
var intercepts = []suite{
	{"proxy", proxySuite},
	{"kinds", kindsSuite},
	{"tls", tlsSuite},
	{"bypassed", bypassedSuite},
	{"clone", cloneSuite},
	{"claims", cloneClaimsSuite},
	{"clonejob", cloneJobSuite},
	{"expose", exposeSuite},
	{"why", whySuite},
	{"diff", diffSuite},
	{"world", worldSuite},
}

// dev runs programs as a pod of the workload does, on the same kind of cluster as intercepts.
var dev = []suite{
	{"dev", devSuite},
	{"isolate", isolateSuite},
	{"socks", socksSuite},
	{"run", runSuite},
	{"pod", podSuite},
	{"jump", jumpSuite},
	{"proxies", proxiesSuite},
	{"othervpn", otherVPNSuite},
	{"doctor", doctorSuite},
	{"page", pageSuite},
	{"mcp", mcpSuite},
	{"up", upSuite},
	{"debug", debugSuite},
	{"docker", dockerSuite},
	{"hostile", hostileSuite},
	{"examples", examplesSuite},
	{"ci", ciSuite},
}

// auto runs between the two netstacks, where connect chooses.
var auto = []suite{{"auto", autoSuite}}

// whole runs where the kernel serves ClusterIPs, which the system netstack needs.
var whole = []suite{
	{"packets", packetsSuite},
	{"laptops", laptopsSuite},
}

// selected returns the suites of the lists, or only the one that KUBEVPN_E2E_SUITE names.
func selected(lists [][]suite) []suite {
	only := os.Getenv(suiteVariable)
	return slices.DeleteFunc(slices.Concat(lists...), func(s suite) bool { return only != "" && s.name != only })
}

func runSuites(t *testing.T, w *world, suites ...[]suite) {
	for _, s := range selected(suites) {
		t.Run(s.name, func(t *testing.T) {
			w.tellLeaks(t)
			s.run(t, w)
		})
	}
}

// TestIPTables first runs with the netstack that kubevpn chooses in a new namespace (gvisor), then with the system
// netstack, which changes the namespace.
func TestIPTables(t *testing.T) {
	w := newWorld(t, lab.Config{Name: "e2e-ipt", ProxyMode: lab.ProxyIPTables}, both, below, auto, whole)
	runSuites(t, w, both, below, auto)
	t.Run("system", func(t *testing.T) { runSuites(t, w.in("system"), both, whole) })
}

func TestIntercepts(t *testing.T) {
	runSuites(t, newWorld(t, lab.Config{Name: "e2e-intercepts", ProxyMode: lab.ProxyIPTables}, intercepts), intercepts)
}

func TestDev(t *testing.T) {
	runSuites(t, newWorld(t, lab.Config{Name: "e2e-dev", ProxyMode: lab.ProxyIPTables}, dev, installing), dev, installing)
}

// TestNFTablesDualStack uses only port-forward. Elsewhere laptops choose, and prefer api-proxy while it works. Kube-proxy
// is irrelevant to gvisor, for which two families are what is new.
func TestNFTablesDualStack(t *testing.T) {
	first, others := []suite{{"reach", reachSuite}, {"faults", faultsSuite}}, []suite{{"isolate", isolateReachSuite}, {"ipv6", ipv6Suite}, {"mapped", mappedSuite}, {"proxied", proxiedSuite}}
	w := newWorld(t, lab.Config{Name: "e2e-nft", ProxyMode: lab.ProxyNFTables, IPv6: true}, kubeProxy, first, others, auto, whole)
	w = w.by(api.TransportPortForward)
	runSuites(t, w, first, others, auto)
	t.Run("system", func(t *testing.T) { runSuites(t, w.in("system"), kubeProxy, whole, others) })
}

// TestRoaming moves the laptop from network to network, and needs both families.
func TestRoaming(t *testing.T) {
	roaming := []suite{{"roaming", roamingSuite}}
	w := newWorld(t, lab.Config{Name: "e2e-roaming", ProxyMode: lab.ProxyIPTables, IPv6: true}, roaming)
	runSuites(t, w, roaming)
}

func TestNoKubeProxy(t *testing.T) {
	others := []suite{{"names", namesSuite}, {"proxied", proxiedSuite}, {"auto", autoSuite}, {"laptops", laptopsSuite},
		{"doctor", doctorNoProxySuite}}
	runSuites(t, newWorld(t, lab.Config{Name: "e2e-none", ProxyMode: lab.ProxyNone}, kubeProxy, others), kubeProxy, others)
}
