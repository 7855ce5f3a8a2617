// Package lab starts a real Kubernetes cluster on one Linux machine, and a laptop beside it: what the demo shows and
// the end-to-end tests run on.
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
// Each box is a network namespace; a node is a mount namespace and a host name too, with its own /run, /var/lib and
// /var/log. The nodes have routes to each other's pods. The router has none, neither to pods nor to Services, so the
// laptop reaches the nodes' addresses (the API server is https://10.99.0.1:6443) and nothing behind them. Nodes pull
// without TLS from 203.0.113.10:5000, on the router, if a test serves a registry there. Pods leave the cluster
// masqueraded as their node. With Config.IPv6 every network has a second range, from fd00:10::/32.
//
// kube-proxy's IPVS mode needs a kernel with ip_vs. If the machine's has none, each node is a guest, user-mode Linux
// with the machine's files and programs (see package guest), and NAME-nodeN only holds its wire:
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
// Nothing of a lab is in the machine's own network namespace, so labs of different names use the same addresses side
// by side. A lab owns the following, and Down looks for it after any crash:
//
//	/var/lib/kubevpn-lab/NAME             state, keys, logs, data
//	/run/netns/NAME-{laptop,router,nodeN} network namespaces, and NAME-control; every process in one is the lab's
//	/etc/netns/NAME-laptop                the laptop's resolv.conf, hosts, nsswitch.conf, which `ip netns exec` puts in place
//	/sys/fs/cgroup/**/kubevpn-lab-NAME    control groups; every process in one is the lab's
//
// Kubernetes, etcd and CoreDNS are built from their Go modules, once, into a cache (see Build). The lab's processes
// are not supervised: they outlive the program that called Up, and one that dies stays dead until Restart.
package lab
