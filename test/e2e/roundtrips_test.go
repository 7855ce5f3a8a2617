//go:build e2e && linux

package e2e

import (
	"net"
	"net/url"
	"slices"
	"sync/atomic"
	"testing"
	"time"

	clientcmdapi "k8s.io/client-go/tools/clientcmd/api"

	"kubevpn/test/lab"
)

// maxRoundTrips is what a connect may take: 9, and what a busy machine adds to the measurement.
const maxRoundTrips = 12

// roundTripsSuite counts the round trips of a connect: by how much the connect takes longer if the API server is
// farther away. What the machine itself takes is in both measurements.
func roundTripsSuite(t *testing.T, w *world) {
	l := w.newLaptop(t, lab.Admin)
	var api *line
	l.kubeconfig = l.variant(t, func(c *clientcmdapi.Cluster, _ *clientcmdapi.AuthInfo) {
		server, err := url.Parse(c.Server)
		if err != nil {
			t.Fatal(err)
		}
		api = newLine(t, l, server.Host)
		c.Server, c.TLSServerName = "https://"+api.listener.Addr().String(), server.Hostname()
	})
	l.connect(t) // installs the manager, or a gateway
	took := func(roundTrip time.Duration) time.Duration {
		api.roundTrip.Store(int64(roundTrip))
		var all []time.Duration
		for range 5 {
			l.must(t, "kubevpn", "disconnect", "--all")
			r := l.run(t, "kubevpn", "connect")
			if r.code != 0 {
				t.Fatal(r)
			}
			all = append(all, r.took)
		}
		t.Logf("at %v: %v", roundTrip, all)
		return slices.Min(all) // other work on the machine only adds
	}
	const near, far = 20 * time.Millisecond, 400 * time.Millisecond
	trips := float64(took(far)-took(near)) / float64(far-near)
	t.Logf("a connect takes %.1f round trips", trips)
	if trips > maxRoundTrips {
		t.Errorf("a connect takes %.1f round trips to the API server, want at most %d", trips, maxRoundTrips)
	}
}

// line is a TCP relay on a laptop, at whose other end a server is as far away as roundTrip says.
type line struct {
	listener  net.Listener
	network   string // the laptop's
	server    string
	roundTrip atomic.Int64 // nanoseconds
}

func newLine(t *testing.T, l *laptop, server string) *line {
	t.Helper()
	n := &line{network: l.network(), server: server}
	if err := inside(n.network, func() (err error) {
		n.listener, err = net.Listen("tcp", "127.0.0.1:0")
		return err
	}); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { n.listener.Close() })
	go func() {
		for {
			conn, err := n.listener.Accept()
			if err != nil {
				return
			}
			go n.relay(conn)
		}
	}()
	return n
}

func (n *line) relay(conn net.Conn) {
	server, err := dialIn(n.network, n.server)
	if err != nil {
		conn.Close()
		return
	}
	handshake := time.Now().Add(time.Duration(n.roundTrip.Load())) // TCP's, which the relay has answered at once
	go n.carry(server, conn, handshake)
	n.carry(conn, server, handshake)
}

// carry passes bytes on, half a round trip later but not before a time.
func (n *line) carry(to, from net.Conn, earliest time.Time) {
	type chunk struct {
		at    time.Time
		bytes []byte
	}
	chunks := make(chan chunk, 1024)
	go func() {
		defer close(chunks)
		for {
			b := make([]byte, 64<<10)
			k, err := from.Read(b)
			if err != nil {
				return
			}
			at := time.Now()
			if at.Before(earliest) {
				at = earliest
			}
			chunks <- chunk{at.Add(time.Duration(n.roundTrip.Load()) / 2), b[:k]}
		}
	}()
	defer to.Close()
	for c := range chunks {
		<-time.After(time.Until(c.at))
		if _, err := to.Write(c.bytes); err != nil {
			from.Close()
			break
		}
	}
	for range chunks { // until the reader has noticed
	}
	from.Close()
}
