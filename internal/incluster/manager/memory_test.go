package manager

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"runtime"
	"runtime/debug"
	"strconv"
	"strings"
	"testing"
	"time"

	"kubevpn/internal/incluster/manager/managertest"
	"kubevpn/internal/testenv"
	"kubevpn/pkg/wire/transport"
)

// A test of memory needs a process with only the manager in it: the test's own binary, with a variable set.
const childVariable = "KUBEVPN_TEST_MANAGER"

// childMain is the manager in that process. It ends when its standard input does.
func childMain() bool {
	if os.Getenv(childVariable) == "" {
		return false
	}
	m := New(Config{Logger: slog.New(slog.DiscardHandler)})
	m.dialer.Check = func(netip.AddrPort) error { return nil }
	debug.SetGCPercent(50)
	sessions, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		panic(err)
	}
	health, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		panic(err)
	}
	go func() {
		for range time.Tick(500 * time.Millisecond) {
			debug.FreeOSMemory() // return free memory, so that the test measures memory in use
		}
	}()
	fmt.Println(sessions.Addr())
	ctx, cancel := context.WithCancel(context.Background())
	go func() {
		io.Copy(io.Discard, os.Stdin)
		cancel()
	}()
	if err := m.serve(ctx, sessions, health); err != nil {
		panic(err)
	}
	return true
}

func residentKB(t *testing.T, pid int) int {
	t.Helper()
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
	if err != nil {
		t.Fatal(err)
	}
	for line := range strings.Lines(string(b)) {
		if rest, ok := strings.CutPrefix(line, "VmRSS:"); ok {
			kb, err := strconv.Atoi(strings.Fields(rest)[0])
			if err != nil {
				t.Fatal(err)
			}
			return kb
		}
	}
	t.Fatal("no VmRSS")
	return 0
}

func TestIdleFlowsTakeLittleMemory(t *testing.T) {
	if runtime.GOOS != "linux" {
		t.Skip("SKIPPED: reads /proc")
	}
	testenv.WithoutRace(t, "the race detector multiplies memory")
	child := exec.Command(os.Args[0])
	child.Env = append(os.Environ(), childVariable+"=1")
	child.Stderr = os.Stderr
	in, err := child.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	out, err := child.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := child.Start(); err != nil {
		t.Fatal(err)
	}
	defer child.Wait()
	defer in.Close()
	addr, err := bufio.NewReader(out).ReadString('\n')
	if err != nil {
		t.Fatal(err)
	}
	laptop := managertest.Connect(t, strings.TrimSpace(addr))
	managertest.Hello(t, laptop, helloV1).Next()
	echo := netip.MustParseAddrPort(managertest.TCPPod(t, func(c *net.TCPConn) { c.SetDeadline(time.Time{}); io.Copy(c, c) }))

	flow := func(n int) {
		t.Helper()
		for range n {
			st, err := laptop.Open(context.Background(), transport.Request{Proto: transport.ProtoTCP, Dst: echo})
			if err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() { st.Reset() })
			st.Write([]byte("x"))
			if _, err := io.ReadFull(st, make([]byte, 1)); err != nil {
				t.Fatal(err)
			}
		}
	}
	settled := func() int { // the minimum of several measurements, because they include garbage
		least := residentKB(t, child.Process.Pid)
		for range 15 {
			time.Sleep(100 * time.Millisecond)
			least = min(least, residentKB(t, child.Process.Pid))
		}
		return least
	}
	const flows = 2000
	flow(100) // allocates memory that all flows share
	before := settled()
	flow(flows)
	after := settled()
	perFlow := float64(after-before) / flows
	t.Logf("resident: %d kB, with %d idle TCP flows more %d kB: %.1f kB per flow", before, flows, after, perFlow)
	if perFlow > 12 {
		t.Errorf("an idle TCP flow takes %.1f kB, more than 12", perFlow)
	}

	answering := netip.MustParseAddrPort(managertest.UDPPod(t, "a"))
	for range flows {
		p, err := laptop.OpenPackets(context.Background(), transport.Request{Proto: transport.ProtoUDP, Dst: answering})
		if err != nil {
			t.Fatal(err)
		}
		defer p.Close()
		managertest.Expect(t, p, "x", "a:x")
	}
	perFlow = float64(settled()-after) / flows
	t.Logf("%.1f kB per idle UDP flow", perFlow)
	if perFlow > 12 {
		t.Errorf("an idle UDP flow takes %.1f kB, more than 12", perFlow)
	}
}
