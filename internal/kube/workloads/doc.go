// Package workloads reads and changes objects with pods: Deployments, StatefulSets, Services, custom resources.
//
//	Workload   TYPE/NAME ──▶ selector, pod template, Services               workload.go, kind.go
//	List       the workloads of a namespace, and who intercepts them        list.go
//	Ports      the ports of its pods, by container and by Service           ports.go
//	Running    one of its pods that runs, or one that would be created      running.go
//	WatchPods  its pods, after each change                                  pods.go
//	Inject     adds a traffic agent to a pod, as an ephemeral container     inject.go
//	FollowLog  a container's log, from its start to its end                 log.go
package workloads
