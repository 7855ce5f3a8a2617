// Package intercept brings a workload's inbound traffic to this laptop: one Intercept per workload, one podIntercept
// for each pod of it.
//
//	Run ─▶ read the workload ─▶ choose ports ─▶ watch its pods ─▶ check permissions ─▶ intercept one pod, and probe it
//	    ─▶ the others, 8 at a time ─▶ probe ClusterIPs ─▶ begun ─▶ intercept new pods ─▶ ctx ends: leave
//
//	pod                                          this machine
//	 client ─▶ traffic agent ═ TLS 1.3, pkg/wire/transport ═ link ─ server ─▶ 127.0.0.1, else ::1
//	              ▲    through the session, in which the traffic manager dials the agent; else a port-forward
//	              └─ claims, releases, probes
//
// See podIntercept for the states of one pod.
//
// The laptop reads the agent's key from the container's log, which the kubelet serves up to a second late, and from an
// ephemeral agent also through its info port, which saves that second. The port alone does not suffice, because another
// container of the pod could answer there and because it closes after a minute, while later leaders have other keys.
//
// The intercept adds an agent to the first pod by name alone, then to 8 pods at a time. So when two developers start
// overlapping intercepts at the same moment, the same one wins in every pod, and the other one has changed one pod
// only. Status reports the last error of each pod as its Reason. An error of the first pods ends the intercept; the
// intercept retries the other pods.
//
// The package uses the user's own rights only, and leaves nothing on this machine. In the cluster, a claim whose owner
// does not answer matches no requests; the agent releases it after a minute. An agent without claims ends.
package intercept
