package session

import (
	"context"
	"log/slog"
	"net/netip"
	"slices"
	"sync"

	"k8s.io/client-go/kubernetes"

	"kubevpn/internal/incluster/dial"
	"kubevpn/internal/incluster/manager/router"
	"kubevpn/internal/incluster/manager/watch"
	"kubevpn/pkg/wire/transport"
)

// Config configures a Server.
type Config struct {
	PodName   string
	Kube      kubernetes.Interface // for Authorize
	Authorize bool                 // the Server asks who uses a laptop
	Limited   bool                 // an admin limits what laptops reach: laptops use the gvisor netstack
	Dialer    *dial.Dialer
	Router    *router.Router
	Watch     *watch.Publisher
	Logger    *slog.Logger
}

// Server serves the sessions of all laptops. Methods are safe for concurrent use.
type Server struct {
	cfg       Config
	Proxy     *ProxyPort                     // nil: none; set before the first session
	PodRoutes func() ([]netip.Prefix, error) // the pod's

	mu       sync.Mutex
	sessions map[*transport.Session]struct{}
	past     transport.Traffic // of sessions that have ended
}

// New returns a server without sessions.
func New(cfg Config) *Server {
	return &Server{cfg: cfg, PodRoutes: router.PodRoutes, sessions: make(map[*transport.Session]struct{})}
}

// Serve serves a session until it or ctx ends (transport.ServerConfig.OnSession).
func (s *Server) Serve(ctx context.Context, laptop *transport.Session) {
	s.mu.Lock()
	s.sessions[laptop] = struct{}{}
	s.mu.Unlock()
	s.cfg.Watch.Changed()
	s.cfg.Watch.Recheck()
	newSession(s, laptop).serve(ctx)
	s.mu.Lock()
	delete(s.sessions, laptop)
	addTraffic(&s.past, laptop)
	s.mu.Unlock()
	s.cfg.Watch.Changed()
}

// Traffic returns the number of sessions, including those that wait for a conn, and the bytes of all sessions,
// including those that have ended.
func (s *Server) Traffic() (sessions int, total transport.Traffic) {
	s.mu.Lock()
	defer s.mu.Unlock()
	total = s.past
	for laptop := range s.sessions {
		addTraffic(&total, laptop)
	}
	return len(s.sessions), total
}

// addTraffic adds the bytes that a session has carried.
func addTraffic(t *transport.Traffic, s *transport.Session) {
	for _, l := range s.Stats().Links {
		t.Sent += l.Sent
		t.Received += l.Received
	}
}

// Laptops returns the number of laptops that are connected now, without those whose session waits for a conn.
func (s *Server) Laptops() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	n := 0
	for laptop := range s.sessions {
		if laptop.Attached() {
			n++
		}
	}
	return n
}

// around returns the known networks that an inner network must not overlap.
func (s *Server) around() []netip.Prefix {
	now := s.cfg.Watch.Notices.Load()
	prefixes := slices.Concat(now.State.PodCIDRs, now.State.ServiceCIDRs)
	for _, addr := range s.cfg.Watch.Self.Addrs {
		prefixes = append(prefixes, netip.PrefixFrom(addr, addr.BitLen()))
	}
	routes, err := s.PodRoutes()
	if err != nil {
		s.cfg.Logger.Warn("cannot read the pod's routes, so inner networks may overlap them", "err", err)
	}
	return append(prefixes, routes...)
}
