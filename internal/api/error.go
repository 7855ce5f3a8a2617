package api

import (
	"errors"
	"fmt"
)

// ExitCode is the exit code of the kubevpn process. docs/troubleshooting.md documents each one.
type ExitCode int

const (
	ExitOK         ExitCode = 0
	ExitUnexpected ExitCode = 1 // any other failure
	ExitUsage      ExitCode = 2 // invalid flags or arguments

	ExitKubeconfig   ExitCode = 10 // no kubeconfig, or an unusable one
	ExitUnreachable  ExitCode = 11 // the API server does not answer
	ExitCredentials  ExitCode = 12 // the API server rejects the credentials (expired token, unknown certificate)
	ExitExecPlugin   ExitCode = 13 // the kubeconfig's credential plugin failed or hung
	ExitPermission   ExitCode = 14 // RBAC denies a verb that the command needs
	ExitIncompatible ExitCode = 15 // the traffic manager in the cluster speaks another protocol version
	ExitConsent      ExitCode = 16 // the request needs something that the user has not allowed

	ExitInstall   ExitCode = 20 // the traffic manager cannot be installed
	ExitImagePull ExitCode = 21 // the cluster cannot pull the image
	ExitNotReady  ExitCode = 22 // the traffic manager does not become ready in time
	ExitManaged   ExitCode = 23 // a Helm release owns the traffic manager, so only Helm changes it

	ExitPrivilege ExitCode = 30 // not root, and sudo is missing or refused
	ExitNoTUN     ExitCode = 31 // /dev/net/tun is missing or unusable
	ExitOverlap   ExitCode = 32 // a cluster network overlaps a local one
	ExitNetwork   ExitCode = 33 // links, routes or the resolver cannot be configured

	ExitProbe    ExitCode = 40 // a name, a pod or a ClusterIP could not be reached through the tunnel
	ExitLost     ExitCode = 41 // the session ended and cannot resume
	ExitNetstack ExitCode = 42 // the cluster does not support the requested netstack

	ExitDaemon       ExitCode = 50 // the daemon cannot be started or does not answer
	ExitNotConnected ExitCode = 51 // no connection has that ID

	ExitWorkload  ExitCode = 60 // no such workload, container or port, or none that can be intercepted
	ExitInject    ExitCode = 61 // the traffic agent cannot be added to the workload's pods
	ExitConflict  ExitCode = 62 // another owner has these requests
	ExitIntercept ExitCode = 63 // the intercept receives no traffic; kubevpn has undone it
	ExitMatch     ExitCode = 64 // an intercept there requires a match, and the request has none

	ExitEngine ExitCode = 70 // no usable Docker Engine, or it failed

	// The causes that `kubevpn why` finds.
	ExitNameMissing   ExitCode = 80 // the name has no address
	ExitNameTaken     ExitCode = 81 // a resolver other than kubevpn's answers for the name
	ExitRouteTaken    ExitCode = 82 // the address is not routed into the tunnel
	ExitNoPort        ExitCode = 83 // the Service has no such port
	ExitNoEndpoint    ExitCode = 84 // the Service has no endpoint that is ready
	ExitTargetPort    ExitCode = 85 // the Service sends to a port that the pods do not serve
	ExitClosedPort    ExitCode = 86 // nothing listens on the port of the pod
	ExitNetworkPolicy ExitCode = 87 // a NetworkPolicy blocks the connection
	ExitNoAnswer      ExitCode = 88 // no answer, for no other known cause
	ExitNoAgent       ExitCode = 89 // the pod that received the request has no traffic agent
	ExitHeaderLost    ExitCode = 90 // a header of the match did not reach the agent
	ExitOldConnection ExitCode = 91 // a connection from before the intercept carried the request
	ExitOtherMatch    ExitCode = 92 // another owner's intercept got the request
	ExitMesh          ExitCode = 93 // a service mesh takes requests before the agent
	ExitLocalPort     ExitCode = 94 // no program of this machine listens on the port of the intercept
	ExitLocalHang     ExitCode = 95 // the program of this machine does not answer

	// The results of `kubevpn diff`.
	ExitDiffer      ExitCode = 100 // answers differ
	ExitNotCompared ExitCode = 101 // there was nothing to compare

	ExitInterrupted ExitCode = 130 // Ctrl-C
)

// Error is a failure for a user to read: what failed, and what to do next. Processes exchange it as JSON. The zero
// value is not a valid Error.
type Error struct {
	Code    ExitCode `json:"code"`
	Message string   `json:"message"`        // one line, no trailing period
	Hint    string   `json:"hint,omitempty"` // what to do next; may contain a command and several lines
	// Needs lists the managers, networks and domains that the user must allow before the request can succeed. It is set
	// only with ExitConsent.
	Needs *Consent `json:"needs,omitempty"`
	cause error
}

// Errorf returns an Error with a message like fmt.Errorf. It supports %w.
func Errorf(code ExitCode, format string, args ...any) *Error {
	err := fmt.Errorf(format, args...)
	return &Error{Code: code, Message: err.Error(), cause: errors.Unwrap(err)}
}

// WithHint returns a copy of e with the hint set.
func (e *Error) WithHint(format string, args ...any) *Error {
	c := *e
	c.Hint = fmt.Sprintf(format, args...)
	return &c
}

func (e *Error) Error() string { return e.Message }

// Unwrap returns the cause of e, or nil if e came from another process.
func (e *Error) Unwrap() error { return e.cause }

// AsError converts err to an *Error. If the chain of err contains an *Error, the result has its code, hint and needs,
// and the message of err. Otherwise it has ExitUnexpected. AsError(nil) returns nil.
func AsError(err error) *Error {
	if err == nil {
		return nil
	}
	if e, ok := errors.AsType[*Error](err); ok {
		if e.Error() == err.Error() {
			return e
		}
		return &Error{Code: e.Code, Message: err.Error(), Hint: e.Hint, Needs: e.Needs, cause: err}
	}
	return &Error{Code: ExitUnexpected, Message: err.Error(), cause: err}
}
