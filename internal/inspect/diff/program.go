package diff

import (
	"bytes"
	"cmp"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"maps"
	"net/http"
	"net/netip"
	"net/url"
	"strings"
	"sync"
	"syscall"
	"time"

	"kubevpn/internal/api"
	"kubevpn/internal/inspect/why/trip"
)

// Timeout limits the time of the program for one answer.
const Timeout = 10 * time.Second

// Program is the program of this machine. Its methods are safe for concurrent use.
type Program struct {
	ports map[uint16]api.PortMap // by port of the container
	body  int64                  // bytes of a body that are compared
	plain http.Transport         // HTTP/1 and TLS
	h2c   http.Transport         // HTTP/2 without TLS

	listened sync.Map // the addresses where a program has listened
}

// NewProgram returns the program that listens on the local ports. body is how many bytes of a body are compared.
func NewProgram(ports []api.PortMap, body int) *Program {
	p := &Program{ports: make(map[uint16]api.PortMap, len(ports)), body: int64(body)}
	for _, m := range ports {
		if m.Protocol == "tcp" {
			p.ports[m.Container] = m
		}
	}
	for _, t := range []*http.Transport{&p.plain, &p.h2c} {
		t.DialContext, t.DisableCompression, t.MaxIdleConnsPerHost = trip.Dial, true, workers
		t.IdleConnTimeout, t.Protocols = time.Minute, new(http.Protocols)
		// its certificate is for the names of the cluster, and it runs on this machine
		t.TLSClientConfig = &tls.Config{InsecureSkipVerify: true}
	}
	p.plain.Protocols.SetHTTP1(true)
	p.plain.Protocols.SetHTTP2(true)
	p.h2c.Protocols.SetUnencryptedHTTP2(true)
	return p
}

// Listens returns the first address where a program listens, for people, or "".
func (p *Program) Listens(ctx context.Context) string {
	for _, port := range p.ports {
		if trip.Try(ctx, port.Place()).Done {
			p.listened.Store(port.Place(), true)
			return port.Where()
		}
	}
	return ""
}

// Send is Config.Send. A port that refuses is an answer only once a program has listened on it: a program that listens
// on several ports opens one after the other, or never opens some of them here.
func (p *Program) Send(ctx context.Context, e *api.Exchange) *api.Exchange {
	local := &api.Exchange{Began: time.Now(), Namespace: e.Namespace, Workload: e.Workload, Match: e.Match,
		To: api.ToLaptop, Mirrored: true, Request: e.Request}
	ctx, cancel := context.WithTimeoutCause(ctx, Timeout, fmt.Errorf("no answer within %v", Timeout))
	defer cancel()
	err := p.exchange(ctx, e, local)
	if address := p.ports[e.Server.Port()].Place(); !errors.Is(err, syscall.ECONNREFUSED) {
		p.listened.Store(address, true)
	} else if _, listened := p.listened.Load(address); !listened {
		return nil
	}
	local.Seconds = time.Since(local.Began).Seconds()
	if err == nil {
		return local
	}
	err = cmp.Or(context.Cause(ctx), err)
	local.Response, local.Wait, local.Error = nil, local.Seconds, err.Error()
	return local
}

// exchange sends the request, and stores the answer in local.
func (p *Program) exchange(ctx context.Context, e, local *api.Exchange) error {
	port, known := p.ports[e.Server.Port()]
	if !known {
		return fmt.Errorf("the intercept forwards port %d to no port of this machine", e.Server.Port())
	}
	addr, _ := netip.ParseAddr(cmp.Or(port.Host, "127.0.0.1")) // none for a name
	local.Server = netip.AddrPortFrom(addr, port.Local)
	req, err := request(ctx, e, port.Place())
	if err != nil {
		return err
	}
	transport := &p.plain
	if e.Request.Scheme != "https" && strings.HasPrefix(e.Request.Proto, "HTTP/2") {
		transport = &p.h2c
	}
	resp, err := transport.RoundTrip(req)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	local.Wait = time.Since(local.Began).Seconds()
	data, err := io.ReadAll(io.LimitReader(resp.Body, p.body))
	rest, err2 := io.Copy(io.Discard, resp.Body)
	if err := cmp.Or(err, err2); err != nil {
		return fmt.Errorf("reading the answer: %w", err)
	}
	local.Response = &api.ExchangeResponse{Status: resp.StatusCode, Headers: resp.Header, Trailers: resp.Trailer,
		Body: api.ExchangeBody{Size: int64(len(data)) + rest, Data: data}}
	return nil
}

// request returns the recorded request for an address of this machine.
func request(ctx context.Context, e *api.Exchange, address string) (*http.Request, error) {
	r := &e.Request
	to, err := url.ParseRequestURI(r.Path)
	if err != nil {
		return nil, fmt.Errorf("parsing the path: %w", err)
	}
	to.Scheme, to.Opaque, to.User, to.Host = "http", "", nil, address
	if r.Scheme == "https" {
		to.Scheme = "https"
	}
	req := &http.Request{Method: r.Method, URL: to, Host: r.Host, Header: endToEnd(r.Headers),
		ContentLength: int64(len(r.Body.Data)), Body: http.NoBody}
	if len(r.Body.Data) > 0 {
		req.Body = io.NopCloser(bytes.NewReader(r.Body.Data))
	}
	if _, known := req.Header["User-Agent"]; !known {
		req.Header["User-Agent"] = nil // otherwise net/http adds its own
	}
	return req.WithContext(ctx), nil
}

// endToEnd returns the headers without those of one HTTP connection.
func endToEnd(h http.Header) http.Header {
	out := make(http.Header)
	maps.Copy(out, h)
	for _, value := range h.Values("Connection") {
		for name := range strings.SplitSeq(value, ",") {
			out.Del(strings.TrimSpace(name))
		}
	}
	for _, name := range []string{"Connection", "Content-Length", "Expect", "Http2-Settings", "Keep-Alive",
		"Proxy-Connection", "Te", "Trailer", "Transfer-Encoding", "Upgrade"} {
		out.Del(name)
	}
	return out
}
