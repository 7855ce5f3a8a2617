//go:build linux

package agent

import (
	"context"
	"errors"
	"io"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"syscall"
	"testing"
	"time"

	"kubevpn/internal/api"
	"kubevpn/internal/testenv"
	"kubevpn/pkg/wire/transport"
)

// Flows of a laptop leave from the pod's network namespace, here that of the test, and go where its user may go.
func TestFlowsLeaveFromThePod(t *testing.T) {
	tcp, udp := echoServers(t)
	closed := testenv.ClosedPort(t, "tcp")
	metadata := netip.MustParseAddrPort("169.254.169.254:80")
	ann := newPerson(t, "ann@laptop")
	p := newPod(t, ann)
	open := func(m *testLaptop, proto transport.Proto, dst netip.AddrPort) error {
		ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
		defer cancel()
		request := transport.Request{Proto: proto, Src: netip.MustParseAddrPort("198.18.0.1:40000"), Dst: dst}
		buf := make([]byte, 16)
		if proto == transport.ProtoTCP {
			s, err := m.session.Open(ctx, request)
			if err != nil {
				return err
			}
			defer s.Close()
			if _, err = s.Write([]byte("hello")); err == nil {
				err = s.CloseWrite()
			}
			got, e := io.ReadAll(s)
			if string(got) != "hello" {
				t.Errorf("got %q from %v", got, dst)
			}
			return errors.Join(err, e)
		}
		s, err := m.session.OpenPackets(ctx, request)
		if err != nil {
			return err
		}
		defer s.Close()
		if err := s.WritePacket([]byte("hello")); err != nil {
			return err
		}
		n, err := s.ReadPacket(buf)
		if string(buf[:n]) != "hello" {
			t.Errorf("got %q from %v", buf[:n], dst)
		}
		return err
	}
	prohibited, refused := syscall.EACCES, syscall.ECONNREFUSED
	for _, tt := range []struct {
		name  string
		hello *api.AgentHello
		proto transport.Proto
		dst   netip.AddrPort
		want  error
	}{
		{"before a hello", nil, transport.ProtoTCP, tcp, prohibited},
		{"TCP", &api.AgentHello{MayExec: true}, transport.ProtoTCP, tcp, nil},
		{"UDP", &api.AgentHello{MayExec: true}, transport.ProtoUDP, udp, nil},
		{"nothing listens", &api.AgentHello{MayExec: true}, transport.ProtoTCP, closed, refused},
		{"without the right to exec: the pod's loopback", &api.AgentHello{}, transport.ProtoTCP, tcp, prohibited},
		{"without the right to exec: metadata", &api.AgentHello{}, transport.ProtoTCP, metadata, prohibited},
	} {
		t.Run(tt.name, func(t *testing.T) {
			m := p.attach(ann)
			defer m.stop()
			if tt.hello != nil {
				tt.hello.Protocol, tt.hello.Version = api.Protocol, "test"
				m.hello(*tt.hello)
				m.state("the first", func(*api.AgentState) bool { return true })
			}
			if err := open(m, tt.proto, tt.dst); !errors.Is(err, tt.want) {
				t.Errorf("got %v, want %v", err, tt.want)
			}
		})
	}
}

// echoServers returns the addresses of servers that send back what they receive, until the test ends.
func echoServers(t *testing.T) (tcp, udp netip.AddrPort) {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	u, err := net.ListenPacket("udp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	done := make(chan struct{}, 2)
	go func() {
		defer func() { done <- struct{}{} }()
		for {
			conn, err := l.Accept()
			if err != nil {
				return
			}
			io.Copy(conn, conn)
			conn.Close()
		}
	}()
	go func() {
		defer func() { done <- struct{}{} }()
		buf := make([]byte, 1024)
		for {
			n, from, err := u.ReadFrom(buf)
			if err != nil {
				return
			}
			u.WriteTo(buf[:n], from)
		}
	}()
	t.Cleanup(func() {
		l.Close()
		u.Close()
		<-done
		<-done
	})
	return l.Addr().(*net.TCPAddr).AddrPort(), u.LocalAddr().(*net.UDPAddr).AddrPort()
}

func TestNamesOfThePod(t *testing.T) {
	dir := t.TempDir()
	write := func(name, text string) string {
		path := filepath.Join(dir, name)
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		return path
	}
	resolv := write("resolv.conf", "search a.svc.cluster.local example\nnameserver 10.96.0.10\noptions ndots:5\n")
	hosts := write("hosts", "127.0.0.1\tlocalhost\n10.0.0.9\tweb-1\n# aliases\n10.1.2.3 db db.example\n")
	names, err := readNames(resolv, hosts, []netip.Addr{netip.MustParseAddr("10.0.0.9")})
	want := &api.PodNames{Servers: []netip.Addr{netip.MustParseAddr("10.96.0.10")}, Options: []string{"ndots:5"},
		Search: []string{"a.svc.cluster.local", "example"},
		Hosts:  "127.0.0.1\tlocalhost\n# aliases\n10.1.2.3 db db.example\n"}
	if err != nil || !reflect.DeepEqual(names, want) {
		t.Errorf("got %+v, %v", names, err)
	}
	if names, err := readNames(dir+"/none", dir+"/none", nil); err != nil || !reflect.DeepEqual(names, new(api.PodNames)) {
		t.Errorf("without files: %+v, %v", names, err)
	}
	large := write("large", strings.Repeat("10.1.2.3 db\n", maxHosts/10))
	if names, err := readNames(resolv, large, nil); err == nil {
		t.Errorf("of a file that is too large: %d bytes", len(names.Hosts))
	}
	// An order asks for them.
	ann := newPerson(t, "ann@laptop")
	answer, err := newPod(t, ann).connect(ann).answer(api.AgentOrder{Names: true})
	want, e := readNames(resolvConf, hostsFile, nil)
	if err := errors.Join(err, e); err != nil || !reflect.DeepEqual(answer.Names, want) {
		t.Errorf("the agent reports %+v, %v, and the files have %+v", answer.Names, err, want)
	}
}
