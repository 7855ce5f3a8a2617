//go:build linux

package agent

import (
	"context"
	"errors"
	"log/slog"
	"net"
	"net/netip"
	"time"

	"kubevpn/pkg/wakeup"
	"kubevpn/pkg/wire/authlistener"
)

const (
	// infoTime is how long an agent serves its info on a port. By then the owner has it from there, or from the
	// container's log.
	infoTime = time.Minute
	// infoWriteTimeout bounds a write to a client that does not read. The line fits into the socket's buffer.
	infoWriteTimeout = time.Second
)

// infoServer serves api.AgentInfoPortVariable's port: it sends the latest line of api.AgentInfo to every client within
// the pod's network. Clients that connect before there is a line wait in the kernel's queue. The line is no secret, and
// the server reads nothing: the log, which the kubelet gives later, has the same. A nil infoServer does nothing.
//
// The laptop that reads the line through the kubelet's port-forward knows that a container of this pod sent it, not
// that the agent did. Another container of the pod could take the port first and answer with a key of its own. It would
// get the laptop's claim, and could open streams to the ports of the laptop that the claim names. The pod's requests go
// to these ports as well, and they are for the pod's containers anyway. The other container would not learn the
// laptop's key, which never leaves the laptop, and could not give orders to this agent. The application's TLS key goes
// only to the agent that the log names.
type infoServer struct {
	listener net.Listener
	log      *slog.Logger

	line wakeup.Value[[]byte] // nil: there is none yet
}

// openInfoServer serves on the port until closed is called, or infoTime has passed. If another process has the port, it
// logs that and returns nil: the owner reads the log.
func openInfoServer(port uint16, log *slog.Logger) (s *infoServer, closed func()) {
	if port == 0 {
		return nil, func() {}
	}
	at := netip.AddrPortFrom(netip.AddrFrom4([4]byte{127, 0, 0, 1}), port)
	l, err := net.Listen("tcp", at.String())
	if err != nil {
		log.Warn("cannot serve the agent's information; the owner's laptop waits for this log", "err", err)
		return nil, func() {}
	}
	s = &infoServer{listener: l, log: log}
	return s, wakeup.Go(context.Background(), s.serve)
}

func (s *infoServer) serve(ctx context.Context) {
	ctx, cancel := context.WithTimeout(ctx, infoTime)
	defer cancel()
	defer s.close()
	defer context.AfterFunc(ctx, s.close)()
	if _, err := s.line.Await(ctx, func(line []byte) bool { return line != nil }); err != nil {
		return
	}
	_ = authlistener.Serve(ctx, s.listener, s.log, func(conn net.Conn) { // the error is that the listener is closed
		err := conn.SetWriteDeadline(time.Now().Add(infoWriteTimeout))
		if err == nil {
			_, err = conn.Write(s.line.Load())
		}
		if err = errors.Join(err, conn.Close()); err != nil {
			s.log.Debug("cannot send the info", "err", err)
		}
	})
}

// set replaces the line.
func (s *infoServer) set(line []byte) {
	if s != nil {
		s.line.Update(func(latest *[]byte) { *latest = line })
	}
}

// close stops listening. It may be called more than once.
func (s *infoServer) close() {
	if s != nil {
		s.listener.Close()
	}
}
