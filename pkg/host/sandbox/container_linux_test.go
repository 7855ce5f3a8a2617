package sandbox_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"kubevpn/internal/testenv"
	"kubevpn/pkg/host/sandbox"
	"kubevpn/pkg/host/subreaper"
	"kubevpn/pkg/host/unixsocket"
)

// serveIn acts as a container: it creates eth0 as an engine does, calls Serve, and runs an HTTP server that reports
// the routes and names that programs see.
func serveIn(socket string) error {
	resolv := filepath.Join(filepath.Dir(socket), "resolv.conf")
	if err := errors.Join(unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""), unix.Mount(resolv, "/etc/resolv.conf", "", unix.MS_BIND, "")); err != nil {
		return err
	}
	lo, err := netlink.LinkByName("lo")
	if err != nil {
		return err
	}
	eth0 := &netlink.Veth{LinkAttrs: netlink.LinkAttrs{Name: "eth0"}, PeerName: "engine"}
	if err := errors.Join(netlink.LinkSetUp(lo), netlink.LinkAdd(eth0)); err != nil {
		return err
	}
	for _, step := range []func() error{
		func() error {
			return netlink.AddrAdd(eth0, &netlink.Addr{IPNet: &net.IPNet{IP: net.IPv4(172, 18, 0, 2), Mask: net.CIDRMask(16, 32)}})
		},
		func() error { return netlink.LinkSetUp(eth0) },
		func() error {
			return netlink.RouteAdd(&netlink.Route{LinkIndex: eth0.Attrs().Index, Gw: net.IPv4(172, 18, 0, 1)})
		},
	} {
		if err := step(); err != nil {
			return err
		}
	}
	http.HandleFunc("/route", func(w http.ResponseWriter, r *http.Request) {
		out, err := exec.Command("ip", append([]string{"-o", "route", "get"}, strings.Fields(r.URL.Query().Get("q"))...)...).CombinedOutput()
		fmt.Fprintf(w, "%s%v", out, err)
	})
	http.HandleFunc("/resolv.conf", func(w http.ResponseWriter, r *http.Request) { http.ServeFile(w, r, "/etc/resolv.conf") })
	http.HandleFunc("/get", func(w http.ResponseWriter, r *http.Request) {
		response, err := http.Get(r.URL.Query().Get("q"))
		if err != nil {
			fmt.Fprint(w, err)
			return
		}
		defer response.Body.Close()
		io.Copy(w, response.Body)
	})
	l, err := net.Listen("tcp", "127.0.0.1:80")
	if err != nil {
		return err
	}
	go http.Serve(l, nil)
	conn, err := net.DialUnix("unix", nil, &net.UnixAddr{Name: socket, Net: "unix"})
	if err != nil {
		return err
	}
	if err := sandbox.Serve(conn, filepath.Dir(socket)+"/volumes"); err != nil {
		return err
	}
	os.Exit(0)
	return nil
}

// serveProgramAt acts as the first process of a container that runs a program.
func serveProgramAt(socket string) error {
	conn, err := net.DialUnix("unix", nil, &net.UnixAddr{Name: socket, Net: "unix"})
	if err != nil {
		return err
	}
	exit, err := sandbox.ServeProgram(conn, func(p subreaper.Program) (*subreaper.Process, error) {
		var family subreaper.Family
		program, err := family.Start(p)
		go family.Reap(context.Background())
		return program, err
	})
	if err != nil {
		return err
	}
	os.Exit(exit)
	return nil
}

// attachProgram starts a container's first process and attaches to it.
func attachProgram(t *testing.T) (*sandbox.Remote, *exec.Cmd) {
	t.Helper()
	socket := t.TempDir() + "/socket"
	listener, err := net.ListenUnix("unix", &net.UnixAddr{Name: socket, Net: "unix"})
	if err != nil {
		t.Fatal(err)
	}
	defer listener.Close()
	cmd := exec.Command("/proc/self/exe", roleProgram, socket)
	cmd.Stderr = os.Stderr
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: unix.SIGKILL, Setpgid: true}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	listener.SetDeadline(time.Now().Add(20 * time.Second))
	conn, err := listener.AcceptUnix()
	if err != nil {
		t.Fatal(err)
	}
	r, err := sandbox.Attach(t.Context(), conn, nil)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		r.Close()
		cmd.Wait()
	})
	return r, cmd
}

func TestServeProgram(t *testing.T) {
	script := func(text string) subreaper.Program {
		return subreaper.Program{Args: []string{"/bin/sh", "-c", text}, Env: []string{"CODE=7"}}
	}
	t.Run("reports the exit code", func(t *testing.T) {
		r, cmd := attachProgram(t)
		if err := r.Run(t.Context(), script("exit $CODE")); err != nil {
			t.Fatal(err)
		}
		<-r.Done()
		if e := r.Ended(); e == nil || e.Code != 7 {
			t.Errorf("ended: %+v", e)
		}
		cmd.Wait()
		if code := cmd.ProcessState.ExitCode(); code != 7 {
			t.Errorf("the first process ended with %d", code)
		}
	})
	t.Run("sends signals", func(t *testing.T) {
		r, _ := attachProgram(t)
		if err := r.Run(t.Context(), script("exec sleep 100")); err != nil {
			t.Fatal(err)
		}
		if err := r.Signal(unix.SIGTERM); err != nil {
			t.Fatal(err)
		}
		<-r.Done()
		if e := r.Ended(); e == nil || e.Code != 143 || e.Signal != unix.SIGTERM {
			t.Errorf("ended: %+v", e)
		}
	})
	t.Run("returns the error of execve", func(t *testing.T) {
		r, _ := attachProgram(t)
		if err := r.Run(t.Context(), subreaper.Program{Args: []string{"/no/such"}}); !errors.Is(err, unix.ENOENT) {
			t.Errorf("Run: %v", err)
		}
	})
	t.Run("accepts an environment of megabytes", func(t *testing.T) {
		r, _ := attachProgram(t)
		p := script("exit 0")
		for n := range 20 {
			p.Env = append(p.Env, fmt.Sprintf("V%d=%s", n, strings.Repeat("x", 64<<10)))
		}
		if err := r.Run(t.Context(), p); err != nil {
			t.Error(err)
		}
	})
	t.Run("ends with the socket", func(t *testing.T) {
		r, cmd := attachProgram(t)
		if err := r.Run(t.Context(), script("exec sleep 100")); err != nil {
			t.Fatal(err)
		}
		if err := r.Close(); err != nil {
			t.Error(err)
		}
		if e := r.Ended(); e != nil {
			t.Errorf("the first process reported %+v", e)
		}
		cmd.Wait()
		if code := cmd.ProcessState.ExitCode(); code != 137 {
			t.Errorf("the first process ended with %d", code)
		}
		// In a container the kernel kills the program.
		if err := unix.Kill(-cmd.Process.Pid, unix.SIGKILL); err != nil {
			t.Errorf("killing the program: %v", err)
		}
	})
}

func TestContainerGetsVolumesAndRunsPrograms(t *testing.T) {
	testenv.NeedRoot(t)
	testenv.NeedPrograms(t, "ip")
	dir := t.TempDir()
	write(t, dir+"/resolv.conf", "nameserver 127.0.0.11\n")
	if err := os.Mkdir(dir+"/volumes", 0o755); err != nil {
		t.Fatal(err)
	}
	listener, err := net.ListenUnix("unix", &net.UnixAddr{Name: dir + "/socket", Net: "unix"})
	if err != nil {
		t.Fatal(err)
	}
	defer listener.Close()
	cmd := exec.Command("/proc/self/exe", roleServe, dir+"/socket")
	cmd.Stderr = os.Stderr
	cmd.SysProcAttr = &syscall.SysProcAttr{Cloneflags: unix.CLONE_NEWNET | unix.CLONE_NEWNS, Pdeathsig: unix.SIGKILL}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { cmd.Process.Kill() })
	listener.SetDeadline(time.Now().Add(20 * time.Second))
	conn, err := listener.AcceptUnix()
	if err != nil {
		t.Fatal(err)
	}
	r, err := sandbox.Attach(t.Context(), conn, slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	if r.TUN().Name() != sandbox.ContainerInterface {
		t.Errorf("the device is called %q", r.TUN().Name())
	}
	newCluster(t, "cluster").serve(t, r)
	if err := r.SetNetwork(t.Context(), network()); err != nil {
		t.Fatal(err)
	}
	inside := http.Client{Transport: &http.Transport{
		DisableKeepAlives: true,
		DialContext: func(ctx context.Context, network, _ string) (net.Conn, error) {
			return r.Dial(ctx, network, "127.0.0.1:80")
		},
	}, Timeout: 20 * time.Second}
	const onLink = "on the link"
	for _, tt := range []struct{ path, want string }{
		{"/route?q=192.0.2.7", "dev tun0 src 10.244.1.9"},
		{"/route?q=10.96.0.1", "dev tun0"},
		{"/route?q=2001:db8::7", "dev tun0"},
		{"/route?q=192.0.2.7+from+172.18.0.2", "via 172.18.0.1 dev eth0"},
		{"/route?q=172.18.0.9+from+172.18.0.2", onLink},
		{"/route?q=172.18.0.9", "dev tun0"}, // a pod may have it, and the laptop reaches its own containers
		{"/resolv.conf", "nameserver 10.96.0.10\nsearch prod.svc.cluster.local"},
		{"/get?q=http://10.96.1.2/", "cluster for 10.96.1.2"},
		{"/get?q=http://db/", "cluster for db"},
	} {
		response, err := inside.Get("http://inside" + tt.path)
		if err != nil {
			t.Fatal(err)
		}
		b, err := io.ReadAll(response.Body)
		response.Body.Close()
		if tt.want == onLink { // on the link, not through the engine's gateway
			if !strings.Contains(string(b), "dev eth0") || strings.Contains(string(b), "via") {
				t.Errorf("%s: %s", tt.path, b)
			}
			continue
		}
		if err != nil || !strings.Contains(string(b), tt.want) {
			t.Errorf("%s: %q, %v; want %q", tt.path, b, err, tt.want)
		}
	}
	other := network()
	other.Addresses, other.DNS = []netip.Prefix{netip.MustParsePrefix("10.244.1.10/32")}, []netip.Addr{netip.MustParseAddr("10.96.0.11")}
	if err := r.SetNetwork(t.Context(), other); err != nil {
		t.Fatal(err)
	}
	if b, err := os.ReadFile(dir + "/resolv.conf"); err != nil || !strings.Contains(string(b), "nameserver 10.96.0.11\n") {
		t.Errorf("the engine's file says %q, %v", b, err)
	}
	keys := sandbox.Volume{Name: "keys", Files: []sandbox.File{{Path: "password", Mode: 0o400, Data: []byte("one")}}}
	if err := r.Update(t.Context(), keys); err != nil {
		t.Fatal(err)
	}
	at, err := r.Resolve(t.Context(), "keys", "password")
	if err != nil {
		t.Fatal(err)
	}
	if b, err := os.ReadFile(filepath.Join(dir, "volumes", "keys", at)); err != nil || string(b) != "one" {
		t.Errorf("%s: %q, %v", at, b, err)
	}
	if err := r.Close(); err != nil {
		t.Error(err)
	}
	<-r.Done()
	if err := cmd.Wait(); err != nil {
		t.Errorf("Serve ended with %v", err)
	}
}

// socketPair returns both ends of a stream.
func socketPair(t *testing.T) (a *net.UnixConn, b *unixsocket.Conn) {
	t.Helper()
	first, second, err := unixsocket.Pair("socket")
	if err != nil {
		t.Fatal(err)
	}
	ours, err := unixsocket.Open(first, 1<<20)
	if err != nil {
		t.Fatal(err)
	}
	if b, err = unixsocket.Open(second, 1<<20); err != nil {
		t.Fatal(err)
	}
	return ours.UnixConn, b
}

func TestAttachEndsWithItsContext(t *testing.T) {
	conn, other := socketPair(t)
	defer other.Close()
	ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	if _, err := sandbox.Attach(ctx, conn, nil); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("Attach: %v", err)
	}
}

// attachTo attaches to a peer that answers every request with path.
func attachTo(t *testing.T, path string) *sandbox.Remote {
	t.Helper()
	conn, other := socketPair(t)
	answered := make(chan struct{})
	go func() {
		defer close(answered)
		defer other.Close()
		if err := other.Send(map[string]any{"ready": true}, nil); err != nil {
			t.Error(err)
			return
		}
		for {
			f, err := other.Receive(&struct{}{}, "request")
			if err != nil {
				return
			}
			request, err := unixsocket.Open(f, 1<<20)
			if err != nil {
				t.Error(err)
				return
			}
			if err := request.Send(map[string]any{"path": path}, nil); err != nil {
				t.Error(err)
			}
			request.Close()
		}
	}()
	r, err := sandbox.Attach(t.Context(), conn, nil)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		r.Close()
		<-answered
	})
	return r
}

// A program of the container may have replaced Serve.
func TestResolveRejectsPathsOutsideOfTheVolume(t *testing.T) {
	for path, ok := range map[string]bool{
		"..1/page": true, "a/b": true, "": false, "../../../../etc": false, "/etc": false, "a/../../b": false,
	} {
		at, err := attachTo(t, path).Resolve(t.Context(), "scratch", "a")
		if (err == nil) != ok || ok && at != path {
			t.Errorf("%q: resolved to %q, %v", path, at, err)
		}
	}
}
