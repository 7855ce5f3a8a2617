package api

import (
	"net/http"
	"net/netip"
	"slices"
	"strings"
	"time"

	"kubevpn/pkg/redact"
)

// The bounds of what is recorded.
const (
	// MaxRecordedBody is how many bytes of a body an agent records at most.
	MaxRecordedBody = 256 << 10
	// MaxKept is how many exchanges an intercept keeps at most.
	MaxKept = 10_000
)

// DefaultRecordedBody is how many bytes of a body are recorded if a user asks for bodies and gives no limit.
const DefaultRecordedBody = 16 << 10

// The destinations of an exchange.
const (
	ToLaptop      = "laptop"
	ToClone       = "clone"
	ToApplication = "application" // also if its laptop went away
	ToOther       = "other"       // another intercept
)

// Exchange is one HTTP request that an intercept matched, and the answer that its client got.
type Exchange struct {
	Began     time.Time `json:"began"`               // by the clock of the pod's node
	Wait      float64   `json:"waitSeconds"`         // until the head of the answer, or until the end
	Seconds   float64   `json:"seconds"`             // until the end
	Namespace string    `json:"namespace,omitempty"` // of the workload
	Workload  string    `json:"workload,omitempty"`  // TYPE/NAME
	Pod       string    `json:"pod,omitempty"`       // that got the request
	Match     string    `json:"match,omitempty"`     // of the intercept; for people
	To        string    `json:"destination"`         // laptop, clone, application or other
	Mirrored  bool      `json:"mirrored,omitempty"`  // the laptop got a copy
	Error     string    `json:"error,omitempty"`     // that ended it early
	Redacted  []string  `json:"redacted,omitempty"`  // headers whose values are not shown
	Truncated bool      `json:"truncated,omitempty"` // a head was too long, and is not whole
	// addresses of the client and of the pod
	Client   netip.AddrPort    `json:"client"`
	Server   netip.AddrPort    `json:"server"`
	Request  ExchangeRequest   `json:"request"`
	Response *ExchangeResponse `json:"response,omitempty"` // absent: the client got none
}

// ExchangeRequest is the request of an Exchange.
type ExchangeRequest struct {
	Method  string       `json:"method"`
	Scheme  string       `json:"scheme"` // "https": the agent terminated TLS
	Host    string       `json:"host"`
	Path    string       `json:"path"` // with the query
	Proto   string       `json:"protocol"`
	Headers http.Header  `json:"headers,omitempty"`
	Body    ExchangeBody `json:"body"`
}

// ExchangeResponse is the answer of an Exchange.
type ExchangeResponse struct {
	Status   int          `json:"status"`
	Headers  http.Header  `json:"headers,omitempty"`
	Trailers http.Header  `json:"trailers,omitempty"`
	Body     ExchangeBody `json:"body"`
}

// ExchangeBody is a body as it was recorded.
type ExchangeBody struct {
	Size int64  `json:"size"`           // bytes that passed
	Data []byte `json:"data,omitempty"` // the first of them, if bodies were recorded; base64
}

// Redact replaces the values of the headers with these names, in any case.
func (e *Exchange) Redact(names []string) {
	heads := []*http.Header{&e.Request.Headers}
	if e.Response != nil {
		answer := *e.Response
		e.Response = &answer
		heads = append(heads, &answer.Headers, &answer.Trailers)
	}
	for _, h := range heads {
		shown := make(http.Header, len(*h))
		for name, values := range *h {
			if slices.ContainsFunc(names, func(n string) bool { return strings.EqualFold(n, name) }) {
				values = []string{redact.Mark}
				if !slices.Contains(e.Redacted, name) {
					e.Redacted = append(e.Redacted, name)
				}
			}
			shown[name] = values
		}
		*h = shown
	}
	slices.Sort(e.Redacted)
}

// Weight returns about how many bytes of memory the exchange takes.
func (e *Exchange) Weight() int {
	n := 1<<10 + len(e.Request.Path) + HeaderWeight(e.Request.Headers) + cap(e.Request.Body.Data)
	if r := e.Response; r != nil {
		n += HeaderWeight(r.Headers) + HeaderWeight(r.Trailers) + cap(r.Body.Data)
	}
	return n
}

// HeaderWeight returns about how many bytes of memory a header takes.
func HeaderWeight(h http.Header) int {
	n := 0
	for name, values := range h {
		n += 64 + len(name)
		for _, v := range values {
			n += 16 + len(v)
		}
	}
	return n
}

// Record is a JSON line of an agent on a record stream, and of the daemon in its answer to a RequestsRequest. It
// is also a line of `kubevpn requests -o json`.
type Record struct {
	TypeMeta
	Exchange *Exchange `json:"exchange,omitempty"`
	// Dropped is how many exchanges were not recorded so far, because there were too many.
	Dropped uint64 `json:"dropped,omitempty"`
	// Pods is how many pods record, as soon as they do; only of the daemon.
	Pods    int    `json:"pods,omitempty"`
	Warning string `json:"warning,omitempty"` // only of the daemon
	Error   *Error `json:"error,omitempty"`   // ends the stream
}

// RecordOrder is a JSON line of the laptop on a record stream. As long as the stream exists, the agent records the
// requests of a claim of the same owner. Each further line changes Body.
type RecordOrder struct {
	Claim string `json:"claim"` // its ID
	Body  int    `json:"body"`  // bytes of each body to record; at most MaxRecordedBody
}

// RequestsRequest asks for the exchanges of an intercept of this machine.
type RequestsRequest struct {
	Connection string   `json:"connection,omitempty"` // ID of a connection; empty: any
	Namespace  string   `json:"namespace,omitempty"`  // empty: any
	Workload   string   `json:"workload"`             // TYPE/NAME, or an intercept's ID
	Follow     bool     `json:"follow,omitempty"`     // record, and answer until the request ends
	Body       int      `json:"body,omitempty"`       // bytes of each body to record
	Redact     []string `json:"redact,omitempty"`     // names of headers
}
