//go:build linux || darwin

package platform

import (
	"context"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/miekg/dns"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	k8s "k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/kubernetes/fake"
	clienttesting "k8s.io/client-go/testing"

	"kubevpn/internal/api"
	"kubevpn/internal/incluster/manager"
	"kubevpn/internal/kube/install"
	"kubevpn/internal/testenv"
)

// programVariable names the kubevpn to test. If it is not set, the test builds one.
const programVariable = "KUBEVPN_TEST_PROGRAM"

const (
	image = "registry.test/kubevpn:platform"
	// The ClusterIPs of the pod and of cluster DNS.
	webIP, dnsIP = "10.96.0.20", "10.96.0.10"
	name         = "web.default.svc.cluster.local"
)

// machine is the machine of the test, with a cluster in this process.
type machine struct {
	program string // kubevpn
	env     []string
}

func TestConnectLeavesNothing(t *testing.T) {
	m, ok := newMachine(t)
	if !ok {
		return
	}
	for _, end := range []struct {
		name string
		end  func(*testing.T)
	}{
		{"disconnect", func(t *testing.T) { m.run(t, "disconnect", "--all") }},
		{"quit", func(t *testing.T) { m.run(t, "quit") }},
		{"daemon_is_killed", func(t *testing.T) { m.kill(t, "daemon") }},
		{"helper_is_killed", func(t *testing.T) { m.kill(t, "helper") }},
	} {
		t.Run(end.name, func(t *testing.T) {
			before := networkState(t)
			m.run(t, "connect", "--netstack", "gvisor", "--transport", "port-forward", "--yes")
			for _, host := range []string{name, "web.default", webIP} {
				if out := run(t, nil, "curl", "-sS", "--max-time", "20", "http://"+host+"/"); out != "a pod" {
					t.Errorf("%s: %q", host, out)
				}
			}
			if during := networkState(t); during == before {
				t.Error("connect has changed nothing")
			}
			end.end(t)
			testenv.Until(t, "the network is as before", func() bool { return networkState(t) == before })
			m.run(t, "quit")
		})
	}
}

// newMachine starts a cluster and returns a machine that can connect to it. ok is the result of prepare.
func newMachine(t *testing.T) (m machine, ok bool) {
	t.Helper()
	if !prepare(t) {
		return m, false
	}
	dir := t.TempDir()
	if m.program = os.Getenv(programVariable); m.program == "" {
		m.program = filepath.Join(dir, "kubevpn")
		build := exec.Command("go", "build", "-C", "../..", "-trimpath", "-o", m.program, "./cmd/kubevpn")
		build.Env = append(os.Environ(), "CGO_ENABLED=0")
		if out, err := build.CombinedOutput(); err != nil {
			t.Fatalf("%v\n%s", err, out)
		}
	}
	server := newCluster(t, ownAddress(t))
	m.env = append(os.Environ(), "HOME="+dir, "KUBEVPN_IMAGE="+image, "KUBECONFIG="+server.kubeconfig(t, dir))
	t.Cleanup(func() {
		if t.Failed() {
			m.logs(t)
		}
		_ = exec.Command(m.program, "quit").Run()
	})
	return m, true
}

// ownAddress returns an address of this machine that others could reach.
func ownAddress(t *testing.T) netip.Addr {
	t.Helper()
	addrs, err := net.InterfaceAddrs()
	if err != nil {
		t.Fatal(err)
	}
	for _, a := range addrs {
		if p, err := netip.ParsePrefix(a.String()); err == nil && p.Addr().Is4() && p.Addr().IsGlobalUnicast() {
			return p.Addr()
		}
	}
	t.Fatal("this machine has no IPv4 address besides loopback")
	return netip.Addr{}
}

// newCluster starts a pod, cluster DNS, a traffic manager and an API server.
func newCluster(t *testing.T, own netip.Addr) *apiServer {
	t.Helper()
	l, err := net.Listen("tcp", netip.AddrPortFrom(own, 0).String())
	if err != nil {
		t.Fatal(err)
	}
	web := &http.Server{Handler: http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { io.WriteString(w, "a pod") })}
	go func() { _ = web.Serve(l) }()
	t.Cleanup(func() { web.Close() })
	clientset := fake.NewClientset()
	clientset.PrependReactor("create", "selfsubjectaccessreviews", func(clienttesting.Action) (bool, k8s.Object, error) {
		return true, allowed(), nil
	})
	manifest, err := install.Manifest(install.Options{Image: image})
	if err != nil {
		t.Fatal(err)
	}
	objects, err := decode(manifest)
	if err != nil {
		t.Fatal(err)
	}
	objects = append(objects,
		&corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: "kube-system", UID: "1"}},
		&corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: "default", UID: "2"}},
		managerPod(t),
		service("default", "web", webIP, corev1.ServicePort{Name: "http", Protocol: "TCP", Port: 80}),
		slice("default", "web", own, discoveryv1.EndpointPort{Name: ptr("http"), Protocol: ptr(corev1.ProtocolTCP), Port: portOf(l.Addr())}),
		service("kube-system", "kube-dns", dnsIP,
			corev1.ServicePort{Name: "dns", Protocol: "UDP", Port: 53}, corev1.ServicePort{Name: "dns-tcp", Protocol: "TCP", Port: 53}),
		dnsSlice(t, own),
	)
	for _, o := range objects {
		if err := clientset.Tracker().Add(o); err != nil {
			t.Fatal(err)
		}
	}
	return newAPIServer(t, clientset.Tracker(), startManager(t, clientset))
}

func ptr[T any](v T) *T { return &v }

func portOf(a net.Addr) *int32 {
	p := int32(netip.MustParseAddrPort(a.String()).Port())
	return &p
}

func service(namespace, name, ip string, ports ...corev1.ServicePort) *corev1.Service {
	return &corev1.Service{
		ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: name},
		Spec:       corev1.ServiceSpec{Type: corev1.ServiceTypeClusterIP, ClusterIP: ip, ClusterIPs: []string{ip}, Ports: ports},
	}
}

func slice(namespace, service string, at netip.Addr, ports ...discoveryv1.EndpointPort) *discoveryv1.EndpointSlice {
	return &discoveryv1.EndpointSlice{
		ObjectMeta:  metav1.ObjectMeta{Namespace: namespace, Name: service + "-1", Labels: map[string]string{discoveryv1.LabelServiceName: service}},
		AddressType: discoveryv1.AddressTypeIPv4, Ports: ports,
		Endpoints: []discoveryv1.Endpoint{{Addresses: []string{at.String()}, Conditions: discoveryv1.EndpointConditions{Ready: ptr(true)}}},
	}
}

// dnsSlice starts cluster DNS, which knows one name, and returns its endpoint.
func dnsSlice(t *testing.T, own netip.Addr) *discoveryv1.EndpointSlice {
	t.Helper()
	packets, err := net.ListenPacket("udp", netip.AddrPortFrom(own, 0).String())
	if err != nil {
		t.Fatal(err)
	}
	l, err := net.Listen("tcp", netip.AddrPortFrom(own, 0).String())
	if err != nil {
		t.Fatal(err)
	}
	known := map[string]string{name + ".": webIP, "kube-dns.kube-system.svc.cluster.local.": dnsIP}
	handler := dns.HandlerFunc(func(w dns.ResponseWriter, q *dns.Msg) {
		a := new(dns.Msg).SetReply(q)
		a.Authoritative = true
		ip := known[strings.ToLower(q.Question[0].Name)]
		switch {
		case ip == "":
			a.Rcode = dns.RcodeNameError
		case q.Question[0].Qtype == dns.TypeA:
			a.Answer = []dns.RR{&dns.A{Hdr: dns.RR_Header{Name: q.Question[0].Name, Rrtype: dns.TypeA, Class: dns.ClassINET, Ttl: 5}, A: net.ParseIP(ip)}}
		}
		_ = w.WriteMsg(a)
	})
	for _, s := range []*dns.Server{{PacketConn: packets, Handler: handler}, {Listener: l, Handler: handler}} {
		started := make(chan struct{})
		s.NotifyStartedFunc = func() { close(started) }
		go func() { _ = s.ActivateAndServe() }()
		<-started
		t.Cleanup(func() { _ = s.Shutdown() })
	}
	return slice("kube-system", "kube-dns", own,
		discoveryv1.EndpointPort{Name: ptr("dns"), Protocol: ptr(corev1.ProtocolUDP), Port: portOf(packets.LocalAddr())},
		discoveryv1.EndpointPort{Name: ptr("dns-tcp"), Protocol: ptr(corev1.ProtocolTCP), Port: portOf(l.Addr())})
}

// managerPod returns the pod of the traffic manager, which runs and is ready.
func managerPod(t *testing.T) *corev1.Pod {
	t.Helper()
	return &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Namespace: install.DefaultNamespace, Name: install.ManagerName + "-1",
			Labels: map[string]string{"app.kubernetes.io/name": "kubevpn", "app.kubernetes.io/component": "traffic-manager"}},
		Spec: corev1.PodSpec{Containers: []corev1.Container{{Name: "manager", Image: image}}},
		Status: corev1.PodStatus{Phase: corev1.PodRunning, PodIP: "10.244.0.9",
			ContainerStatuses: []corev1.ContainerStatus{{Name: "manager", Ready: true, State: corev1.ContainerState{Running: &corev1.ContainerStateRunning{}}}},
			Conditions:        []corev1.PodCondition{{Type: corev1.PodReady, Status: corev1.ConditionTrue}}},
	}
}

// startManager starts a traffic manager and returns the address of its sessions.
func startManager(t *testing.T, kube *fake.Clientset) string {
	t.Helper()
	resolvConf := filepath.Join(t.TempDir(), "resolv.conf")
	text := fmt.Sprintf("nameserver %s\nsearch %s.svc.cluster.local svc.cluster.local cluster.local\n", dnsIP, install.DefaultNamespace)
	if err := os.WriteFile(resolvConf, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	// A real manager has fixed ports, which a listener gets only if it requests them.
	sessions := net.JoinHostPort("127.0.0.1", strconv.Itoa(api.ManagerPort))
	health := net.JoinHostPort("127.0.0.1", strconv.Itoa(api.HealthPort))
	m := manager.New(manager.Config{
		Listen: sessions, Health: health, Kube: kube, PodName: install.ManagerName + "-1", Namespace: install.DefaultNamespace,
		NodeName: "node", PodIPs: []netip.Addr{netip.MustParseAddr("10.244.0.9")}, ResolvConf: resolvConf,
		Logger: slog.New(slog.DiscardHandler),
	})
	ctx, cancel := context.WithCancel(context.WithoutCancel(t.Context()))
	ended := make(chan error, 1)
	go func() { ended <- m.Run(ctx) }()
	t.Cleanup(func() {
		cancel()
		if err := <-ended; err != nil {
			t.Error(err)
		}
	})
	return sessions
}

func (m machine) run(t *testing.T, args ...string) string {
	t.Helper()
	return run(t, m.env, m.program, args...)
}

// run runs a program, which must succeed, and returns its output.
func run(t *testing.T, env []string, program string, args ...string) string {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
	defer cancel()
	cmd := exec.CommandContext(ctx, program, args...)
	cmd.Env = env
	var stderr testenv.Buffer
	cmd.Stderr = &stderr
	out, err := cmd.Output()
	if err != nil {
		t.Fatalf("%s %s: %v\n%s", filepath.Base(program), strings.Join(args, " "), err, &stderr)
	}
	return string(out)
}

// kill ends the process of this kubevpn with a role.
func (m machine) kill(t *testing.T, role string) {
	t.Helper()
	for line := range strings.Lines(run(t, nil, "ps", "-axo", "pid=,args=")) {
		pid, args, _ := strings.Cut(strings.TrimSpace(line), " ")
		if n, err := strconv.Atoi(pid); err == nil && strings.HasPrefix(strings.TrimSpace(args), m.program+" "+role) {
			if err := syscall.Kill(n, syscall.SIGKILL); err != nil {
				t.Fatal(err)
			}
			return
		}
	}
	t.Fatalf("no %s of %s runs", role, m.program)
}

func (m machine) logs(t *testing.T) {
	cmd := exec.Command(m.program, "logs")
	cmd.Env = m.env
	out, err := cmd.CombinedOutput()
	t.Logf("kubevpn logs: %v\n%s", err, out)
}
