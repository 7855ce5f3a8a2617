package api

// Ports of the traffic manager's pod.
const (
	ManagerPort = 10800 // sessions; on 127.0.0.1 inside the pod, so that only pods/portforward reaches it
	HealthPort  = 10801 // GET /livez and /readyz for the kubelet; nothing else
	// conns through the API server's pods/proxy; on all addresses of the pod; sends nothing without a ticket
	ProxyPort   = 10802
	MetricsPort = 10803 // GET /metrics; closed unless an admin asks for it
)
