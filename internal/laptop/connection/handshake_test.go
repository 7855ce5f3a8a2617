package connection

import (
	"context"
	"encoding/json"
	"errors"
	"log/slog"
	"net"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/kubernetes/fake"
	k8stesting "k8s.io/client-go/testing"

	"kubevpn/internal/api"
	"kubevpn/internal/kube/client"
	"kubevpn/internal/testenv"
	"kubevpn/pkg/protocol/dns"
	"kubevpn/pkg/wire/transport"
	"kubevpn/pkg/wire/transport/transporttest"
)

// kubeconfig is of a cluster that no test dials.
const kubeconfig = `{"clusters":[{"name":"c","cluster":{"server":"https://127.0.0.1:1"}}],
"contexts":[{"name":"c","context":{"cluster":"c"}}],"current-context":"c"}`

// newTestConnection returns a Connection that has done nothing yet.
func newTestConnection(t *testing.T) *Connection {
	t.Helper()
	c, err := client.Load([]byte(kubeconfig), client.Options{})
	if err != nil {
		t.Fatal(err)
	}
	log := slog.New(slog.DiscardHandler)
	return newConnection(Config{
		Progress: func(api.Event) {}, Logger: log, Network: new(quiet), Prepared: newPrepared(api.ConnectRequest{}, c, log),
	})
}

// greet publishes a hello of the manager in pod.
func (c *Connection) greet(pod string) {
	c.view.Update(func(v *view) { v.hello = &api.ManagerHello{Pod: pod} })
}

// hasGateway publishes a gateway, and chooses a netstack.
func (c *Connection) hasGateway(g api.Gateway, netstack string) {
	c.handshake.learn(api.ManagerState{Gateway: &g})
	c.chooser.adopt(decision{Netstack: netstack})
}

// manage is a traffic manager at the other end of a listener, whose part in a session is talk.
func manage(ctx context.Context, l net.Listener, talk func(ctx context.Context, ts *transport.Session, control *transport.Stream)) error {
	return transport.NewServer(transport.ServerConfig{OnSession: func(ctx context.Context, ts *transport.Session) {
		in, err := ts.Accept(ctx)
		if err != nil {
			return
		}
		if control, err := in.Accept(); err == nil {
			talk(ctx, ts, control)
		}
	}}).Serve(ctx, l)
}

// A pod on a dead node never refuses the dial, so dialPod must start looking for another pod before its deadline.
func TestDialPodLeavesADeadNode(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		forward := func(ctx context.Context, pod string) (net.Conn, error) {
			if pod == "old" {
				<-ctx.Done()
				return nil, ctx.Err()
			}
			near, _ := net.Pipe()
			return near, nil
		}
		find := func(ctx context.Context) (string, error) { return "new", ctx.Err() }
		ctx, cancel := context.WithTimeout(t.Context(), dialTimeout)
		defer cancel()
		conn, pod, err := dialPod(ctx, "old", forward, find)
		if err != nil || pod != "new" {
			t.Fatalf("got pod %q, %v", pod, err)
		}
		conn.Close()
	})
}

func TestDialPodReturnsTheErrorOfTheOnlyPod(t *testing.T) {
	refused := errors.New("refused")
	conn, pod, err := dialPod(t.Context(), "it", func(context.Context, string) (net.Conn, error) { return nil, refused },
		func(context.Context) (string, error) { return "it", nil })
	if conn != nil || pod != "it" || err != refused {
		t.Errorf("got %v, %q, %v", conn, pod, err)
	}
}

// A manager that rejects the laptop sends the reason and ends the session. The end must not hide the reason, or the
// laptop would retry forever.
func TestRejectionOutlivesItsSession(t *testing.T) {
	for range 20 {
		s := newTestConnection(t)
		refused := make(chan error, 1)
		s.handshake.refuse = func(err error) { refused <- err }
		listener := transporttest.NewListener()
		refuse := func(_ context.Context, ts *transport.Session, control *transport.Stream) {
			json.NewDecoder(control).Decode(new(api.ClientHello))
			json.NewEncoder(control).Encode(api.ControlMessage{Error: api.Errorf(api.ExitUsage, "no")})
			ts.Close()
		}
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan struct{}, 2)
		go func() { manage(ctx, listener, refuse); done <- struct{}{} }()
		client := transport.NewClient(transport.ClientConfig{Dial: listener.Dial, Links: 1, BackoffMin: time.Hour, BackoffMax: time.Hour, OnSession: s.handshake.onSession})
		go func() { client.Run(ctx); done <- struct{}{} }()
		if e := api.AsError(<-refused); e == nil || e.Message != "no" {
			t.Errorf("got %v", e)
		}
		cancel()
		<-done
		<-done
		if t.Failed() {
			return
		}
	}
}

// A goroutine that waits for another manager's pod wakes when that manager sends its hello.
func TestHelloWakesWaiters(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newTestConnection(t)
		s.status.establish()
		s.cfg.Network = &still{}
		listener := transporttest.NewListener()
		const timeout = 1234567 * time.Microsecond // of the managers, before they greet
		lease := api.Lease{Addrs: addrs("198.19.4.9"), Networks: prefixes("198.19.0.0/16"), Resolver: addrs("198.19.0.53")[0]}
		pods := make(chan string, 2)
		pods <- "old"
		pods <- "new"
		greet := func(ctx context.Context, _ *transport.Session, control *transport.Stream) {
			time.Sleep(timeout)
			if err := json.NewEncoder(control).Encode(api.ControlMessage{Hello: &api.ManagerHello{Protocol: api.Protocol, Pod: <-pods, Lease: lease}}); err != nil {
				t.Error(err)
			}
			<-ctx.Done()
		}
		ctx, cancel := context.WithCancel(t.Context())
		var wg sync.WaitGroup
		defer wg.Wait()
		defer cancel()
		wg.Go(func() { manage(ctx, listener, greet) })
		client := transport.NewClient(transport.ClientConfig{Dial: listener.Dial, Links: 1, OnSession: s.handshake.onSession, OnState: s.onState})
		began := time.Now()
		wg.Go(func() { client.Run(ctx) })
		if err := s.manager.await(ctx, "old"); err != nil {
			t.Fatal(err)
		}
		if took := time.Since(began); took != timeout {
			t.Errorf("woken after %v, want %v", took, timeout)
		}
		if err := s.current.now().Close(); err != nil {
			t.Fatal(err)
		}
		if err := s.manager.await(ctx, "new"); err != nil {
			t.Fatal(err)
		}
		if c := s.Status(); c.Status != api.StatusConnected || c.ManagerPod != "new" {
			t.Errorf("status %s, pod %s", c.Status, c.ManagerPod)
		}
		bounded, cancel := context.WithTimeout(ctx, time.Second)
		defer cancel()
		if err := s.manager.await(bounded, "old"); !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("waiting for one that is gone: %v", err)
		}
	})
}

// The laptop rejects a lease in a network that another connection has just reserved, and its next hello excludes it.
func TestReservedLeaseIsRejected(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newTestConnection(t)
		s.status.establish()
		s.cfg.Network = &still{others: prefixes("198.19.0.0/16 fd4e::/48")}
		listener := transporttest.NewListener()
		leases := make(chan api.Lease, 2)
		leases <- api.Lease{Addrs: addrs("198.19.4.9"), Networks: prefixes("198.19.0.0/16"), Resolver: addrs("198.19.0.53")[0]}
		leases <- api.Lease{Addrs: addrs("198.18.4.9"), Networks: prefixes("198.18.0.0/16"), Resolver: addrs("198.18.0.53")[0]}
		heard := make(chan api.ClientHello, 2)
		greet := func(ctx context.Context, _ *transport.Session, control *transport.Stream) {
			var hello api.ClientHello
			err := json.NewDecoder(control).Decode(&hello)
			if err == nil {
				heard <- hello
				err = json.NewEncoder(control).Encode(api.ControlMessage{Hello: &api.ManagerHello{Protocol: api.Protocol, Pod: "m-1", Lease: <-leases}})
			}
			if err != nil {
				t.Error(err)
			}
			<-ctx.Done()
		}
		ctx, cancel := context.WithCancel(t.Context())
		var wg sync.WaitGroup
		defer wg.Wait()
		defer cancel()
		wg.Go(func() { manage(ctx, listener, greet) })
		client := transport.NewClient(transport.ClientConfig{Dial: listener.Dial, Links: 1, OnSession: s.handshake.onSession, OnState: s.onState})
		wg.Go(func() { client.Run(ctx) })
		if err := s.manager.await(ctx, "m-1"); err != nil {
			t.Fatal(err)
		}
		if got := s.view.Load().lease.Addrs; got[0] != addrs("198.18.4.9")[0] {
			t.Errorf("the address is %v", got)
		}
		first, second := <-heard, <-heard
		for _, p := range prefixes("198.19.0.0/16 fd4e::/48") {
			if slices.Contains(first.Avoid, p) || !slices.Contains(second.Avoid, p) {
				t.Errorf("it avoids %v, then %v", first.Avoid, second.Avoid)
			}
		}
		if len(second.Lease) != 0 {
			t.Errorf("it wants to keep %v, which it never had", second.Lease)
		}
	})
}

// The wait for a manager in another pod ends only when packets can flow, or when they never will.
func TestUpgradeWaitsForTheGateway(t *testing.T) {
	refusal := api.Errorf(api.ExitNetstack, "no gateway")
	for _, tt := range []struct {
		name   string
		fails  bool
		before func(*report) // what is not yet enough
	}{
		{"gateway", false, func(r *report) { r.greeted = true }},
		{"greeting", false, func(r *report) { r.gateway = true }},
		{"never", true, func(r *report) { r.greeted = true }},
	} {
		t.Run(tt.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				s := newTestConnection(t)
				s.status.establish()
				s.greet("new")
				s.status.change(func(r *report) {
					r.shown.Netstack, r.attached = api.NetstackSystem, true
					tt.before(r)
				})
				waited := make(chan error, 1)
				go func() { waited <- s.manager.await(t.Context(), "new") }()
				synctest.Wait()
				select {
				case err := <-waited:
					t.Fatalf("it did not wait: %v, %+v", err, s.Status())
				default:
				}
				s.status.change(func(r *report) {
					r.greeted, r.gateway = true, true
					if tt.fails {
						r.shown.Status, r.shown.Error = api.StatusFailed, refusal
					}
				})
				if err := <-waited; tt.fails != errors.Is(err, refusal) || !tt.fails && err != nil {
					t.Errorf("got %v", err)
				}
			})
		})
	}
}

func TestNamesFollowTheNamespace(t *testing.T) {
	s := newTestConnection(t)
	service := func(namespace string) *corev1.Service {
		return &corev1.Service{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: "web"}}
	}
	kube := fake.NewClientset(service("team-one"), service("team-two"))
	kube.PrependReactor("list", "services", func(a k8stesting.Action) (bool, runtime.Object, error) {
		return a.GetNamespace() == "forbidden", nil,
			apierrors.NewForbidden(corev1.Resource("services"), "", errors.New("no"))
	})
	s.SetNamespace("team-one")
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error)
	go func() { ended <- s.followNames(ctx, kube) }()
	for _, namespace := range []string{"team-one", "forbidden", "team-two"} {
		s.SetNamespace(namespace)
		if namespace == "forbidden" {
			warned := func(r report) bool { return len(r.shown.Warnings) > 0 }
			if r, err := s.status.report.Await(ctx, warned); err != nil ||
				!strings.HasPrefix(r.shown.Warnings[0], "Services in forbidden have no short names: ") {
				t.Fatalf("warnings %q, %v", r.shown.Warnings, err)
			}
			continue
		}
		testenv.Until(t, "the names of "+namespace+" are known", func() bool {
			return slices.Equal(s.names.matchable(), []string{namespace})
		})
	}
	cancel()
	if err := <-ended; !errors.Is(err, context.Canceled) {
		t.Errorf("ended with %v", err)
	}
}

// still is a machine that accepts and counts every change.
type still struct {
	Network
	links, zones int
	others       []netip.Prefix // that other connections have reserved
}

func (n *still) Others() []api.Link { return nil }

func (n *still) Reserve(networks []netip.Prefix) []netip.Prefix {
	for _, p := range networks {
		if slices.ContainsFunc(n.others, p.Overlaps) {
			return n.others
		}
	}
	return nil
}

func (n *still) SetLink(context.Context, api.Link) (api.NetworkApplied, error) {
	n.links++
	return api.NetworkApplied{}, nil
}

func (n *still) SetZone(*dns.Zone) error {
	n.zones++
	return nil
}

func TestNamespaceThatTheManagerDoesNotWatchIsNamed(t *testing.T) {
	s := newTestConnection(t)
	s.cfg.Network = &still{}
	state := api.ManagerState{DNSDomain: "cluster.local", DNSServers: []netip.Addr{netip.MustParseAddr("10.96.0.10")},
		ResolvesVIPs: true, Namespaces: []string{"billing"}}
	for _, namespace := range []string{"billing", "shop"} {
		s.SetNamespace(namespace)
		if err := s.routes.zone.set(state, nil); err != nil {
			t.Fatal(err)
		}
	}
	want := []string{"short names of Services in shop may not resolve, because the traffic manager does not watch " +
		"that namespace: use NAME.shop.svc"}
	if got := s.Status().Warnings; !slices.Equal(got, want) {
		t.Errorf("the warnings are %q, want %q", got, want)
	}
}

// A guess inside of a network that Nodes or ServiceCIDRs state is not the end of that network.
func TestOnlyGuessesOutsideOfStatedNetworksMayBeLarger(t *testing.T) {
	guess := func(prefix string, source client.Source) client.CIDR {
		return client.CIDR{Prefix: netip.MustParsePrefix(prefix), Source: source}
	}
	own := client.CIDRs{
		Pods:     []client.CIDR{guess("10.244.1.0/24", client.FromPods), guess("10.20.1.0/24", client.FromPods)},
		Services: []client.CIDR{guess("10.96.7.0/24", client.FromServices), guess("10.97.0.0/16", client.FromServiceCIDR)},
	}
	state := api.ManagerState{StatedPodCIDRs: prefixes("10.244.0.0/16"), StatedServiceCIDRs: prefixes("10.96.0.0/16")}
	if got, want := guesses(own, state), own.Pods[1:]; !slices.Equal(got, want) {
		t.Errorf("got %v, want %v", got, want)
	}
}

// The status shows a right that the manager gets later, although nothing changes on the machine.
func TestStatusFollowsTheManagersRights(t *testing.T) {
	s := newTestConnection(t)
	machine := &still{}
	s.cfg.Network = machine
	state := api.ManagerState{DNSDomain: "cluster.local", DNSServers: []netip.Addr{netip.MustParseAddr("10.96.0.10")}, Missing: []string{"list services"}}
	for _, tt := range []struct {
		want string
		next func() // changes the state for the next one
	}{
		{"dialed as they are: the traffic manager lacks list services",
			func() { state.ResolvesVIPs, state.Namespaces = true, []string{"billing", "shop"} }},
		{"resolved by kubevpn in billing, shop; dialed as they are in other namespaces; the traffic manager lacks " +
			"list services", func() { state.Missing = nil }},
		{"resolved by kubevpn in billing, shop; dialed as they are in other namespaces", func() { state.Namespaces = nil }},
		{"resolved by kubevpn", func() {}},
	} {
		s.handshake.handle(api.ControlMessage{State: &state})
		if err := s.routes.apply(t.Context(), planned{}); err != nil {
			t.Fatal(err)
		}
		if got := s.Status().Services; got != tt.want {
			t.Errorf("status says %q, want %q", got, tt.want)
		}
		tt.next()
	}
	if machine.links != 1 || machine.zones != 1 {
		t.Errorf("the link was set %d times, the zone %d times", machine.links, machine.zones)
	}
}

// Cluster DNS may move within a network that is routed already: queries and the status follow it.
func TestStatusNamesTheServersOfClusterDNS(t *testing.T) {
	s := newTestConnection(t)
	machine := &still{}
	s.cfg.Network = machine
	for _, server := range []string{"10.96.0.10", "10.96.0.11"} {
		state := api.ManagerState{DNSDomain: "cluster.local", DNSServers: addrs(server)}
		s.handshake.handle(api.ControlMessage{State: &state})
		if err := s.routes.apply(t.Context(), planned{Routes: prefixes("10.96.0.0/16")}); err != nil {
			t.Fatal(err)
		}
		if got := s.Status().DNS.Servers; !slices.Equal(got, state.DNSServers) {
			t.Errorf("status shows the servers %v, want %v", got, state.DNSServers)
		}
	}
	if machine.links != 1 {
		t.Errorf("the link was set %d times", machine.links)
	}
}
