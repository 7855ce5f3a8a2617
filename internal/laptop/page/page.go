// Package page serves the page of `kubevpn ui` to browsers of this user, on a loopback address. Any program and any web
// site that a browser shows can send requests to that address, so each request must pass these checks:
//
//	Host is the listener's address     a name that an attacker resolves to 127.0.0.1 (DNS rebinding) is refused
//	Origin, Sec-Fetch-Site             another site is refused, also one on another port of this machine
//	Authorization: Bearer TOKEN        for all of /api/: other users of this machine do not know the token
//
// The token is in the fragment of the URL, which a browser sends to nobody. A cookie would not do: browsers send the
// cookies of 127.0.0.1 to all of its ports, so also to servers of other users.
package page

import (
	"context"
	"crypto/rand"
	"crypto/subtle"
	"embed"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"path"
	"strings"
	"time"

	"kubevpn/internal/api"
	"kubevpn/pkg/wire/authlistener"
)

//go:embed assets
var assets embed.FS

// maxConns limits the conns that have not shown the token: other users can neither use up the daemon's file descriptors
// nor keep the browser out.
const maxConns = 128

// Server serves the page. Its methods are safe for concurrent use.
type Server struct {
	address string // 127.0.0.1:PORT
	token   string
	api     http.Handler
	server  *http.Server
	conns   authlistener.Bound // without the token yet
	ended   chan struct{}
}

// Listen serves the page on a free port of 127.0.0.1 until Close. The handler gets the requests below /api/, without
// that prefix, that a page with the token sent.
func Listen(handler http.Handler, logger *slog.Logger) (*Server, error) {
	var token [32]byte
	if _, err := rand.Read(token[:]); err != nil {
		return nil, fmt.Errorf("cannot make a token for the page: %w", err)
	}
	var config net.ListenConfig
	listener, err := config.Listen(context.Background(), "tcp4", "127.0.0.1:0")
	if err != nil {
		return nil, fmt.Errorf("cannot listen on a loopback address for the page: %w", err)
	}
	s := &Server{
		address: listener.Addr().String(), token: base64.RawURLEncoding.EncodeToString(token[:]),
		api: http.StripPrefix("/api", handler), ended: make(chan struct{}),
		conns: authlistener.Bound{Max: maxConns},
	}
	s.server = &http.Server{
		Handler: http.HandlerFunc(s.serve), ReadHeaderTimeout: 10 * time.Second, IdleTimeout: time.Minute,
		MaxHeaderBytes: 16 << 10, ErrorLog: slog.NewLogLogger(logger.Handler(), slog.LevelDebug),
		ConnState: s.conns.ConnState,
	}
	go func() {
		defer close(s.ended)
		if err := s.server.Serve(listener); !errors.Is(err, http.ErrServerClosed) {
			logger.Warn("the page ended", "err", err)
		}
	}()
	return s, nil
}

// URL returns the URL of the page, with its token.
func (s *Server) URL() string { return "http://" + s.address + "/#token=" + s.token }

// Close ends the page and the requests in progress.
func (s *Server) Close() {
	s.server.Close() // its only error is that of the listener, which nobody uses again
	<-s.ended
}

// headers are part of each response.
var headers = map[string]string{
	"Cache-Control": "no-store",
	"Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; " +
		"connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; " +
		"require-trusted-types-for 'script'; trusted-types 'none'",
	"Cross-Origin-Opener-Policy":   "same-origin",
	"Cross-Origin-Resource-Policy": "same-origin",
	"Referrer-Policy":              "no-referrer",
	"X-Content-Type-Options":       "nosniff",
	"X-Frame-Options":              "DENY",
}

func (s *Server) serve(w http.ResponseWriter, r *http.Request) {
	for name, value := range headers {
		w.Header().Set(name, value)
	}
	switch {
	case r.Host != s.address:
		refuse(w, http.StatusMisdirectedRequest, "this is not the address of the page")
	case !s.sameOrigin(r):
		refuse(w, http.StatusForbidden, "another site may not read the page")
	case !strings.HasPrefix(r.URL.Path, "/api/"):
		serveAsset(w, r)
	case !s.authorized(r):
		refuse(w, http.StatusUnauthorized, "the token of the page is missing or wrong")
	default:
		s.conns.Admit(r)
		s.api.ServeHTTP(w, r)
	}
}

// sameOrigin reports whether no other site sent the request. A link, a bookmark or the file of api.Page may open the
// page itself, which is the same for everybody.
func (s *Server) sameOrigin(r *http.Request) bool {
	for _, origin := range r.Header.Values("Origin") {
		if origin != "http://"+s.address {
			return false
		}
	}
	switch r.Header.Get("Sec-Fetch-Site") {
	case "", "same-origin": // "": not a browser, or one that sends Origin only
		return true
	}
	return r.Method == http.MethodGet && r.URL.Path == "/" && r.Header.Get("Sec-Fetch-Mode") == "navigate" &&
		r.Header.Get("Sec-Fetch-Dest") == "document"
}

func (s *Server) authorized(r *http.Request) bool {
	token, found := strings.CutPrefix(r.Header.Get("Authorization"), "Bearer ")
	return found && subtle.ConstantTimeCompare([]byte(token), []byte(s.token)) == 1
}

// refuse answers an error as the daemon does.
func refuse(w http.ResponseWriter, status int, text string) {
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(status)
	// An error means that the client has gone.
	_ = json.NewEncoder(w).Encode(api.Errorf(api.ExitUsage, "%s", text).
		WithHint("open the URL that `kubevpn ui` prints"))
}

// types are the media types of the assets. Those of package mime depend on the machine.
var types = map[string]string{
	".css": "text/css", ".html": "text/html", ".js": "text/javascript", ".svg": "image/svg+xml",
}

func serveAsset(w http.ResponseWriter, r *http.Request) {
	if r.Method != http.MethodGet && r.Method != http.MethodHead {
		refuse(w, http.StatusMethodNotAllowed, "the page can only be read")
		return
	}
	name := strings.TrimPrefix(r.URL.Path, "/")
	if name == "" {
		name = "index.html"
	}
	content, err := assets.ReadFile("assets/" + name)
	if err != nil {
		refuse(w, http.StatusNotFound, "the page has no such file")
		return
	}
	w.Header().Set("Content-Type", types[path.Ext(name)]+"; charset=utf-8")
	_, _ = w.Write(content) // an error means that the client has gone
}
