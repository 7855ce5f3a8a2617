package api

import (
	"errors"
	"fmt"
)

// ExitCode is what the kubevpn process exits with. The table in docs/troubleshooting.md documents each one;
// a test holds the two together.
type ExitCode int

const (
	ExitOK         ExitCode = 0
	ExitUnexpected ExitCode = 1 // a fault that none of the codes below names
	ExitUsage      ExitCode = 2 // flags or arguments that cannot be understood

	ExitKubeconfig   ExitCode = 10 // no kubeconfig, or one that cannot be used
	ExitUnreachable  ExitCode = 11 // the API server does not answer
	ExitCredentials  ExitCode = 12 // the API server rejects the credentials (expired token, unknown certificate)
	ExitExecPlugin   ExitCode = 13 // the kubeconfig's credential plugin failed or hung
	ExitPermission   ExitCode = 14 // RBAC denies a verb that the command needs
	ExitIncompatible ExitCode = 15 // the traffic manager in the cluster speaks another protocol version

	ExitInstall   ExitCode = 20 // the traffic manager cannot be installed
	ExitImagePull ExitCode = 21 // the cluster cannot pull the image
	ExitNotReady  ExitCode = 22 // the traffic manager does not become ready in time

	ExitPrivilege ExitCode = 30 // not root, and sudo is missing or refused
	ExitNoTUN     ExitCode = 31 // /dev/net/tun is missing or unusable
	ExitClash     ExitCode = 32 // a cluster network overlaps a local one
	ExitNetwork   ExitCode = 33 // links, routes or the resolver cannot be configured

	ExitCanary   ExitCode = 40 // a name, a pod or a ClusterIP could not be reached through the tunnel
	ExitLost     ExitCode = 41 // the session ended and could not be continued
	ExitNetstack ExitCode = 42 // the netstack that was asked for cannot be had on this cluster

	ExitDaemon       ExitCode = 50 // the daemon cannot be started or does not answer
	ExitNotConnected ExitCode = 51 // no connection has that ID

	ExitWorkload  ExitCode = 60 // there is no such workload, container or port, or nothing of it can be intercepted
	ExitInject    ExitCode = 61 // the traffic agent cannot be added to the workload's pods
	ExitConflict  ExitCode = 62 // another owner has these requests
	ExitIntercept ExitCode = 63 // the intercept takes no traffic, and was undone

	ExitEngine ExitCode = 70 // there is no Docker Engine that can be used, or it does not do what it has to

	ExitInterrupted ExitCode = 130 // Ctrl-C
)

// Error is a failure that a user is shown: what happened, and what to do next. It crosses process borders
// as JSON. The zero value is not a valid Error.
type Error struct {
	Code    ExitCode `json:"code"`
	Message string   `json:"message"`        // one line, no trailing period
	Hint    string   `json:"hint,omitempty"` // the next step; may name a command; may span lines
	cause   error
}

// Errorf makes an Error whose message is formatted like fmt.Errorf, %w included.
func Errorf(code ExitCode, format string, args ...any) *Error {
	err := fmt.Errorf(format, args...)
	return &Error{Code: code, Message: err.Error(), cause: errors.Unwrap(err)}
}

// WithHint returns e with the next step set.
func (e *Error) WithHint(format string, args ...any) *Error {
	c := *e
	c.Hint = fmt.Sprintf(format, args...)
	return &c
}

func (e *Error) Error() string { return e.Message }

// Unwrap returns what caused e on this side of a process border; it does not cross one.
func (e *Error) Unwrap() error { return e.cause }

// AsError returns err as an *Error: itself if there is one in its chain, with the outer message kept, else
// one with ExitUnexpected. AsError(nil) is nil.
func AsError(err error) *Error {
	if err == nil {
		return nil
	}
	var e *Error
	if errors.As(err, &e) {
		if e.Error() == err.Error() {
			return e
		}
		return &Error{Code: e.Code, Message: err.Error(), Hint: e.Hint, cause: err}
	}
	return &Error{Code: ExitUnexpected, Message: err.Error(), cause: err}
}
