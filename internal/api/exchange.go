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
	// headers whose values are not shown, at least in part; also "path", "request body" and "response body"
	Redacted  []string `json:"redacted,omitempty"`
	Truncated bool     `json:"truncated,omitempty"` // a head was too long, and is not whole
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

// ShowAll is a name of a header that no header has. With it Redact changes nothing.
const ShowAll = "None"

// Secrets hides the secrets of exchanges: values of headers and fields with a secret name, and what looks like a secret
// in other texts. IDs stay. It contains the names of more headers than redact.Header knows, in any case, or ShowAll to
// hide nothing.
type Secrets []string

// Hide returns a value without its secrets: redact.Mark if the name of its header or field is secret. A text without a
// name has "".
func (s Secrets) Hide(name, value string) string {
	named := func(n string) bool { return strings.EqualFold(n, name) }
	switch {
	case value == "", slices.Contains(s, ShowAll):
		return value
	case redact.Header(name), slices.ContainsFunc(s, named):
		return redact.Mark
	}
	r := redact.Redactor{Named: true}
	return r.Text(value)
}

// Redact replaces the secrets of headers, the path and the bodies by redact.Mark: see Secrets. e shares nothing that it
// changes with a copy.
func (e *Exchange) Redact(names []string) {
	found := slices.Clone(e.Redacted)
	hide := func(place, name, value string) string {
		shown := Secrets(names).Hide(name, value)
		if shown != value {
			found = append(found, place)
		}
		return shown
	}
	header := func(h *http.Header) {
		*h = h.Clone()
		for name, values := range *h {
			for n, value := range values {
				values[n] = hide(name, name, value)
			}
		}
	}
	body := func(place string, b *ExchangeBody) {
		shown := []byte(hide(place, "", string(b.Data)))
		b.Size += int64(len(shown) - len(b.Data)) // the difference stays what was not recorded
		b.Data = shown
	}
	header(&e.Request.Headers)
	e.Request.Path = hide("path", "", e.Request.Path)
	body("request body", &e.Request.Body)
	if e.Response != nil {
		answer := *e.Response
		e.Response = &answer
		header(&answer.Headers)
		header(&answer.Trailers)
		body("response body", &answer.Body)
	}
	slices.Sort(found)
	e.Redacted = slices.Compact(found)
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
	Redact     []string `json:"redact,omitempty"`     // names of more headers: see Secrets
}
