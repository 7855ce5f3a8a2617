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

// body records a body while it passes.
type body struct {
	Body
	limit int
}

func (b *body) add(p []byte) {
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

// cut returns the body with at most limit bytes of data.
func (b Body) cut(limit int) Body {
	if len(b.Data) > limit {
		b.Data = append([]byte(nil), b.Data[:limit]...)
	}
	return b
}

// recording records one exchange, for one or several claims. It takes the place of the server's ResponseWriter, because
// what it writes is what the client gets.
type recording struct {
	http.ResponseWriter
	exchange Exchange
	ends     []recorder
	answer   body
	over     bool

	mu      sync.Mutex // the request's body may be read until after the handler
	request body
}

// recorder receives an Exchange with at most limit bytes of each body.
type recorder struct {
	end   func(*Exchange)
	limit int
}

// record begins to record a request for the claims that want it. It returns nil if none does.
func (c *clientConn) record(w http.ResponseWriter, r *http.Request, t destination, mirrors []*Claim) *recording {
	ends := t.claim.recorder(nil)
	for _, claim := range mirrors {
		ends = claim.recorder(ends)
	}
	if ends == nil {
		return nil
	}
	p := &recording{ResponseWriter: w, ends: ends, exchange: Exchange{
		Flow: c.flow, TLS: c.tls, Proto: r.Proto, Method: r.Method, URI: r.RequestURI, Host: r.Host, Header: r.Header,
		Began: time.Now(), To: t.claim,
	}}
	for _, e := range ends {
		p.answer.limit = max(p.answer.limit, e.limit)
	}
	p.request.limit = p.answer.limit
	if hasBody(r) {
		r.Body = &recordedBody{r.Body, p}
	}
	return p
}

// recorder adds the claim's recorder to others, if the claim wants the request that begins. c may be nil.
func (c *Claim) recorder(others []recorder) []recorder {
	if c == nil || c.Record == nil {
		return others
	}
	if end, limit := c.Record(); end != nil {
		others = append(others, recorder{end, limit})
	}
	return others
}

// Unwrap is for http.ResponseController.
func (p *recording) Unwrap() http.ResponseWriter { return p.ResponseWriter }

func (p *recording) WriteHeader(status int) {
	if status >= http.StatusOK {
		p.answered(status, p.Header())
	}
	p.ResponseWriter.WriteHeader(status)
}

// answered records the head of the answer.
func (p *recording) answered(status int, h http.Header) {
	p.exchange.Status, p.exchange.Answer, p.exchange.Answered = status, maps.Clone(h), time.Now()
}

func (p *recording) Write(b []byte) (int, error) {
	n, err := p.ResponseWriter.Write(b)
	p.answer.add(b[:n])
	return n, err
}

// ReadFrom lets the kernel move the part of a long body that is not recorded.
func (p *recording) ReadFrom(r io.Reader) (int64, error) {
	first, err := io.CopyN(struct{ io.Writer }{p}, r, int64(p.answer.limit-len(p.answer.Data)))
	if err != nil {
		if err == io.EOF {
			err = nil
		}
		return first, err
	}
	rest, err := io.Copy(p.ResponseWriter, r)
	p.answer.Size += rest
	return first + rest, err
}

// recordedBody is the body of a request.
type recordedBody struct {
	io.ReadCloser
	p *recording
}

func (b *recordedBody) Read(p []byte) (int, error) {
	n, err := b.ReadCloser.Read(p)
	b.p.mu.Lock()
	defer b.p.mu.Unlock()
	b.p.request.add(p[:n])
	return n, err
}

// end passes the exchange to the recorders. Only the first call has an effect.
func (p *recording) end() {
	if p.over {
		return
	}
	p.over = true
	p.exchange.Ended = time.Now()
	p.exchange.AnswerBody = p.answer.Body
	p.mu.Lock()
	p.exchange.Body = p.request.Body
	p.request.limit = 0
	p.mu.Unlock()
	if h := p.Header(); p.exchange.Status != 0 && len(h) > len(p.exchange.Answer) {
		p.exchange.Trailer = make(http.Header)
		for name, values := range h {
			if _, known := p.exchange.Answer[name]; !known {
				p.exchange.Trailer[strings.TrimPrefix(name, http.TrailerPrefix)] = values
			}
		}
	}
	for _, r := range p.ends {
		e := p.exchange
		e.Body, e.AnswerBody = e.Body.cut(r.limit), e.AnswerBody.cut(r.limit)
		r.end(&e)
	}
}

// noteEnd records where the request went in the end, and its error, if w records.
func noteEnd(w http.ResponseWriter, t destination, err error) {
	if p, ok := w.(*recording); ok && !p.over {
		p.exchange.To, p.exchange.Err = t.claim, err
	}
}

// noteSwitch records an answer after which the connection is not HTTP, if w records.
func noteSwitch(w http.ResponseWriter, t destination, resp *http.Response) {
	if p, ok := w.(*recording); ok {
		p.answered(resp.StatusCode, resp.Header)
		p.exchange.To = t.claim
		p.end()
	}
}
