//go:build !linux

package dial

import "net"

// udpSocket is a connected UDP socket.
type udpSocket struct{ *net.UDPConn }

// newUDPSocket returns a udpSocket that owns c.
func newUDPSocket(c *net.UDPConn) (*udpSocket, error) { return &udpSocket{c}, nil }

// send sends the datagrams in p, each of which has size bytes, except that the last may be shorter.
func (s *udpSocket) send(p []byte, size int) error {
	for one := range each(p, size) {
		if _, err := s.Write(one); err != nil && !isLoss(err) {
			return err
		}
	}
	return nil
}

// receive calls use with each datagram, until an error.
func (s *udpSocket) receive(b *buffers, use func(p []byte, size int) error) error {
	return readSocket(s, b, false, func(p []byte) error { return use(p, len(p)) })
}
