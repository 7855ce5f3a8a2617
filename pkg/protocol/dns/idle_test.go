package dns

import (
	"errors"
	"io"
	"net"
	"testing"
	"testing/synctest"
	"time"
)

// The resolver closes a TCP connection without a query after ten seconds, also in the middle of a message.
func TestIdleConnectionIsClosed(t *testing.T) {
	t.Parallel()
	for name, sent := range map[string][]byte{"silent": nil, "in_a_message": {0, 20, 1}} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				client, server := net.Pipe()
				begin := time.Now()
				go New(Config{Logger: quiet()}).serveConn(t.Context(), server)
				if _, err := client.Write(sent); err != nil {
					t.Fatal(err)
				}
				if _, err := client.Read(make([]byte, 1)); err != io.EOF {
					t.Errorf("got %v", err)
				}
				if took := time.Since(begin); took != tcpIdle {
					t.Errorf("closed after %v", took)
				}
			})
		})
	}
}

// Sockets that are in use stay open.
func TestIdleSocketsAreClosed(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		var p pool
		old, peer := net.Pipe()
		defer peer.Close()
		used, peer2 := net.Pipe()
		defer peer2.Close()
		p.put(used, 1)
		p.put(old, 1)
		if c, n := p.take(); c != old || n != 1 {
			t.Fatal("the socket used last does not come first")
		}
		p.put(old, 2)
		if c, _ := p.take(); c != old {
			t.Fatal("the socket used last does not come first")
		}
		if c, _ := p.take(); c != used {
			t.Fatal("the pool lost an idle socket")
		}
		p.put(old, 3)
		time.Sleep(2*poolIdle + time.Second) // in the time of the synctest bubble
		synctest.Wait()
		if c, _ := p.take(); c != nil {
			t.Error("the pool returned an old socket")
		}
		if _, err := old.Write([]byte{0}); !errors.Is(err, io.ErrClosedPipe) {
			t.Errorf("an old socket is open: %v", err)
		}
		p.put(used, 1)
		p.close()
		if _, err := used.Write([]byte{0}); !errors.Is(err, io.ErrClosedPipe) {
			t.Errorf("after close a socket is open: %v", err)
		}
	})
}
