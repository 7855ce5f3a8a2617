package transport

import "time"

// StreamStats is a snapshot of a stream at one end.
type StreamStats struct {
	Sent, Received uint64 // bytes that the user has written and read, of datagrams without their headers
	Unread         int    // bytes that have arrived and that the user has not read
	Blocked        bool   // a write waits, because the other end's user does not read

	Link     int           // number of the stream's link
	Attached bool          // a conn carries the link
	Path     int           // of the conn: 0 is ClientConfig.Dial, i+1 is ClientConfig.Preferred[i]
	RTT      time.Duration // as in LinkStats
}

// Stats returns a snapshot. The counts cost the stream nothing: they are kept under locks that it takes anyway.
func (s *Stream) Stats() StreamStats {
	l := s.l
	st := StreamStats{Link: l.index, RTT: time.Duration(l.load.rtt.Load())}
	l.mu.Lock()
	st.Sent, st.Blocked = s.written, s.blocked
	if st.Attached = l.conn != nil; st.Attached {
		st.Path = int(l.conn.path)
	}
	l.mu.Unlock()
	s.mu.Lock()
	defer s.mu.Unlock()
	st.Received, st.Unread = s.taken, s.queue.size
	return st
}
