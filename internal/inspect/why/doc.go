// Package why explains what happens to one request to the cluster: `kubevpn why`.
//
//	observe.go    sends the request, and at the same time reads the cluster's objects: facts
//	podrunner.go  sends it from a pod, with --from
//	judge.go      the checks of the hops, by package check; they are pure, so that tests plant causes as facts
//	agent.go      what the agents and the program of this machine did
//	endpoints.go  what Services and EndpointSlices say
//	trip          the marked request itself, on this machine or in a pod
//
// It reads objects with the rights of its user. A hop that needs more rights is skipped.
package why
