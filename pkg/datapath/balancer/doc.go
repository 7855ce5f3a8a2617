// Package balancer selects an endpoint for each flow to the virtual IP of a Service. It follows the rules of kube-proxy
// but runs in user space, so that it does not depend on kube-proxy's mode.
//
//	Apply(services) ──▶ index: (ClusterIP, protocol, port) ──▶ vip ──▶ view: usable endpoints
//	                                                            ▲
//	new flow ── Pick(protocol, dst, client, scheduler) ─────────┘──▶ first candidate, then Next, Next, ...
//
// The traffic manager updates it from its watches and asks it for every flow. The package does not use Kubernetes
// types; the caller converts them. It uses only ClusterIPs: everyone who may write a Service can set external IPs
// and load balancer addresses (CVE-2020-8554), so Service has no field for them.
//
// # Rules
//
// The rules follow k8s.io/kubernetes/pkg/proxy (CategorizeEndpoints and the proxiers, v1.34):
//   - Only endpoints of the ClusterIP's address family are used; duplicates count once.
//   - Ready endpoints are usable. If there is none, serving endpoints that terminate are usable.
//   - If every ready endpoint has a node hint and one is for this node, only those for this node are usable. Otherwise
//     the same applies to zone hints. Otherwise all are usable.
//   - internalTrafficPolicy Local: only the endpoints on this node are usable, regardless of hints. If they exist only on
//     other nodes, the verdict is Dropped: packets are lost without a reply. If they exist nowhere, it is Refused.
//   - Without a usable endpoint, or on a port that the Service does not have, the verdict is Refused.
//   - ClientIP affinity applies per client, virtual IP and port. Each use refreshes it. It ends after its timeout, and
//     when its endpoint is no longer usable.
//
// There are two differences. The client is the identity of a laptop, because all laptops share the IP address of the
// traffic manager. And if a candidate refuses, the next one can be tried before the laptop sees the refusal.
//
// # Concurrency
//
// Pick and its methods are lock-free, except that a Service with affinity locks the mutex of the virtual IP. Apply
// replaces one pointer per changed Service. It copies the index, once per call, only when a virtual IP or port
// appears or disappears, so callers should batch changes.
package balancer
