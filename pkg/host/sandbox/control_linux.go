package sandbox

import (
	"fmt"
	"net/netip"
	"os"

	"kubevpn/pkg/host/subreaper"
	"kubevpn/pkg/host/unixsocket"
)

// The control socket is a unix stream socket. Some of its JSON messages carry a descriptor (unixsocket.Conn).
//
//	parent                                   init
//	a file (memfd): initConfig         ──▶
//	                                   ◀──   {"log":...}                       at any time
//	                                   ◀──   {"files":"/data"} + /dev/fuse     for each remote mount
//	                                   ◀──   {"ready":true} + TUN, if any      or {"error":...}
//	{} + a request's socket            ──▶                                     any number
//	{"signal":2}                       ──▶
//	                                   ◀──   {"ended":...}, and init's end
//	death                              ──▶   init's end
//
// Each request has a socket of its own, which the parent closes to cancel a dial:
//
//	{"network":...}                    ──▶
//	                                   ◀──   {}                                or {"error":...}
//	{"run":true} + the program         ──▶
//	                                   ◀──   {}                                or {"error":...}
//	{"dial":...}                       ──▶
//	                                   ◀──   {} + socket                       or {"error":...}
//	{"localhost":...}                  ──▶
//	                                   ◀──   {} + listener                     or {"error":...}
//	{"update":true} + a volume         ──▶
//	                                   ◀──   {}                                or {"error":...}
//	{"resolve":...}                    ──▶
//	                                   ◀──   {"path":"..1/page"}               or {"error":...}
//
// Serve, ServeProgram and Attach use the same messages, without init's configuration.
const maxMessage = 1 << 20 // bytes; a hosts file is the largest part

// initConfig is the configuration of init.
type initConfig struct {
	Dir      string
	Mounts   []Mount
	Volumes  []Volume
	Network  bool
	Names    bool
	Hostname string
}

// order is a message to init. An empty one carries the socket of a request.
type order struct {
	Network *Network `json:"network,omitempty"`
	Run     bool     `json:"run,omitempty"` // the file contains the subreaper.Program
	Signal  int      `json:"signal,omitempty"`
	// OfTerminal reports that the terminal sent the signal to the process group of the parent and init.
	OfTerminal bool              `json:"ofTerminal,omitempty"`
	Dial       *endpoint         `json:"dial,omitempty"`
	Update     bool              `json:"update,omitempty"` // the file contains the new Volume
	Resolve    *position         `json:"resolve,omitempty"`
	Localhost  *[]netip.AddrPort `json:"localhost,omitempty"`
}

type endpoint struct {
	Network string `json:"network"`
	Address string `json:"address"`
}

// position is a path of a volume.
type position struct {
	Volume string `json:"volume"`
	Path   string `json:"path"`
}

// report is a message from init.
type report struct {
	Ready bool                `json:"ready,omitempty"`
	Error *subreaper.Failure  `json:"error,omitempty"`
	Ended *ExitStatus         `json:"ended,omitempty"`
	Log   *unixsocket.LogLine `json:"log,omitempty"`
	Path  string              `json:"path,omitempty"`  // the answer to Resolve
	Files string              `json:"files,omitempty"` // the path of a remote mount
}

// newPair returns both ends of a new control socket.
func newPair() (ours *unixsocket.Conn, theirs *os.File, err error) {
	file, theirs, err := unixsocket.Pair("control")
	if err != nil {
		return nil, nil, fmt.Errorf("creating a control socket: %w", err)
	}
	if ours, err = unixsocket.Open(file, maxMessage); err != nil {
		theirs.Close()
	}
	return ours, theirs, err
}
