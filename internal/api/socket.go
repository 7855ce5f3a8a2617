package api

// Paths of the HTTP interface that the daemon serves on its unix socket. Bodies are JSON; a status other than
// 200 has an Error as its body.
const (
	PathConnect    = "/v1/connect"    // POST a ConnectRequest; answers lines of Event
	PathDisconnect = "/v1/disconnect" // POST a DisconnectRequest; answers lines of Event
	PathIntercept  = "/v1/intercept"  // POST an InterceptRequest; answers lines of Event, one with Intercept for each workload; what it began ends when a body of unknown length ends before that
	PathLeave      = "/v1/leave"      // POST a LeaveRequest; answers lines of Event
	PathStatus     = "/v1/status"     // GET a Status
	PathDaemon     = "/v1/daemon"     // GET a DaemonInfo
	PathQuit       = "/v1/quit"       // POST nothing; answers lines of Event, then the daemon ends
)

// StatusNeedsHelper is the HTTP status with which PathConnect and PathIntercept refuse a request that is right, while the
// daemon has no root helper: hand one over, then ask again.
const StatusNeedsHelper = 428

// HeaderConnection names, in the answer of PathConnect and PathIntercept, the connection that the events are about.
const HeaderConnection = "Kubevpn-Connection"

// DaemonInfo says who answers on the socket.
type DaemonInfo struct {
	Version     string `json:"version"` // as version.Full
	PID         int    `json:"pid"`
	Connections int    `json:"connections"` // failed ones are not counted
	Helper      bool   `json:"helper"`      // a root helper is there
}
