//go:build e2e && linux

package e2e

import (
	"strings"
	"testing"
	"time"

	"kubevpn/test/lab"
)

// faithfulSuite checks that refused connections, silence, half-closes and resets reach the program unchanged. Its
// tests wait at the same time, most of all for the answer after half a minute.
func faithfulSuite(t *testing.T, w *world) {
	l := w.newLaptop(t, lab.Admin)
	l.connect(t)
	// This takes half a minute, so it runs once: the mode of kube-proxy cannot change it, and in the system netstack it
	// depends only on two kernels.
	if w.Config().ProxyMode == lab.ProxyIPTables && !w.isSystem() {
		t.Run("answer_arrives_30_s_after_a_half_close", func(t *testing.T) {
			t.Parallel()
			r := l.sh(t, `printf 'delay 30s\nx' | nc -N -w 60 %s 9005`, w.clusterIP(t, "default", "web"))
			if strings.TrimSpace(r.stdout) != "11" || r.took < 30*time.Second {
				t.Error(r)
			}
		})
	}
	l.isFaithful(t, w.isSystem())
}

// isFaithful checks how flows fail and end, in parallel with the test's other subtests. nodeChooses says that the node
// chooses the endpoints of Services, and not kubevpn.
func (l *laptop) isFaithful(t *testing.T, nodeChooses bool) {
	pod, vip := l.pods(t, "default", "app=web")[0].String(), l.clusterIP(t, "default", "web")
	l.refusedFaithfully(t, pod, vip, nodeChooses)
	l.silentFaithfully(t, unused(t, l.world, pod))
	l.endsFaithfully(t, vip)
}

func (l *laptop) refusedFaithfully(t *testing.T, pod, vip string, nodeChooses bool) {
	t.Run("closed_port_of_a_pod_is_refused", func(t *testing.T) {
		t.Parallel()
		r := l.run(t, "nc", "-v", "-w", "5", pod, "4444")
		if r.code == 0 || !strings.Contains(r.stderr, "refused") {
			t.Error(r)
		}
	})
	t.Run("unknown_port_of_a_service_is_refused", func(t *testing.T) {
		t.Parallel()
		want := "ECONNREFUSED"
		if nodeChooses && l.Config().ProxyMode == lab.ProxyIPTables {
			// kube-proxy has no rule for the port, so the node sends the packet along its default route to the router.
			// The router replies "net unreachable" at most once a second to each client. No connection may be
			// accepted.
			want = "ENETUNREACH"
		}
		if r := l.run(t, "python3", "-c", nobodyAnswersScript, vip, "4444"); r.code != 0 || !strings.Contains(r.stdout, want) {
			t.Error(r)
		}
	})
	t.Run("closed_udp_port_is_refused", func(t *testing.T) {
		t.Parallel()
		r := l.run(t, "python3", "-c", `
import socket, sys
s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
s.settimeout(5)
s.connect((sys.argv[1], 4444))
s.send(b"x")
try:
    s.recv(10)
except ConnectionRefusedError:
    print("refused")
`, pod)
		if strings.TrimSpace(r.stdout) != "refused" {
			t.Error(r)
		}
	})
}

func (l *laptop) silentFaithfully(t *testing.T, nobody string) {
	t.Run("an_address_without_a_host_does_not_accept", func(t *testing.T) {
		t.Parallel()
		r := l.run(t, "nc", "-v", "-w", "4", nobody, "80")
		if r.code == 0 || strings.Contains(r.stderr, "succeeded") {
			t.Error(r)
		}
	})
	t.Run("an_address_without_a_host_does_not_answer_a_ping", func(t *testing.T) {
		t.Parallel()
		if r := l.run(t, "ping", "-n", "-c", "2", "-i", "0.2", "-W", "2", nobody); r.code == 0 || strings.Contains(r.stdout, " bytes from ") && !strings.Contains(r.stdout, "Unreachable") {
			t.Error(r)
		}
	})
}

func (l *laptop) endsFaithfully(t *testing.T, vip string) {
	t.Run("a_reset_arrives_as_a_reset", func(t *testing.T) {
		t.Parallel()
		r := l.run(t, "python3", "-c", `
import socket, sys
s = socket.create_connection((sys.argv[1], 9006), 5)
s.send(b"x")
try:
    print("read", s.recv(10))
except ConnectionResetError:
    print("reset")
`, vip)
		if strings.TrimSpace(r.stdout) != "reset" {
			t.Error(r)
		}
	})
	t.Run("server_may_speak_first", func(t *testing.T) {
		t.Parallel()
		r := l.sh(t, "nc -w 2 -d %s 9004", vip)
		if !strings.HasPrefix(r.stdout, "hello from web-") {
			t.Error(r)
		}
	})
	t.Run("connection_to_a_silent_server_stays_open", func(t *testing.T) {
		t.Parallel()
		r := l.run(t, "python3", "-c", `
import socket, sys
s = socket.create_connection((sys.argv[1], 9007), 5)
s.send(b"x")
s.settimeout(2)
try:
    print("read", s.recv(10))
except TimeoutError:
    print("silence")
`, vip)
		if strings.TrimSpace(r.stdout) != "silence" {
			t.Error(r)
		}
	})
}

// nobodyAnswersScript opens connections and fails if one is established. It reads the state from the kernel, because
// poll(2) does not distinguish a handshake from an error. It prints the results.
const nobodyAnswersScript = `
import concurrent.futures, errno, socket, struct, sys
def connect(n):
    s = socket.socket()
    s.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", 2, 0))
    with s:
        e = s.connect_ex((sys.argv[1], int(sys.argv[2])))
        if e:
            return errno.errorcode[e]
        info = s.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 104)
        return "made: %s to %s, state %d, rtt %d us" % (s.getsockname(), s.getpeername(), info[0], struct.unpack_from("I", info, 68)[0])
with concurrent.futures.ThreadPoolExecutor(20) as pool:
    ends = list(pool.map(connect, range(40)))
print(*sorted(set(ends)), sep="\n")
sys.exit(any(e.startswith("made") for e in ends))
`

// unused returns an address of the pod network that no pod has.
func unused(t *testing.T, w *world, pod string) string {
	t.Helper()
	taken := w.kubectl(t, "get", "pods", "-A", "-o", `jsonpath={range .items[*]}{.status.podIP}{"\n"}{end}`)
	prefix := pod[:strings.LastIndex(pod, ".")+1]
	for _, last := range []string{"250", "249", "248"} {
		if !strings.Contains(taken+"\n", prefix+last+"\n") {
			return prefix + last
		}
	}
	t.Fatal("no address is free")
	return ""
}
