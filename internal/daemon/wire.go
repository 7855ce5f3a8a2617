package daemon

import (
	"kubevpn/internal/api"
)

// NewSession makes a Connection of internal/session. It is the one place where the two meet.
func NewSession(ConnectionConfig) (Connection, error) {
	return nil, api.Errorf(api.ExitUnexpected, "this build of kubevpn has no sessions")
}
