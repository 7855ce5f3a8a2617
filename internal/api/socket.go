package api

// Paths of the HTTP interface that the daemon serves on its unix socket. Bodies are JSON; a status other than
// 200 has an Error as its body. PathConnect answers an Event with the Connection at last, PathIntercept one Event with
// Intercept for each workload. If the body of such a request has no length, its end interrupts the request: the answer
// continues with the events of the cleanup.
const (
	PathPrepare    = "/v1/prepare"    // POST the ConnectRequest that may follow, as far as it is known; answers null
	PathConnect    = "/v1/connect"    // POST a ConnectRequest; answers lines of Event
	PathDisconnect = "/v1/disconnect" // POST a DisconnectRequest; answers lines of Event
	PathIntercept  = "/v1/intercept"  // POST an InterceptRequest; answers lines of Event
	PathRequests   = "/v1/requests"   // POST a RequestsRequest; answers lines of Record
	PathLeave      = "/v1/leave"      // POST a LeaveRequest; answers lines of Event
	PathUp         = "/v1/up"         // POST a project.Request; answers lines of Event
	PathDown       = "/v1/down"       // POST the name of a file; answers lines of Event
	PathStatus     = "/v1/status"     // GET a Status
	PathTrace      = "/v1/trace"      // POST a TraceRequest; answers []InterceptTrace
	PathFlows      = "/v1/flows"      // GET with ParamLimit and ParamFollow; answers lines of FlowList
	PathDNS        = "/v1/dns"        // GET with ParamFollow and ParamAll; answers lines of DNSQuery
	PathPage       = "/v1/page"       // POST a PageRequest; answers a Page
	PathQuit       = "/v1/quit"       // POST nothing; answers lines of Event, then the daemon ends
)

// Parameters of GET requests that answer lines.
const (
	ParamFollow = "follow" // "true": lines until the client has gone; else the first one
	ParamAll    = "all"    // "true", with ParamFollow: also queries that go to no cluster, from now on
	ParamLimit  = "limit"  // the most items of a line; 0 or none: all
)

// StatusNeedsHelper is the HTTP status of PathConnect and PathIntercept if the daemon has no root helper. The CLI then
// hands one over and sends the request again.
const StatusNeedsHelper = 428
