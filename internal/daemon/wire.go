package daemon

import "kubevpn/internal/session"

// NewSession makes a Connection of internal/session. It is the one place where the two meet.
func NewSession(c ConnectionConfig) (Connection, error) {
	s, err := session.New(session.Config{
		Request: c.Request, Network: c.Network, ClientID: c.ClientID, Progress: c.Progress, Logger: c.Logger,
	})
	if err != nil {
		return nil, err // a bare return of (s, err) would be a typed nil in the interface
	}
	return s, nil
}
