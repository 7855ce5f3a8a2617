//go:build linux

package daemon

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"go.uber.org/goleak"
	"golang.org/x/sys/unix"

	"kubevpn/internal/api"
	"kubevpn/internal/config"
	"kubevpn/internal/kube/client"
	"kubevpn/internal/laptop/connection"
	"kubevpn/internal/laptop/helper/helpertest"
	"kubevpn/internal/laptop/intercept"
	"kubevpn/pkg/wakeup"
)

func TestMain(m *testing.M) {
	// lumberjack never ends the one goroutine that removes old files (natefinch/lumberjack#56); a daemon has one.
	goleak.VerifyTestMain(m, goleak.IgnoreTopFunction("gopkg.in/natefinch/lumberjack%2ev2.(*Logger).millRun"))
}

// fakeHelper records its calls. It passes helpertest.Test.
type fakeHelper struct {
	mu      sync.Mutex
	states  []api.NetworkState
	applied api.NetworkApplied
	err     error // what Apply answers next, once
	marked  []string
	closed  bool
	done    chan struct{}
	changes chan api.NetworkApplied
	once    sync.Once
}

func newFakeHelper() *fakeHelper {
	return &fakeHelper{done: make(chan struct{}), changes: make(chan api.NetworkApplied)}
}

func (h *fakeHelper) Starter() string { return "sudo" }

func (h *fakeHelper) Changes() <-chan api.NetworkApplied { return h.changes }

func (h *fakeHelper) CreateTUN(_ context.Context, name string, _ int) (*os.File, error) {
	if h.isClosed() {
		return nil, errHelperClosed
	}
	fd, err := unix.Open(os.DevNull, unix.O_RDWR|unix.O_CLOEXEC, 0)
	return os.NewFile(uintptr(fd), name), err
}

func (h *fakeHelper) Apply(_ context.Context, s api.NetworkState) (api.NetworkApplied, error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.closed {
		return api.NetworkApplied{}, errHelperClosed
	}
	h.states = append(h.states, s)
	err := h.err
	h.err = nil
	if s.Resolver == nil {
		return api.NetworkApplied{}, err
	}
	return h.applied, err
}

func (h *fakeHelper) MarkedSocket(_ context.Context, network string) (*os.File, error) {
	h.mu.Lock()
	h.marked = append(h.marked, network)
	h.mu.Unlock()
	family := map[byte]int{'4': unix.AF_INET, '6': unix.AF_INET6}[network[len(network)-1]]
	kind := map[string]int{"udp": unix.SOCK_DGRAM, "tcp": unix.SOCK_STREAM}[network[:len(network)-1]]
	fd, err := unix.Socket(family, kind|unix.SOCK_CLOEXEC, 0) // an unknown network has the invalid family 0
	if err != nil {
		return nil, err
	}
	return os.NewFile(uintptr(fd), network), nil
}

func (h *fakeHelper) Done() <-chan struct{} { return h.done }
func (h *fakeHelper) die()                  { h.once.Do(func() { close(h.done) }) }

func (h *fakeHelper) Close() error {
	h.mu.Lock()
	h.closed = true
	h.mu.Unlock()
	h.die()
	return nil
}

func (h *fakeHelper) isClosed() bool {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.closed
}

func TestFakeHelperKeepsTheContract(t *testing.T) {
	helpertest.Test(t, func(*testing.T) helpertest.Helper {
		h := newFakeHelper()
		h.applied = api.NetworkApplied{
			ResolverMode: api.ResolverNFTables, Upstreams: []netip.AddrPort{netip.MustParseAddrPort("192.0.2.1:53")},
		}
		return h
	})
}

func (h *fakeHelper) last() api.NetworkState {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.states[len(h.states)-1]
}

// fakeConnection is connected when the test closes connected, and ends with its context or with an error that the test
// sends.
type fakeConnection struct {
	intercept.Session // nil: nothing dials
	config            connection.Config
	id                string
	connected         chan struct{}
	end               chan error
	begun             chan struct{}
	ended             chan struct{}
	onRun             func(ctx context.Context) error

	mu         sync.Mutex
	namespace  string
	credential *api.Credential
}

func (c *fakeConnection) Cluster() *client.Cluster { return nil }
func (c *fakeConnection) Moved() <-chan struct{}   { return nil }
func (c *fakeConnection) Counters() connection.Counters {
	return connection.Counters{Streams: 2, Dropped: map[string]uint64{"packet_denied": 3}}
}
func (c *fakeConnection) Connected() <-chan struct{} { return c.connected }

func (c *fakeConnection) Run(ctx context.Context) error {
	close(c.begun)
	defer close(c.ended)
	if c.config.Prepared != nil {
		defer c.config.Prepared.Close()
	}
	c.config.Progress(api.Event{Step: "Opening a session"})
	if c.onRun != nil {
		if err := c.onRun(ctx); err != nil {
			return err
		}
	}
	select {
	case err := <-c.end:
		return err
	case <-ctx.Done():
		return ctx.Err()
	}
}

func (c *fakeConnection) Status() api.Connection {
	c.mu.Lock()
	defer c.mu.Unlock()
	s := api.Connection{ID: c.id, Cluster: "cluster-" + c.id, Namespace: c.namespace, Status: api.StatusConnecting}
	if wakeup.IsClosed(c.connected) {
		s.Status, s.DNS.Mode, s.Netstack = api.StatusConnected, api.ResolverResolved, api.NetstackSystem
	}
	return s
}

func (c *fakeConnection) DialFlow(ctx context.Context, network string, addr netip.AddrPort) (net.Conn, error) {
	return c.Dial(ctx, network, addr)
}

func (c *fakeConnection) Inside(netip.Addr) bool { return false }

func (c *fakeConnection) Flows(connection.LocalSockets) []api.Flow {
	return []api.Flow{{Protocol: "udp", Destination: netip.MustParseAddrPort("10.96.0.10:53"), Counted: true, Sent: 40}}
}

func (c *fakeConnection) NameOf(netip.Addr) api.ObjectName {
	return api.ObjectName{Kind: "service", Namespace: "kube-system", Name: "kube-dns"}
}

func (c *fakeConnection) SetNamespace(ns string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.namespace = ns
}

func (c *fakeConnection) SetCredential(credential *api.Credential) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.credential = credential
	return nil
}

func (c *fakeConnection) Keep(context.Context, func(api.Event)) error { return nil }

func (c *fakeConnection) Upgrade(_ context.Context, image string, progress func(api.Event)) error {
	if image == "bad" {
		return api.Errorf(api.ExitImagePull, "no such image")
	}
	progress(api.Event{Step: "Upgrading", Detail: image, Done: true})
	return nil
}

// rig is a daemon with its sockets, and a Factory of fakes.
type rig struct {
	t      *testing.T
	paths  config.Paths
	client *http.Client
	made   chan *fakeConnection                               // those that run, in order
	onRun  func(ctx context.Context, c *fakeConnection) error // what they do first
	result chan error

	intercepts  chan *fakeIntercept // those that run, in order
	onIntercept func(ctx context.Context, i *fakeIntercept) error

	mu      sync.Mutex
	helpers []*fakeHelper
}

// start runs a daemon until the test ends.
func start(t *testing.T, change ...func(*Config)) *rig {
	t.Helper()
	dir, err := os.MkdirTemp("", "kubevpn") // t.TempDir is too long for a socket
	if err != nil {
		t.Fatal(err)
	}
	r := &rig{
		t: t, made: make(chan *fakeConnection, 64), result: make(chan error, 1), intercepts: make(chan *fakeIntercept, 64),
		paths: config.Paths{RuntimeDir: filepath.Join(dir, "run"), StateDir: filepath.Join(dir, "state")},
	}
	transport := &http.Transport{DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
		var d net.Dialer
		return d.DialContext(ctx, "unix", r.paths.Socket())
	}, DisableKeepAlives: true}
	r.client = &http.Client{Transport: transport}
	ready := make(chan struct{})
	cfg := Config{Paths: r.paths, NewHelper: r.newHelper, Factory: r, Ready: func() { close(ready) }}
	for _, f := range change {
		f(&cfg)
	}
	ctx, cancel := context.WithCancel(context.Background())
	go func() { r.result <- Run(ctx, cfg) }()
	t.Cleanup(func() {
		cancel()
		if err := wait(t, r.result, "the daemon's end"); err != nil {
			t.Errorf("Run = %v", err)
		}
		if t.Failed() {
			text, err := os.ReadFile(r.paths.LogFile())
			t.Logf("the daemon's log (%v):\n%s", err, text)
		}
		os.RemoveAll(dir)
	})
	wait(t, ready, "the daemon")
	return r
}

// Identify reads a kubeconfig CLUSTER or CLUSTER/USER.
func (r *rig) Identify(kubeconfig []byte) (client.IDs, error) {
	if string(kubeconfig) == "bad" {
		return client.IDs{}, api.Errorf(api.ExitKubeconfig, "that is no kubeconfig")
	}
	name, _, _ := strings.Cut(string(kubeconfig), "/")
	return client.IDs{Cluster: name, Connection: "id-" + string(kubeconfig)}, nil
}

// Prepare returns what opens connections to nobody.
func (r *rig) Prepare(req api.ConnectRequest, logger *slog.Logger) (*connection.Prepared, error) {
	req.Kubeconfig = []byte(`{"clusters":[{"name":"c","cluster":{"server":"https://127.0.0.1:1"}}],
"contexts":[{"name":"c","context":{"cluster":"c"}}],"current-context":"c"}`)
	return connection.Prepare(req, logger)
}

func (r *rig) NewConnection(cfg connection.Config) (Connection, error) {
	c := &fakeConnection{
		config: cfg, id: "id-" + string(cfg.Request.Kubeconfig), namespace: cfg.Request.Namespace,
		connected: make(chan struct{}), end: make(chan error, 1), begun: make(chan struct{}), ended: make(chan struct{}),
	}
	c.onRun = func(ctx context.Context) error {
		if r.onRun != nil {
			if err := r.onRun(ctx, c); err != nil {
				return err
			}
		}
		r.made <- c
		return nil
	}
	return c, nil
}

func (r *rig) newHelper(socket *os.File, _ *slog.Logger) (Helper, error) {
	if err := socket.Close(); err != nil {
		return nil, err
	}
	h := newFakeHelper()
	r.mu.Lock()
	defer r.mu.Unlock()
	r.helpers = append(r.helpers, h)
	return h, nil
}

func (r *rig) helper(i int) *fakeHelper {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.helpers[i]
}

// handOver passes a descriptor to the daemon as the CLI does, and returns its answer.
func (r *rig) handOver() error {
	r.t.Helper()
	ours, theirs, err := os.Pipe()
	if err != nil {
		r.t.Fatal(err)
	}
	defer ours.Close()
	defer theirs.Close()
	conn, err := net.DialUnix("unix", nil, &net.UnixAddr{Name: r.paths.HelperSocket(), Net: "unix"})
	if err != nil {
		r.t.Fatal(err)
	}
	defer conn.Close()
	if _, _, err := conn.WriteMsgUnix([]byte{0}, unix.UnixRights(int(theirs.Fd())), nil); err != nil {
		r.t.Fatal(err)
	}
	var answer *api.Error
	if err := json.NewDecoder(conn).Decode(&answer); err != nil {
		r.t.Fatal(err)
	}
	if answer == nil {
		return nil
	}
	return answer
}

// call is the answer to a request.
type call struct {
	status int
	events []api.Event
	err    *api.Error // the body of a refusal
}

func (c call) last() api.Event {
	if len(c.events) == 0 {
		return api.Event{}
	}
	return c.events[len(c.events)-1]
}

func (r *rig) post(ctx context.Context, path string, body any) (call, error) {
	b, err := json.Marshal(body)
	if err != nil {
		return call{}, err
	}
	return r.send(ctx, path, bytes.NewReader(b))
}

// send posts a body and reads the whole answer.
func (r *rig) send(ctx context.Context, path string, body io.Reader) (call, error) {
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, "http://daemon"+path, body)
	if err != nil {
		return call{}, err
	}
	resp, err := r.client.Do(req)
	if err != nil {
		return call{}, err
	}
	defer resp.Body.Close()
	c := call{status: resp.StatusCode}
	if resp.StatusCode != http.StatusOK {
		return c, json.NewDecoder(resp.Body).Decode(&c.err)
	}
	lines := bufio.NewScanner(resp.Body)
	for lines.Scan() {
		var e api.Event
		if err := json.Unmarshal(lines.Bytes(), &e); err != nil {
			return c, err
		}
		c.events = append(c.events, e)
	}
	return c, lines.Err()
}

func (r *rig) mustPost(path string, body any) call {
	r.t.Helper()
	c, err := r.post(r.t.Context(), path, body)
	if err != nil {
		r.t.Fatalf("POST %s: %v", path, err)
	}
	return c
}

// goHold is goPost for a request whose body ends with release.
func (r *rig) goHold(path string, body any) (answer <-chan call, release func() error) {
	r.t.Helper()
	text, err := json.Marshal(body)
	if err != nil {
		r.t.Fatal(err)
	}
	content, end := io.Pipe()
	go end.Write(text)
	out := make(chan call, 1)
	go func() {
		c, err := r.send(r.t.Context(), path, content)
		if err != nil {
			r.t.Errorf("POST %s: %v", path, err)
		}
		out <- c
	}()
	return out, end.Close
}

// goPost is post in the background.
func (r *rig) goPost(ctx context.Context, path string, body any) <-chan call {
	out := make(chan call, 1)
	go func() {
		c, err := r.post(ctx, path, body)
		if err != nil && !errors.Is(err, context.Canceled) && !errors.Is(err, io.ErrUnexpectedEOF) {
			r.t.Errorf("POST %s: %v", path, err)
		}
		out <- c
	}()
	return out
}

// connect makes a connection, and passes a helper to the daemon if it has none.
func (r *rig) connect(name string) *fakeConnection {
	r.t.Helper()
	if r.whole().Helper == "" {
		if err := r.handOver(); err != nil {
			r.t.Fatal(err)
		}
	}
	answer := r.goPost(r.t.Context(), api.PathConnect, request(name))
	c := wait(r.t, r.made, "the connection")
	close(c.connected)
	if got := wait(r.t, answer, "the answer").last(); got.Connection == nil || got.Connection.Status != api.StatusConnected {
		r.t.Fatalf("last event = %+v, want a connection", got)
	}
	return c
}

func request(name string) api.ConnectRequest {
	return api.ConnectRequest{Kubeconfig: []byte(name), Context: "ctx-" + name, Namespace: "default", ConnectSettings: api.ConnectSettings{Scheduler: "rr"},
		Settings: []api.Setting{{Key: "scheduler", Value: "rr", Origin: api.OriginDefault}}}
}

func fetch[T any](r *rig, path string) T {
	r.t.Helper()
	resp, err := r.client.Get("http://daemon" + path)
	if err != nil {
		r.t.Fatal(err)
	}
	defer resp.Body.Close()
	var v T
	if err := json.NewDecoder(resp.Body).Decode(&v); err != nil {
		r.t.Fatal(err)
	}
	return v
}

func (r *rig) status() []api.Connection { return r.whole().Connections }
func (r *rig) whole() api.Status        { return fetch[api.Status](r, api.PathStatus) }

// wait receives from c, or fails the test.
func wait[T any](t *testing.T, c <-chan T, what string) T {
	t.Helper()
	select {
	case v := <-c:
		return v
	case <-time.After(10 * time.Second):
		t.Fatalf("waited 10 s for %s", what)
		panic("unreachable")
	}
}

func discard() *slog.Logger { return slog.New(slog.DiscardHandler) }
