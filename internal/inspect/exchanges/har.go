package exchanges

import (
	"encoding/base64"
	"encoding/json"
	"fmt"
	"io"
	"maps"
	"net/http"
	"net/url"
	"slices"
	"time"
	"unicode/utf8"

	"kubevpn/internal/api"
	"kubevpn/internal/process/version"
)

// HAR writes exchanges as an HTTP Archive 1.2: one JSON object, entry by entry, so that it keeps none in memory. Fields
// that begin with an underscore are extensions of kubevpn.
type HAR struct {
	w       io.Writer
	entries int
}

// NewHAR returns a HAR that writes to w. Call Close at the end.
func NewHAR(w io.Writer) *HAR { return &HAR{w: w} }

type (
	harPair struct {
		Name  string `json:"name"`
		Value string `json:"value"`
	}
	harPost struct {
		MimeType string `json:"mimeType"`
		Text     string `json:"text"`
		Encoding string `json:"_encoding,omitempty"` // "base64"
	}
	harRequest struct {
		Method   string    `json:"method"`
		URL      string    `json:"url"`
		Proto    string    `json:"httpVersion"`
		Cookies  []harPair `json:"cookies"`
		Headers  []harPair `json:"headers"`
		Query    []harPair `json:"queryString"`
		Post     *harPost  `json:"postData,omitempty"`
		HeadSize int       `json:"headersSize"`
		BodySize int64     `json:"bodySize"`
	}
	harContent struct {
		Size     int64  `json:"size"`
		MimeType string `json:"mimeType"`
		Text     string `json:"text,omitempty"`
		Encoding string `json:"encoding,omitempty"`
	}
	harResponse struct {
		Status   int        `json:"status"`
		Text     string     `json:"statusText"`
		Proto    string     `json:"httpVersion"`
		Cookies  []harPair  `json:"cookies"`
		Headers  []harPair  `json:"headers"`
		Content  harContent `json:"content"`
		Redirect string     `json:"redirectURL"`
		HeadSize int        `json:"headersSize"`
		BodySize int64      `json:"bodySize"`
		Trailers []harPair  `json:"_trailers,omitempty"`
		Error    string     `json:"_error,omitempty"`
	}
	harTimings struct { // milliseconds
		Send    float64 `json:"send"`
		Wait    float64 `json:"wait"`
		Receive float64 `json:"receive"`
	}
	harEntry struct {
		Started  string      `json:"startedDateTime"`
		Time     float64     `json:"time"`
		Request  harRequest  `json:"request"`
		Response harResponse `json:"response"`
		Cache    struct{}    `json:"cache"`
		Timings  harTimings  `json:"timings"`
		ServerIP string      `json:"serverIPAddress,omitempty"`
		Workload string      `json:"_workload,omitempty"`
		Pod      string      `json:"_pod,omitempty"`
		Match    string      `json:"_match,omitempty"`
		To       string      `json:"_destination"`
		Mirrored bool        `json:"_mirrored,omitempty"`
		Redacted []string    `json:"_redacted,omitempty"`
		Comment  string      `json:"comment,omitempty"`
	}
)

// Add writes an exchange, with a comment unless it is empty.
func (h *HAR) Add(e *api.Exchange, comment string) error {
	before := ",\n"
	if h.entries == 0 {
		before = harHead() + "\n"
	}
	h.entries++
	entry := newHAREntry(e)
	entry.Comment = comment
	text, err := json.Marshal(entry)
	if err != nil {
		return err
	}
	_, err = io.WriteString(h.w, before+string(text))
	return err
}

// Close ends the object, with a comment unless it is empty.
func (h *HAR) Close(comment string) error {
	text := "\n]"
	if h.entries == 0 {
		text = harHead() + text
	}
	if comment != "" {
		quoted, err := json.Marshal(comment)
		if err != nil {
			return err
		}
		text += ",\"comment\":" + string(quoted)
	}
	_, err := io.WriteString(h.w, text+"}}\n")
	return err
}

// harHead returns what is before the entries. A version, which is valid as an image tag, needs no escapes of JSON.
func harHead() string {
	return fmt.Sprintf(`{"log":{"version":"1.2","creator":{"name":"kubevpn","version":%q},"entries":[`,
		version.String())
}

func newHAREntry(e *api.Exchange) harEntry {
	const ms = 1000
	h := harEntry{
		Started: e.Began.Format(time.RFC3339Nano), Time: e.Seconds * ms,
		Timings:  harTimings{Wait: e.Wait * ms, Receive: (e.Seconds - e.Wait) * ms},
		Request:  newHARRequest(e),
		Response: newHARResponse(e),
		Workload: e.Workload, Pod: e.Pod, Match: e.Match, To: e.To, Mirrored: e.Mirrored, Redacted: e.Redacted,
	}
	if e.Server.IsValid() {
		h.ServerIP = e.Server.Addr().String()
	}
	return h
}

func newHARRequest(e *api.Exchange) harRequest {
	r := &e.Request
	to := target(e)
	h := harRequest{Method: r.Method, URL: to.String(), Proto: r.Proto, Headers: harHeader(r.Headers),
		Cookies: []harPair{}, Query: []harPair{}, HeadSize: -1, BodySize: r.Body.Size}
	if !slices.Contains(e.Redacted, "Cookie") {
		for _, c := range (&http.Request{Header: r.Headers}).Cookies() {
			h.Cookies = append(h.Cookies, harPair{c.Name, c.Value})
		}
	}
	query, _ := url.ParseQuery(to.RawQuery) // without malformed pairs
	for _, name := range slices.Sorted(maps.Keys(query)) {
		for _, value := range query[name] {
			h.Query = append(h.Query, harPair{name, value})
		}
	}
	if len(r.Body.Data) > 0 {
		text, encoding := bodyText(r.Body.Data)
		h.Post = &harPost{r.Headers.Get("Content-Type"), text, encoding}
	}
	return h
}

func newHARResponse(e *api.Exchange) harResponse {
	h := harResponse{Proto: e.Request.Proto, Cookies: []harPair{}, Headers: []harPair{}, HeadSize: -1, BodySize: -1,
		Error: e.Error}
	r := e.Response
	if r == nil {
		return h // status 0, as browsers write it
	}
	h.Status, h.Text, h.Redirect = r.Status, http.StatusText(r.Status), r.Headers.Get("Location")
	h.Headers, h.BodySize = harHeader(r.Headers), r.Body.Size
	if !slices.Contains(e.Redacted, "Set-Cookie") {
		for _, c := range (&http.Response{Header: r.Headers}).Cookies() {
			h.Cookies = append(h.Cookies, harPair{c.Name, c.Value})
		}
	}
	if len(r.Trailers) > 0 {
		h.Trailers = harHeader(r.Trailers)
	}
	text, encoding := bodyText(r.Body.Data)
	h.Content = harContent{r.Body.Size, r.Headers.Get("Content-Type"), text, encoding}
	return h
}

func harHeader(h http.Header) []harPair {
	out := []harPair{}
	for _, name := range slices.Sorted(maps.Keys(h)) {
		for _, value := range h[name] {
			out = append(out, harPair{name, value})
		}
	}
	return out
}

// bodyText returns a body as text for JSON: in base64 unless it is UTF-8.
func bodyText(data []byte) (text, encoding string) {
	if utf8.Valid(data) {
		return string(data), ""
	}
	return base64.StdEncoding.EncodeToString(data), "base64"
}
