package helper

import (
	"errors"
	"os"

	"kubevpn/internal/api"
	"kubevpn/pkg/host/unixsocket"
)

// Daemon and helper send JSON messages over a stream, one at a time in each direction. A descriptor
// arrives with its message (unixsocket.Conn).
//
//	daemon                                  helper
//	                                  ◀──   {"ready":true,"protocol":1}    once, read by Start
//	{"id":1,"op":"tun","name":...}    ──▶
//	                                  ◀──   {"id":1,"name":...} + descriptor
//	{"id":2,"op":"apply","state":...} ──▶
//	                                  ◀──   {"id":2,"applied":...}
//	                                  ◀──   {"changed":...} {"log":...}    at any time
//	shutdown(SHUT_WR), or death       ──▶   removes everything
//	                                  ◀──   {"closed":true,"error":...}
//	                                  ◀──   close, exit

// protocol is the version of the messages. The helper of the service can be of another kubevpn than the daemon.
// Increase the version when one of the two would misread, or miss, what the other sends.
const protocol = 1

type operation string

const (
	opTUN    operation = "tun"
	opApply  operation = "apply"
	opSocket operation = "socket"
)

// request is a message to the helper.
type request struct {
	ID      uint64            `json:"id"`
	Op      operation         `json:"op"`
	Name    string            `json:"name,omitempty"`    // opTUN
	MTU     int               `json:"mtu,omitempty"`     // opTUN
	State   *api.NetworkState `json:"state,omitempty"`   // opApply
	Network string            `json:"network,omitempty"` // opSocket
}

// response is a message from the helper.
type response struct {
	ID      uint64              `json:"id,omitempty"`   // of the request; 0: unasked
	Name    string              `json:"name,omitempty"` // of the file that comes with it; opTUN: of the interface
	Error   *api.Error          `json:"error,omitempty"`
	Applied *api.NetworkApplied `json:"applied,omitempty"`
	Changed *api.NetworkApplied `json:"changed,omitempty"`
	Log     *unixsocket.LogLine `json:"log,omitempty"` // the helper writes no files; the daemon logs it
	Ready   bool                `json:"ready,omitempty"`
	Closed  bool                `json:"closed,omitempty"`

	Protocol int    `json:"protocol,omitempty"` // with Ready
	Version  string `json:"version,omitempty"`  // with Ready: of the helper's program
}

// maxMessage bounds a message in bytes: routes, named networks and domains of 16 links, each at its limit, are less.
const maxMessage = 16 << 20

// openWire returns the end of the stream that owns socket, which Start must have created.
func openWire(socket *os.File) (*unixsocket.Conn, error) {
	w, err := unixsocket.Open(socket, maxMessage)
	if err != nil {
		return nil, errors.New("not a socket of `kubevpn connect`")
	}
	return w, nil
}

// copyWire is openWire for a copy of socket, which stays open.
func copyWire(socket *os.File) (*unixsocket.Conn, error) {
	f, err := unixsocket.Dup(socket, "socket")
	if err != nil {
		return nil, err
	}
	return openWire(f)
}
