package dial

import (
	"io"
	"net"
	"sync"
	"testing"

	"kubevpn/internal/incluster/manager/managertest"
	"kubevpn/internal/testenv"
)

// stalledLaptop is a laptop that blocks on the pod's first bytes until its own write to the pod has failed.
type stalledLaptop struct {
	took    chan struct{} // closed when the pod's first bytes arrive
	write   chan struct{} // closed: the laptop may write to the pod
	refused chan struct{} // closed when a write to the pod has failed
	resume  chan struct{} // closed: WriteTo returns
	once    sync.Once

	mu   sync.Mutex
	said []string
}

func (l *stalledLaptop) say(what string) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.said = append(l.said, what)
	return nil
}

func (l *stalledLaptop) Write(p []byte) (int, error) {
	l.once.Do(func() { close(l.took) })
	<-l.refused
	return len(p), nil
}

func (l *stalledLaptop) WriteTo(w io.Writer) (int64, error) {
	<-l.write
	for {
		if _, err := w.Write([]byte("x")); err != nil {
			close(l.refused)
			<-l.resume
			return 0, err
		}
	}
}

func (l *stalledLaptop) CloseWrite() error { return l.say("FIN") }
func (l *stalledLaptop) Reset() error      { return l.say("RST") }
func (l *stalledLaptop) Close() error      { return l.say("close") }

// Linux reports a reset once: after a failed write, a read returns an end of data. That must not reach the laptop as a
// FIN, because the truncated answer would look complete.
func TestRelayForwardsResetThatWriterSaw(t *testing.T) {
	l := managertest.Listen(t)
	client, err := net.Dial("tcp", l.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	accepted, err := l.Accept()
	if err != nil {
		t.Fatal(err)
	}
	peer := accepted.(*net.TCPConn)
	if _, err := peer.Write([]byte("half an ans")); err != nil {
		t.Fatal(err)
	}
	laptop := &stalledLaptop{took: make(chan struct{}), write: make(chan struct{}), refused: make(chan struct{}), resume: make(chan struct{})}
	done := make(chan struct{})
	go func() {
		defer close(done)
		relay(laptop, client.(*net.TCPConn), make(chan struct{}), make(chan struct{}), &buffers{})
	}()
	<-laptop.took
	reset(peer)
	close(laptop.write)
	<-laptop.refused
	testenv.Until(t, "an end", func() bool {
		laptop.mu.Lock()
		defer laptop.mu.Unlock()
		return len(laptop.said) > 0
	})
	close(laptop.resume)
	<-done
	if laptop.said[0] != "RST" {
		t.Errorf("the laptop got %v, want RST first", laptop.said)
	}
}
