package interceptor

import (
	"io"
	"maps"
	"net/http"
	"strings"
	"sync"
	"time"
)

// Exchange is one HTTP request that a claim matched, and the answer that the client got. It is immutable once it was
// recorded, with all that it refers to.
type Exchange struct {
	Flow   Flow
	TLS    bool // the interceptor terminated TLS
	Proto  string
	Method string
	URI    string // as the client wrote it
	Host   string

	Header     http.Header
	Body       Body
	Status     int         // 0: the client got no answer
	Answer     http.Header // of the answer
	Trailer    http.Header // of the answer
	AnswerBody Body

	Began, Answered, Ended time.Time // Answered: the head of the answer; zero: none

	To  *Claim // the claim whose target got the request; nil: the application
	Err error  // the error that ended the exchange early
}

// Body is the recorded part of a body.
type Body struct {
	Size int64  // all bytes of the body that passed
	Data []byte // the first bytes
}

// body records a body while it passes. A nil *body records nothing. Its methods may be called concurrently: a request's
// body may be read until after the answer.
type body struct {
	mu sync.Mutex
	Body
	limit int
}

func (b *body) add(p []byte) {
	if b == nil {
		return
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	b.Size += int64(len(p))
	n := min(b.limit-len(b.Data), len(p))
	if n <= 0 {
		return
	}
	if need := len(b.Data) + n; need > cap(b.Data) { // append could take more than the limit
		b.Data = append(make([]byte, 0, min(b.limit, max(need, 2*cap(b.Data)))), b.Data...)
	}
	b.Data = append(b.Data, p[:n]...)
}

// full reports whether only the number of further bytes counts.
func (b *body) full() bool {
	if b == nil {
		return true
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	return len(b.Data) >= b.limit
}

// count adds bytes that were not looked at.
func (b *body) count(n int64) {
	if b != nil {
		b.mu.Lock()
		defer b.mu.Unlock()
		b.Size += n
	}
}

// end returns what was recorded, and records no more.
func (b *body) end() Body {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.limit = 0
	return b.Body
}

// cut returns the body with at most limit bytes of data.
func (b Body) cut(limit int) Body {
	if len(b.Data) > limit {
		b.Data = append([]byte(nil), b.Data[:limit]...)
	}
	return b
}

// recording records one exchange, for one or several claims. A nil *recording records nothing.
type recording struct {
	exchange        Exchange
	ends            []recorder
	request, answer body
	over            bool
}

// recorder receives an Exchange with at most limit bytes of each body.
type recorder struct {
	end   func(*Exchange)
	limit int
}

// record begins to record a request for the claims that want it. It returns nil if none does.
func (c *clientConn) record(r *http.Request, t destination, mirrors []*Claim) *recording {
	var ends []recorder
	most := 0
	for _, claim := range append([]*Claim{t.claim}, mirrors...) {
		if claim == nil || claim.Record == nil {
			continue
		}
		if end, limit := claim.Record(); end != nil {
			ends, most = append(ends, recorder{end, limit}), max(most, limit)
		}
	}
	if ends == nil {
		return nil
	}
	return &recording{ends: ends, request: body{limit: most}, answer: body{limit: most}, exchange: Exchange{
		Flow: c.flow, TLS: c.tls, Proto: r.Proto, Method: r.Method, URI: r.RequestURI, Host: r.Host, Header: r.Header,
		Began: time.Now(), To: t.claim,
	}}
}

// bodies returns the recorded bodies of the request and the answer.
func (p *recording) bodies() (request, answer *body) {
	if p == nil {
		return nil, nil
	}
	return &p.request, &p.answer
}

// answered records the head of the answer.
func (p *recording) answered(status int, h http.Header) {
	if p != nil {
		p.exchange.Status, p.exchange.Answer, p.exchange.Answered = status, maps.Clone(h), time.Now()
	}
}

// note records where the request went in the end, its error, and the trailer of the answer.
func (p *recording) note(t destination, err error, trailer http.Header) {
	if p != nil && !p.over {
		p.exchange.To, p.exchange.Err, p.exchange.Trailer = t.claim, err, trailer
	}
}

// end passes the exchange to the recorders. Only the first call has an effect.
func (p *recording) end() {
	if p == nil || p.over {
		return
	}
	p.over = true
	p.exchange.Ended = time.Now()
	p.exchange.Body, p.exchange.AnswerBody = p.request.end(), p.answer.end()
	for _, r := range p.ends {
		e := p.exchange
		e.Body, e.AnswerBody = e.Body.cut(r.limit), e.AnswerBody.cut(r.limit)
		r.end(&e)
	}
}

// recordedWriter is the server's ResponseWriter of a request that is recorded: what it writes is what the client gets.
type recordedWriter struct {
	http.ResponseWriter
	p *recording
}

// Unwrap is for http.ResponseController.
func (w recordedWriter) Unwrap() http.ResponseWriter { return w.ResponseWriter }

func (w recordedWriter) WriteHeader(status int) {
	if status >= http.StatusOK {
		w.p.answered(status, w.Header())
	}
	w.ResponseWriter.WriteHeader(status)
}

func (w recordedWriter) Write(b []byte) (int, error) {
	n, err := w.ResponseWriter.Write(b)
	w.p.answer.add(b[:n])
	return n, err
}

// trailer returns the headers that were set after those of the answer.
func (w recordedWriter) trailer() http.Header {
	var trailer http.Header
	for name, values := range w.Header() {
		if _, known := w.p.exchange.Answer[name]; !known {
			if trailer == nil {
				trailer = make(http.Header)
			}
			trailer[strings.TrimPrefix(name, http.TrailerPrefix)] = values
		}
	}
	return trailer
}

// recordedBody is the body of a request.
type recordedBody struct {
	io.ReadCloser
	record *body
}

func (b recordedBody) Read(p []byte) (int, error) {
	n, err := b.ReadCloser.Read(p)
	b.record.add(p[:n])
	return n, err
}
