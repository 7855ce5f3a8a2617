//go:build e2e && linux

package e2e

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"kubevpn/internal/testenv"
	"kubevpn/test/lab"
)

// The limits are three times what kubevpn aims at, for a busy machine. Tests log how long it took.
const (
	requestAgain = 3 * time.Second         // a new request, after a new route
	flowAgain    = 4500 * time.Millisecond // a flow that was open before
	managerAgain = 9 * time.Second         // a new request, if the manager's pod was replaced too
	wakeAgain    = 6 * time.Second         // a new request, after sleep

	// wholeFlow is the number of blocks of the flow that all changes leave whole: 100 MB.
	wholeFlow = 100_000_000 / flowBlock
)

// roamingSuite changes the laptop's network under an open flow. Two links lead to the router, a cable (eth0) and Wi-Fi
// (wlan0). The router accepts only the addresses that it gave out on each, as an access point does.
func roamingSuite(t *testing.T, w *world) {
	r := newRoamer(t, w)
	r.connect(t)
	r.server = net.JoinHostPort(w.clusterIP(t, "default", "web"), "80")
	r.flow = r.startPaced(t, net.JoinHostPort(w.clusterIP(t, "default", "web"), "9001"), 250*time.Microsecond)
	r.works(t, requestAgain, flowAgain)

	t.Run("new_address", r.newAddress)
	t.Run("another_gateway", r.anotherGateway)
	t.Run("no_route_for_a_while", r.noRoute)
	t.Run("cable_to_wifi", r.cableToWifi)
	t.Run("wifi_to_cable_while_both_are_up", r.wifiToCable)
	t.Run("ipv4_to_ipv6", r.ipv4ToIPv6)
	t.Run("sleep_and_another_address", r.sleep)
	t.Run("captive_portal", r.captivePortal)
	t.Run("flow_is_whole", func(t *testing.T) {
		r.flow.rush.Store(true)
		testenv.Eventually(t, time.Minute, func() error {
			if n := r.flow.seen.Load(); n < wholeFlow {
				return fmt.Errorf("%d blocks of %d came back", n, wholeFlow)
			}
			return nil
		})
		t.Logf("%d MB", r.flow.seen.Load()*flowBlock/1e6)
		r.flow.finish(t)
	})
	t.Run("another_manager_and_new_address", func(t *testing.T) { r.anotherManager(t, false) })
	t.Run("another_manager_during_sleep", func(t *testing.T) { r.anotherManager(t, true) })
}

// roamer is a laptop whose network changes.
type roamer struct {
	*laptop
	v4, v6 lab.Family
	flow   *flow  // nil: none is open
	host   int    // the last byte of the cable's address
	server string // a Service that answers HTTP
}

// The addresses of the second link.
const (
	wifiGateway = "10.95.0.1"
	wifiLaptop  = "10.95.0.2"
)

// newRoamer adds the second link, and names the API server api.outside.test. Both end with the test.
func newRoamer(t *testing.T, w *world) *roamer {
	families := w.Config().Families()
	r := &roamer{laptop: w.newLaptop(t, lab.Admin), v4: families[0], v6: families[1], host: 2}
	admin, err := os.ReadFile(r.kubeconfig)
	if err != nil {
		t.Fatal(err)
	}
	r.kubeconfig = filepath.Join(t.TempDir(), "kubeconfig")
	named := strings.Replace(string(admin), "server: "+w.Config().Server(),
		fmt.Sprintf("tls-server-name: kubernetes\n    server: https://api.outside.test:%d", lab.APIPort), 1)
	if err := os.WriteFile(r.kubeconfig, []byte(named), 0o600); err != nil {
		t.Fatal(err)
	}
	saved := t.TempDir()
	t.Cleanup(func() {
		r.sh(context.WithoutCancel(t.Context()), t, `cd %s; cat hosts > /etc/hosts; cat resolv.conf > /etc/resolv.conf
			ip link del wlan0; ip link set eth0 up; ip address flush dev eth0 scope global
			ip address add %v/24 dev eth0; ip route replace default via %v
			ip address add %v/64 dev eth0 nodad; ip route replace default via %v`,
			saved, r.v4.Laptop, r.v4.Gateway, r.v6.Laptop, r.v6.Gateway)
	})
	r.sh(t.Context(), t, "cp /etc/hosts /etc/resolv.conf %s; printf '%%s api.outside.test\\n' %v %v >> /etc/hosts", saved,
		w.Config().APIServer(r.v4), w.Config().APIServer(r.v6))
	r.router(t, `ip link add wifi type veth peer name wlan0 netns %s-laptop
		ip address add %s/24 dev wifi; ip link set wifi up`, w.Config().Name, wifiGateway)
	w.nft(t, "router", "prerouting",
		fmt.Sprintf(`iifname "laptop" ip saddr != %v drop`, r.v4.LaptopNet),
		fmt.Sprintf(`iifname "wifi" ip saddr != %s/24 drop`, wifiGateway),
		fmt.Sprintf(`iifname "wifi" ip daddr %v drop`, r.v4.LaptopNet)) // also the nameserver of the cable
	return r
}

// sh runs a script on the laptop. Each line must succeed.
func (r *roamer) sh(ctx context.Context, t *testing.T, format string, args ...any) {
	t.Helper()
	if out := r.runContext(ctx, t, "sh", "-ec", fmt.Sprintf(format, args...)); out.code != 0 {
		t.Fatal(out)
	}
}

// router runs a script on the router. Each line must succeed.
func (r *roamer) router(t *testing.T, format string, args ...any) {
	t.Helper()
	cmd, err := r.Command(t.Context(), "router", "sh", "-ec", fmt.Sprintf(format, args...))
	if err != nil {
		t.Fatal(err)
	}
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("%v: %v: %s", cmd, err, out)
	}
}

// works measures how long a new request takes from now, and how long the open flow stands.
func (r *roamer) works(t *testing.T, request, flow time.Duration) {
	t.Helper()
	began := time.Now()
	answered := make(chan error, 1)
	var took time.Duration
	go func() {
		err := testenv.Poll(2*soon, r.request) // with the system netstack, packets to the cluster may be rejected meanwhile
		took = time.Since(began)
		answered <- err
	}()
	stood := time.Duration(0)
	if r.flow != nil {
		stood = r.flow.goesOn(t, 2*soon)
	}
	if err := <-answered; err != nil {
		t.Error(err)
	}
	t.Logf("a new request was answered after %v, the flow went on after %v", took.Round(time.Millisecond),
		stood.Round(time.Millisecond))
	if took > request || stood > flow {
		t.Errorf("want at most %v and %v", request, flow)
	}
}

// request sends one request over a new flow.
func (r *roamer) request() error {
	conn, err := dialTimeout(r.laptop, r.server, 2*soon)
	if err != nil {
		return err
	}
	defer conn.Close()
	if err := conn.SetDeadline(time.Now().Add(soon)); err != nil {
		return err
	}
	if _, err := io.WriteString(conn, "GET / HTTP/1.0\r\n\r\n"); err != nil {
		return err
	}
	answer, err := io.ReadAll(conn)
	if err == nil && !strings.HasPrefix(string(answer), "HTTP/1.0 200") {
		err = fmt.Errorf("answer %.40q", answer)
	}
	return err
}

// join waits until a link and its end on the router carry packets, as a DHCP client does. The kernel takes up to a
// second to notice.
func (r *roamer) join(t *testing.T, link, end string) {
	t.Helper()
	r.sh(t.Context(), t, "ip link set %s up", link)
	testenv.Eventually(t, soon, func() error {
		for place, name := range map[string]string{"laptop": link, "router": end} {
			cmd, err := r.Command(t.Context(), place, "ip", "-brief", "link", "show", name)
			if err != nil {
				return err
			}
			if out, err := cmd.CombinedOutput(); err != nil || !strings.Contains(string(out), " UP ") {
				return fmt.Errorf("%w: %s", err, out)
			}
		}
		return nil
	})
}

// joinCable gives eth0 another address, and a default route with a metric.
func (r *roamer) joinCable(t *testing.T, metric int) {
	t.Helper()
	r.host++
	r.join(t, "eth0", "laptop")
	r.sh(t.Context(), t, `ip -4 address flush dev eth0
		ip address add %v/24 dev eth0; ip route add default via %v metric %d`,
		netip.AddrFrom4([4]byte{10, 98, 0, byte(r.host)}), r.v4.Gateway, metric)
}

func (r *roamer) newAddress(t *testing.T) {
	r.joinCable(t, 100)
	r.works(t, requestAgain, flowAgain)
}

func (r *roamer) anotherGateway(t *testing.T) {
	r.router(t, "ip address replace 10.98.0.254/24 dev laptop")
	r.sh(t.Context(), t, "ip route replace default via 10.98.0.254 metric 100")
	r.works(t, requestAgain, flowAgain)
}

// noRoute checks that kubevpn waits for a route without a busy loop.
func (r *roamer) noRoute(t *testing.T) {
	pid := r.daemonPID(t)
	r.sh(t.Context(), t, "ip route del default; ip -6 route del default; ip -4 address flush dev eth0")
	r.reconnecting(t, soon)
	before := processorTime(t, pid)
	<-time.After(3 * time.Second)
	if used := processorTime(t, pid) - before; used > time.Second {
		t.Errorf("the daemon computed for %v of 3 s without a route", used)
	} else {
		t.Logf("the daemon computed for %v of 3 s without a route", used)
	}
	r.joinCable(t, 100)
	r.works(t, requestAgain, flowAgain)
}

// joinWifi configures wlan0, with its own nameserver.
func (r *roamer) joinWifi(t *testing.T, metric int) {
	t.Helper()
	r.join(t, "wlan0", "wifi")
	r.sh(t.Context(), t, `ip address replace %s/24 dev wlan0
		echo nameserver %v > /etc/resolv.conf; ip route add default via %s metric %d`,
		wifiLaptop, r.v4.Router, wifiGateway, metric)
}

// cableToWifi also checks that names outside of the cluster resolve at the nameserver of the other network.
func (r *roamer) cableToWifi(t *testing.T) {
	r.sh(t.Context(), t, "ip link set eth0 down")
	r.joinWifi(t, 600)
	began := time.Now()
	r.works(t, requestAgain, flowAgain)
	testenv.Eventually(t, 3*flowAgain, func() error {
		if out := r.run(t, "dig", "+time=1", "+tries=1", "www.outside.test"); !strings.Contains(out.stdout, "NOERROR") {
			return errors.New(out.String())
		}
		return nil
	})
	t.Logf("outside names resolve after %v", time.Since(began).Round(time.Millisecond))
}

// wifiToCable plugs in a cable while Wi-Fi stays up: its address stays, but nothing answers to it on the new route.
func (r *roamer) wifiToCable(t *testing.T) {
	r.joinCable(t, 100)
	r.works(t, requestAgain, flowAgain)
}

func (r *roamer) ipv4ToIPv6(t *testing.T) {
	r.sh(t.Context(), t, `ip link set wlan0 down; ip -4 address flush dev eth0
		ip address replace %v/64 dev eth0 nodad; ip route replace default via %v`, r.v6.Laptop, r.v6.Gateway)
	r.works(t, requestAgain, flowAgain)
}

// sleep stops the daemon while the laptop moves to another network.
func (r *roamer) sleep(t *testing.T) {
	wake := r.stopDaemon(t)
	r.joinCable(t, 100)
	r.sh(t.Context(), t, "ip -6 address flush dev eth0 scope global")
	<-time.After(3 * time.Second)
	wake()
	r.works(t, wakeAgain, wakeAgain)
}

// stopDaemon stops the daemon, as sleep does, until wake is called.
func (r *roamer) stopDaemon(t *testing.T) (wake func()) {
	t.Helper()
	pid := r.daemonPID(t)
	if err := syscall.Kill(pid, syscall.SIGSTOP); err != nil {
		t.Fatal(err)
	}
	wake = sync.OnceFunc(func() {
		if err := syscall.Kill(pid, syscall.SIGCONT); err != nil {
			t.Error(err)
		}
	})
	t.Cleanup(wake)
	testenv.Eventually(t, soon, func() error { return stopped(pid) })
	return wake
}

// captivePortal has the network answer in place of the API server until somebody logs in, which changes no route.
func (r *roamer) captivePortal(t *testing.T) {
	pid := r.daemonPID(t)
	before := processorTime(t, pid)
	listener, err := r.Listen("router", "tcp", netip.AddrPortFrom(r.v4.Gateway, 8443).String())
	if err != nil {
		t.Fatal(err)
	}
	defer listener.Close()
	go func() {
		for {
			conn, err := listener.Accept()
			if err != nil {
				return
			}
			_, _ = io.WriteString(conn, "HTTP/1.0 302 Found\r\nLocation: http://portal.test/\r\n\r\n")
			conn.Close()
		}
	}()
	r.router(t, `nft 'table ip portal { chain c { type nat hook prerouting priority -100
		iifname "laptop" tcp dport %d redirect to :8443; }; }'`, lab.APIPort)
	r.joinCable(t, 100)
	<-time.After(4 * time.Second)
	t.Logf("the daemon computed for %v of 4 s at the portal", processorTime(t, pid)-before)
	if used := processorTime(t, pid) - before; used > 2*time.Second {
		t.Errorf("the daemon computed for %v of 4 s", used)
	}
	r.router(t, "nft delete table ip portal")
	r.works(t, requestAgain, flowAgain)
}

// anotherManager replaces the manager's pod while the laptop's network changes, or the laptop sleeps.
func (r *roamer) anotherManager(t *testing.T, asleep bool) {
	r.flow = nil
	before := r.connection(t)
	wake := func() {}
	if asleep {
		wake = r.stopDaemon(t)
	}
	r.joinCable(t, 100) // first, so that the daemon cannot hear of the pod's end
	r.kubectl(t, "-n", before.ManagerNamespace, "delete", "pod", before.ManagerPod, "--grace-period=0", "--force", "--wait=false")
	testenv.Eventually(t, time.Minute, func() error {
		pod, err := r.tryKubectl(t.Context(), "-n", before.ManagerNamespace, "get", "pods", "-l", ours, "-o",
			`jsonpath={.items[?(@.status.containerStatuses[0].ready==true)].metadata.name}`)
		if err == nil && (pod == "" || strings.Contains(pod, before.ManagerPod)) {
			err = fmt.Errorf("pod %q", pod)
		}
		return err
	})
	wake()
	r.works(t, managerAgain, 0)
}

// processorTime returns the processor time that a process has used.
func processorTime(t *testing.T, pid int) time.Duration {
	t.Helper()
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		t.Fatal(err)
	}
	_, rest, _ := strings.Cut(string(text), ") ")
	fields := strings.Fields(rest)
	var ticks time.Duration
	for _, i := range []int{11, 12} { // utime and stime, in hundredths of a second: proc(5)
		n, err := strconv.Atoi(fields[i])
		if err != nil {
			t.Fatal(err)
		}
		ticks += time.Duration(n)
	}
	return ticks * 10 * time.Millisecond
}
