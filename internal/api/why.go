package api

// Explanation is the output of `kubevpn why`: what happened to one request, hop by hop.
type Explanation struct {
	TypeMeta
	Method string `json:"method"`
	URL    string `json:"url"`
	From   string `json:"from"`    // "this machine", or a pod
	Trace  string `json:"traceID"` // of the request's header traceparent
	Status int    `json:"status,omitempty"`
	// Hops are in the order in which a request passes them.
	Hops []Hop `json:"hops"`
	// Error is the cause: its code is the exit code. Nil: the request was answered, and nothing is wrong.
	Error   *Error  `json:"error,omitempty"`
	Seconds float64 `json:"seconds"`
}

// Hop is one part of the path of a request.
type Hop struct {
	Name    string     `json:"hop"` // one of the constants Hop*
	Verdict HopVerdict `json:"verdict"`
	Seen    string     `json:"seen"`            // what was observed, on one line
	Notes   []string   `json:"notes,omitempty"` // further observations, each on one line
	Seconds float64    `json:"seconds,omitempty"`
}

// The hops of a request.
const (
	HopName     = "name"     // the name was resolved
	HopRoute    = "route"    // the kernel routed the address into the tunnel
	HopBalancer = "balancer" // a Service chose an endpoint
	HopPolicy   = "policy"   // NetworkPolicies allow the connection to the endpoint
	HopDial     = "dial"     // something accepted the connection
	HopAgent    = "agent"    // the traffic agent of a pod matched the request
	HopProgram  = "program"  // the program of this machine received it
	HopAnswer   = "answer"   // the request was answered
)

// HopVerdict says what a hop did to the request.
type HopVerdict string

const (
	HopOK      HopVerdict = "ok"
	HopFailed  HopVerdict = "failed"
	HopNote    HopVerdict = "note"    // unusual, and not the cause
	HopUnknown HopVerdict = "unknown" // it could not be observed; Seen says why
	HopSkipped HopVerdict = "-"       // the request does not pass it, or ended before
)
