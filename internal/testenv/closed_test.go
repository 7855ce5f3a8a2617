package testenv

import (
	"errors"
	"net"
	"syscall"
	"testing"
)

func TestClosedPortRefusesAndStaysTaken(t *testing.T) {
	for _, network := range []string{"tcp", "udp"} {
		t.Run(network, func(t *testing.T) {
			at := ClosedPort(t, network).String()
			if err := ask(network, at); !errors.Is(err, syscall.ECONNREFUSED) {
				t.Errorf("a client gets %v", err)
			}
			var err error
			if network == "tcp" {
				_, err = net.Listen(network, at)
			} else {
				_, err = net.ListenPacket(network, at)
			}
			if !errors.Is(err, syscall.EADDRINUSE) {
				t.Errorf("a listener gets %v", err)
			}
		})
	}
}

// ask sends a byte to an address and waits for one.
func ask(network, at string) error {
	c, err := net.Dial(network, at)
	if err != nil {
		return err
	}
	defer c.Close()
	if _, err := c.Write([]byte{1}); err != nil {
		return err
	}
	_, err = c.Read(make([]byte, 1))
	return err
}
