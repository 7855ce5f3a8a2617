package api

const (
	// TraceHeader marks the request of `kubevpn why` with its trace ID: 32 hexadecimal digits.
	TraceHeader = "Kubevpn-Why"
	// TraceParent is the header of W3C's Trace Context. Programs that propagate it carry the trace ID on.
	TraceParent = "Traceparent"
)
