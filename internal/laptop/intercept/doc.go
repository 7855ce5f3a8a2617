// Package intercept brings a workload's inbound traffic to this laptop: one Intercept per workload, one podIntercept
// for each pod of it.
//
//	Run ─▶ read the workload and the image, choose ports ─┬─▶ watch the pods, and intercept new ones
//	                                                      └─▶ check permissions ─▶ choose the mode (sidecar: change the
//	    template) ─▶ intercept one pod, and probe it ─▶ the others, 8 at a time ─▶ probe ClusterIPs ─▶ begun
//	ctx ends: leave
//
// An agent is an ephemeral container that is added to a running pod, or a sidecar that is added to the pod template,
// so that a rollout puts it into all pods (mode.go chooses).
//
//	pod                                          this machine
//	 client ─▶ traffic agent ═ TLS 1.3, pkg/wire/transport ═ agentSession ─ server ─▶ 127.0.0.1, else ::1
//	              ▲    through the session, in which the traffic manager dials the agent; else a port-forward
//	              └─ claims, releases, probes
//
// See podIntercept for the states of one pod.
//
// The laptop reads the agent's key from the container's log, which the kubelet serves up to a second late, and from an
// ephemeral agent also through its info port, which saves that second. The port alone does not suffice, because another
// container of the pod could answer there and because it closes after a minute, while later leaders have other keys.
//
// In ephemeral mode, the intercept first adds an agent to one pod only, the first in the order of names, and then to 8
// pods at a time. So when two developers start overlapping intercepts at the same moment, the same one wins in every
// pod, and the other one has changed one pod only. Status reports the last error of each pod as its Reason. If no pod
// that runs can be intercepted, or an error applies to all pods (final), the intercept ends. Later it retries each pod.
//
// The package uses the user's own rights only, and leaves nothing on this machine. In the cluster, a claim whose owner
// does not answer matches no requests; the agent releases it after a minute. An ephemeral agent without claims ends
// after a minute. A sidecar stays until leave, or until `kubevpn leave` or `kubevpn reset`.
package intercept
