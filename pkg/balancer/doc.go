// Package balancer turns a Service's virtual IP into the address of one of its endpoints, by the rules of
// kube-proxy, but per flow and in user space, so that it works whatever kube-proxy does.
//
//	Apply(services) ──▶ index: (ClusterIP, protocol, port) ──▶ vip ──▶ view: usable endpoints
//	                                                            ▲
//	new flow ── Pick(protocol, dst, client, scheduler) ─────────┘──▶ first candidate, then Next, Next, ...
//
// The traffic manager feeds it from its watches and asks it for every flow. It knows no Kubernetes types: the
// caller converts. It trusts ClusterIPs and nothing else: external IPs and load balancer addresses can be set
// by whoever may write a Service (CVE-2020-8554), so Service has no field for them.
//
// # Rules
//
// They are those of k8s.io/kubernetes/pkg/proxy (CategorizeEndpoints and the proxiers, v1.34):
//   - Endpoints are of the ClusterIP's family; duplicates count once.
//   - Usable are the ready ones; if there is none, the serving ones among the terminating.
//   - If every ready endpoint has a node hint and one is for this node, only those for this node. Otherwise the
//     same with zone hints. Otherwise all.
//   - internalTrafficPolicy Local: only the endpoints on this node, hints aside. None here, but some elsewhere:
//     Dropped, which is silence and not a refusal. None anywhere: Refused.
//   - No usable endpoint: Refused. A ClusterIP's port that the Service does not have: Refused.
//   - ClientIP affinity is per client and per virtual IP and port. A use refreshes it. It is void after its
//     timeout, and when its endpoint stops being usable.
//
// What differs: the client is a laptop's identity, as all laptops share the manager's IP address; and a
// candidate that refuses can be followed by another before the laptop hears of it.
//
// # Concurrency
//
// Pick and everything on a Pick's way is lock-free, save that a Service with affinity takes that virtual IP's
// mutex. Apply swaps one pointer per changed Service; it copies the index only when a virtual IP or port comes
// or goes, once per call, so callers do well to batch.
package balancer
