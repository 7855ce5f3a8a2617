package socks

import (
	"context"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/http/httputil"
)

const (
	// maxHeader limits the header of an HTTP request and of its response, in bytes.
	maxHeader = 64 << 10
	// maxIdle limits the conns to targets that wait for the next request for an http URL.
	maxIdle = 64
)

// transport returns the client that sends the requests for http URLs.
func (s *Server) transport() *http.Transport {
	return &http.Transport{
		DialContext: s.dial, DisableCompression: true, MaxResponseHeaderBytes: maxHeader,
		MaxIdleConns: maxIdle, IdleConnTimeout: idleTimeout,
	}
}

// httpServer returns the server of conns that speak HTTP. Its handlers end with ctx.
func (s *Server) httpServer(ctx context.Context, transport http.RoundTripper) *http.Server {
	errors := slog.NewLogLogger(s.log.Handler(), slog.LevelDebug)
	forward := &httputil.ReverseProxy{
		// The request goes to its own URL. ReverseProxy has removed the headers for this proxy.
		Rewrite: func(r *httputil.ProxyRequest) {
			for _, name := range []string{"Forwarded", "X-Forwarded-For", "X-Forwarded-Host", "X-Forwarded-Proto"} {
				if values, ok := r.In.Header[name]; ok {
					r.Out.Header[name] = values
				}
			}
			r.Out.URL.RawQuery = r.In.URL.RawQuery
			if s.cfg.Modify != nil {
				s.cfg.Modify(r.Out)
			}
		},
		Transport:    transport,
		ErrorHandler: func(w http.ResponseWriter, _ *http.Request, err error) { fail(w, err) },
		ErrorLog:     errors,
	}
	handle := func(w http.ResponseWriter, r *http.Request) {
		switch {
		case r.Method == http.MethodConnect && s.admits(w, r):
			s.tunnel(ctx, w, r)
		case r.Method == http.MethodConnect:
		case r.URL.Host == "":
			s.servePath(w, r)
		case !s.admits(w, r):
		case r.URL.Scheme != "http":
			http.Error(w, "this proxy forwards http URLs; use CONNECT for others", http.StatusBadRequest)
		default:
			forward.ServeHTTP(w, r)
		}
	}
	return &http.Server{
		Handler: http.HandlerFunc(handle), ReadHeaderTimeout: s.handshake, IdleTimeout: idleTimeout,
		MaxHeaderBytes: maxHeader, ErrorLog: errors, BaseContext: func(net.Listener) context.Context { return ctx },
	}
}

// servePath answers a request for a path of the proxy itself. Web pages in a browser can send such requests, so only
// Config.Page answers with information.
func (s *Server) servePath(w http.ResponseWriter, r *http.Request) {
	if s.cfg.Page != nil && r.URL.Path == s.cfg.PagePath {
		s.cfg.Page.ServeHTTP(w, r)
		return
	}
	http.Error(w, "this is a proxy, and not a web server", http.StatusForbidden)
}

// admits checks the credentials of a request. If they are wrong, it answers.
func (s *Server) admits(w http.ResponseWriter, r *http.Request) bool {
	as := http.Request{Header: http.Header{"Authorization": r.Header["Proxy-Authorization"]}}
	user, password, _ := as.BasicAuth() // without them, both are empty
	if s.allows(user, password) {
		s.pending.Admit(r)
		return true
	}
	w.Header().Set("Proxy-Authenticate", `Basic realm="kubevpn"`)
	http.Error(w, "this proxy requires its user name and password", http.StatusProxyAuthRequired)
	return false
}

// tunnel serves CONNECT.
func (s *Server) tunnel(ctx context.Context, w http.ResponseWriter, r *http.Request) {
	target, err := s.dial(r.Context(), "tcp", r.Host)
	if err != nil {
		fail(w, err)
		return
	}
	defer target.Close()
	client, buffered, err := http.NewResponseController(w).Hijack()
	if err != nil {
		fail(w, err)
		return
	}
	defer client.Close()
	if _, err := io.WriteString(client, "HTTP/1.1 200 Connection established\r\n\r\n"); err != nil {
		return
	}
	Relay(ctx, client, target, buffered.Reader)
}

// fail answers with the error of a dial.
func fail(w http.ResponseWriter, err error) {
	code := http.StatusBadGateway
	if isTimeout(err) {
		code = http.StatusGatewayTimeout
	}
	http.Error(w, err.Error(), code)
}
