// Package platform tests kubevpn on a machine without a cluster: the real program, its daemon and its root helper
// connect to an API server, a traffic manager and a pod in the process of the test. It is for systems on which the lab
// cannot run, such as macOS. It also runs on Linux, in a network namespace, so that make test covers it.
//
//	kubevpn connect ─ daemon ─ helper        (real, as root)
//	      │ HTTPS, port-forward over SPDY
//	      ▼
//	apiServer: objects of a fake clientset ──▶ internal/incluster/manager (real) ──▶ "pod": servers at an address of this machine
//
// The laptop and the "cluster" share one network. Only ClusterIPs are therefore routed into the tunnel, because the
// manager must reach endpoints outside of it.
package platform
