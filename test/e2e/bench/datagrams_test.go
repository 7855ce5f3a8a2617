//go:build linux

package main

import (
	"net"
	"os"
	"testing"
	"time"
)

// TestDatagramsAreCounted measures loopback. It does not check the rate.
func TestDatagramsAreCounted(t *testing.T) {
	conn, err := net.ListenUDP("udp4", &net.UDPAddr{IP: net.IPv4(127, 0, 0, 1)})
	if err != nil {
		t.Fatal(err)
	}
	done := make(chan struct{})
	go func() {
		defer close(done)
		_ = newDatagramServer(conn).serve() // until it is closed
	}()
	t.Cleanup(func() { conn.Close(); <-done })
	for _, kind := range []string{"udp-up", "udp-down"} {
		w := work{Kind: kind, Target: conn.LocalAddr().String(), Rate: 10, Duration: 200 * time.Millisecond}
		got, err := w.do(os.Stdout, os.Stdin)
		if err != nil {
			t.Fatalf("%s: %v", kind, err)
		}
		if got.Count == 0 || got.Mbps <= 0 || got.Lost < 0 || got.Lost > 100 || got.Disordered != 0 {
			t.Errorf("%s: %+v", kind, got)
		}
	}
}

func TestCountRecordsOrder(t *testing.T) {
	var c count
	for _, number := range []byte{0, 1, 3, 2, 5} {
		c.add([]byte{kindData, 0, 0, 0, 0, 0, 0, 0, number})
	}
	if c.Received != 5 || c.Disordered != 1 {
		t.Errorf("%+v", c)
	}
}
