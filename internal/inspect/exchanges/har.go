package exchanges

import (
	"cmp"
	"encoding/base64"
	"encoding/json"
	"fmt"
	"io"
	"maps"
	"net/http"
	"net/url"
	"reflect"
	"slices"
	"strings"
	"time"
	"unicode/utf8"

	"kubevpn/internal/api"
	"kubevpn/internal/process/version"
)

// HAR writes exchanges as an HTTP Archive 1.2: one JSON object, entry by entry, so that it keeps none in memory. Fields
// that begin with an underscore are extensions of kubevpn.
type HAR struct {
	w      io.Writer
	before string // what is before the next entry
}

// NewHAR returns a HAR that writes to w. Call Close at the end.
func NewHAR(w io.Writer) *HAR {
	// A version, which is valid as an image tag, needs no escapes of JSON.
	return &HAR{w, fmt.Sprintf(`{"log":{"version":"1.2","creator":{"name":"kubevpn","version":%q},"entries":[`+"\n",
		version.String())}
}

// object is a JSON object of the archive.
type object map[string]any

// with adds members, but for those without a value.
func (o object) with(members object) object {
	for name, value := range members {
		if v := reflect.ValueOf(value); !v.IsZero() && (v.Kind() != reflect.Slice || v.Len() > 0) {
			o[name] = value
		}
	}
	return o
}

// Add writes an exchange, with a comment unless it is empty.
func (h *HAR) Add(e *api.Exchange, comment string) error {
	text, err := json.Marshal(newEntry(e, comment))
	if err != nil {
		return err
	}
	_, err = io.WriteString(h.w, h.before+string(text))
	h.before = ",\n"
	return err
}

// Close ends the object, with a comment, which may be empty.
func (h *HAR) Close(comment string) error {
	text, _ := json.Marshal(comment) // no error: it is a string
	_, err := io.WriteString(h.w, strings.TrimPrefix(h.before, ",")+`],"comment":`+string(text)+"}}\n")
	return err
}

func newEntry(e *api.Exchange, comment string) object {
	const ms = 1000
	h := object{
		"startedDateTime": e.Began.Format(time.RFC3339Nano), "time": e.Seconds * ms, "cache": object{},
		"timings": object{"send": 0, "wait": e.Wait * ms, "receive": (e.Seconds - e.Wait) * ms},
		"request": newRequest(e), "response": newResponse(e), "_destination": e.To,
	}
	return h.with(object{"serverIPAddress": e.Server.Addr(), "_workload": e.Workload, "_pod": e.Pod, "_match": e.Match,
		"_mirrored": e.Mirrored, "_redacted": e.Redacted, "comment": comment})
}

func newRequest(e *api.Exchange) object {
	r, to := &e.Request, target(e)
	cookies := (&http.Request{Header: r.Headers}).Cookies()
	query, _ := url.ParseQuery(to.RawQuery) // without malformed pairs
	h := object{"method": r.Method, "url": to.String(), "httpVersion": r.Proto, "headers": pairs(r.Headers),
		"cookies": cookiePairs(e, "Cookie", cookies), "queryString": pairs(query),
		"headersSize": -1, "bodySize": r.Body.Size}
	if len(r.Body.Data) > 0 {
		h["postData"] = body(r.Headers, r.Body.Data, "_encoding")
	}
	return h
}

// newResponse returns the answer. Without one it has the status 0, as browsers write it.
func newResponse(e *api.Exchange) object {
	r, bodySize := cmp.Or(e.Response, new(api.ExchangeResponse)), int64(-1)
	if e.Response != nil {
		bodySize = r.Body.Size
	}
	cookies := (&http.Response{Header: r.Headers}).Cookies()
	content := body(r.Headers, r.Body.Data, "encoding")
	content["size"] = r.Body.Size
	return object{"status": r.Status, "statusText": http.StatusText(r.Status), "httpVersion": e.Request.Proto,
		"headers": pairs(r.Headers), "cookies": cookiePairs(e, "Set-Cookie", cookies),
		"redirectURL": r.Headers.Get("Location"), "content": content, "headersSize": -1, "bodySize": bodySize,
	}.with(object{"_trailers": pairs(r.Trailers), "_error": e.Error})
}

func pairs(values map[string][]string) []object {
	out := []object{}
	for _, name := range slices.Sorted(maps.Keys(values)) {
		for _, value := range values[name] {
			out = append(out, object{"name": name, "value": value})
		}
	}
	return out
}

// cookiePairs returns the cookies, unless the header from which they are is redacted.
func cookiePairs(e *api.Exchange, header string, cookies []*http.Cookie) []object {
	out := []object{}
	for _, c := range cookies {
		if !slices.Contains(e.Redacted, header) {
			out = append(out, object{"name": c.Name, "value": c.Value})
		}
	}
	return out
}

// body returns a body as text: in base64, which the member with the name encoding says, unless it is UTF-8.
func body(h http.Header, data []byte, encoding string) object {
	b := object{"mimeType": h.Get("Content-Type"), "text": string(data)}
	if !utf8.Valid(data) {
		b["text"], b[encoding] = base64.StdEncoding.EncodeToString(data), "base64"
	}
	return b
}
