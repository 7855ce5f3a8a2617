package agent

const (
	// guardedVariable is in the environment of an agent that has a guardian: the name of its redirects.
	guardedVariable = "KUBEVPN_AGENT_GUARDED"
	// backendVariable is a redirect.Backend, for tests of what an old kernel has.
	backendVariable = "KUBEVPN_AGENT_REDIRECTS"
)
