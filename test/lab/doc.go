// Package lab starts a real Kubernetes cluster and a laptop beside it on one Linux machine, for the demo and the
// end-to-end tests.
//
//	NAME-laptop                NAME-router                     NAME-node1                  NAME-node2 ...
//	┌──────────────┐  10.98.0  ┌──────────────┐  10.99.0       ┌───────────────────────┐   ┌───────────────────┐
//	│ kubectl,     │.2      .1 │ forwards     │.254 (br0)   .1 │ etcd, kube-apiserver, │.2 │                   │
//	│ kubevpn      ├───────────┤ DNS, web of  ├───────┬────────┤ controller-manager,   │ ┌─┤ containerd,       │
//	│              │           │ outside.test │       │        │ scheduler             │ │ │ kubelet,          │
//	└──────────────┘           └──────────────┘       │        │ containerd, kubelet,  │ │ │ kube-proxy        │
//	                                                  │        │ kube-proxy            │ │ │                   │
//	                                                  │        │ pods 10.244.1.0/24    │ │ │ pods 10.244.2.0/24│
//	                                                  │        └───────────────────────┘ │ └───────────────────┘
//	                                                  └──────────────────────────────────┘
//
// Each box is a network namespace. A node is also a mount namespace and a host name, with its own /run, /var/lib and
// /var/log. The nodes have routes to each other's pods. The router has no routes to pods or Services, so the laptop
// reaches the nodes' addresses (the API server is https://10.99.0.1:6443) and nothing behind them. If a test serves a
// registry at 203.0.113.10:5000, on the router, nodes pull from it without TLS. Packets of pods leave the cluster with
// the address of their node. With Config.IPv6 every network has a second range, from fd00:10::/32.
//
// kube-proxy's IPVS mode needs a kernel with ip_vs. If the machine's kernel lacks it, each node is a guest: user-mode
// Linux with the machine's files and programs (see package guest). NAME-nodeN then only holds the guest's wire:
//
//	NAME-router       NAME-control               NAME-node1
//	┌───────────┐     ┌───────────────────┐.253  ┌──────────────────────────┬─────────────────────────────┐
//	│ br0       ├──┬──┤ etcd,             │      │                          │ guest, 10.99.0.1            │
//	│           │  │  │ kube-apiserver... │      │ eth0 (packet socket) ════╪══ eth0                      │
//	└───────────┘  │  └───────────────────┘      │                          │    containerd, kubelet,     │
//	               ├─────────────────────────────┤ control ═════════════════╪══ vec1: lab exec, ...       │
//	               └── NAME-node2 ...            │ 169.254.1.1              │ 169.254.1.2                 │
//	                                             └──────────────────────────┴─────────────────────────────┘
//
// A lab adds nothing to the machine's own network namespace, so labs of different names use the same addresses side by
// side. A lab owns the following objects, and Down looks for them after any crash:
//
//	/var/lib/kubevpn-lab/NAME             state, keys, logs, data
//	/run/netns/NAME-{laptop,router,nodeN} network namespaces, and NAME-control; the lab owns every process in them
//	/etc/netns/NAME-laptop                the laptop's resolv.conf, hosts, nsswitch.conf, which `ip netns exec` mounts
//	/sys/fs/cgroup/**/kubevpn-lab-NAME    control groups; the lab owns every process in them
//
// Kubernetes, etcd and CoreDNS are built once from their Go modules, into a cache (see Build). The lab does not
// supervise its processes: they outlive the program that called Up, and a process that dies stays dead until Restart.
package lab
