package manager

// Limits for all laptops together. The Deployment limits the manager's memory to 1 GiB, of which a large cluster's
// Services and endpoints use up to a quarter (docs/security.md, "Limits").
const (
	// maxStreams bounds flows. An idle one uses less than 12 kB, including its goroutines and its socket. One laptop
	// may open half of them.
	maxStreams = 24 << 10
	// maxBuffered bounds bytes that a slow pod or laptop has not read yet.
	maxBuffered = 384 << 20
	// maxLinks bounds the conns of one session. A laptop has five.
	maxLinks = 8
	// maxSessions bounds sessions, including those without a conn.
	maxSessions = 1024
)
