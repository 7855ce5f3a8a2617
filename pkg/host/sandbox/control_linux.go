package sandbox

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"os"
	"sync"
	"syscall"

	"golang.org/x/sys/unix"

	"kubevpn/pkg/host/subreaper"
	"kubevpn/pkg/host/unixsocket"
)

// The control socket is a SOCK_SEQPACKET socket. Each packet is one JSON message; some carry a descriptor.
//
//	parent                                   init
//	a file (memfd): the plan           ──▶
//	                                   ◀──   {"log":...}                       at any time
//	                                   ◀──   {"ready":true} + TUN, if any      or {"error":...}
//	{} + a request's socket            ──▶                                     any number
//	{"signal":2}                       ──▶
//	                                   ◀──   {"ended":...}, and init's end
//	death                              ──▶   init's end
//
// Each request has a socket of its own, of the same type, which the parent closes to cancel a dial:
//
//	{"network":...}                    ──▶
//	                                   ◀──   {}                                or {"error":...}
//	{"run":true} + the program         ──▶
//	                                   ◀──   {}                                or {"error":...}
//	{"dial":...}                       ──▶
//	                                   ◀──   {} + socket                       or {"error":...}
//	{"update":true} + a volume         ──▶
//	                                   ◀──   {}                                or {"error":...}
//	{"resolve":...}                    ──▶
//	                                   ◀──   {"path":"..1/page"}               or {"error":...}
//
// Serve, ServeProgram and Attach use the same messages, without the plan.
const maxMessage = 64 << 10

// plan is the configuration of init.
type plan struct {
	Dir     string
	Mounts  []Mount
	Volumes []Volume
	Network bool
}

// order is a message to init. An empty one carries the socket of a request.
type order struct {
	Network *Network `json:"network,omitempty"`
	Run     bool     `json:"run,omitempty"` // the file contains the subreaper.Program
	Signal  int      `json:"signal,omitempty"`
	// OfTerminal reports that the terminal sent the signal to the process group of the parent and init.
	OfTerminal bool      `json:"ofTerminal,omitempty"`
	Dial       *endpoint `json:"dial,omitempty"`
	Update     bool      `json:"update,omitempty"` // the file contains the new Volume
	Resolve    *position `json:"resolve,omitempty"`
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
	Ready bool               `json:"ready,omitempty"`
	Error *subreaper.Failure `json:"error,omitempty"`
	Ended *ExitStatus        `json:"ended,omitempty"`
	Log   *logLine           `json:"log,omitempty"`
	Path  string             `json:"path,omitempty"` // the answer to Resolve
}

type logLine struct {
	Level   slog.Level `json:"level"`
	Message string     `json:"msg"`
	Attrs   []string   `json:"attrs,omitempty"` // key, value, key, value
}

// controlConn is one end of the control socket. One goroutine may receive while others send.
type controlConn struct {
	conn    *net.UnixConn
	files   string // name of received files
	sending sync.Mutex
}

// newPair returns both ends of a new control socket.
func newPair() (ours *controlConn, theirs *os.File, err error) {
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, nil, fmt.Errorf("creating a control socket: %w", err)
	}
	theirs = os.NewFile(uintptr(fds[1]), "control")
	if ours, err = openControl(os.NewFile(uintptr(fds[0]), "control")); err != nil {
		theirs.Close()
	}
	return ours, theirs, err
}

// openControl returns the control socket of file, which it closes.
func openControl(file *os.File) (*controlConn, error) {
	defer file.Close()
	conn, err := net.FileConn(file)
	if err != nil {
		return nil, err
	}
	socket, ok := conn.(*net.UnixConn)
	if !ok {
		conn.Close()
		return nil, errNotControl
	}
	return newControl(socket)
}

var errNotControl = errors.New("not a control socket, which is a unix socket of type SOCK_SEQPACKET")

// newControl returns a controlConn that owns conn.
func newControl(conn *net.UnixConn) (*controlConn, error) {
	if conn.LocalAddr().Network() != "unixpacket" {
		conn.Close()
		return nil, errNotControl
	}
	return &controlConn{conn: conn}, nil
}

// send writes one message, with the descriptor of f unless f is nil. It does not close f.
func (w *controlConn) send(message any, f syscall.Conn) error {
	b, err := json.Marshal(message)
	if err != nil {
		return err
	}
	if len(b) > maxMessage {
		return fmt.Errorf("message of %d bytes is longer than %d", len(b), maxMessage)
	}
	w.sending.Lock()
	defer w.sending.Unlock()
	_, err = unixsocket.Send(w.conn, b, f)
	return err
}

// receive reads one message and its file, if it has one. It returns io.EOF when the other end has closed the socket.
func (w *controlConn) receive(message any) (*os.File, error) {
	packet, oob := make([]byte, maxMessage+1), make([]byte, unix.CmsgSpace(4))
	var n, oobn int
	var err error
	for range 3 {
		n, oobn, _, _, err = w.conn.ReadMsgUnix(packet, oob)
		if err == nil && n == 0 {
			err = io.EOF
		}
		// The kernel may report each of these once before the last messages: that the other end died with unread data,
		// and the end, if the other end sent and closed after the kernel had found the queue empty.
		if !errors.Is(err, unix.ECONNRESET) && !errors.Is(err, io.EOF) {
			break
		}
	}
	if err != nil {
		return nil, err
	}
	var f *os.File
	if oobn > 0 {
		if f, err = unixsocket.File(oob[:oobn], w.files); err != nil {
			return nil, err
		}
	}
	if n > maxMessage {
		err = fmt.Errorf("message is longer than %d bytes", maxMessage)
	} else {
		err = json.Unmarshal(packet[:n], message)
	}
	if err != nil && f != nil {
		f.Close()
		f = nil
	}
	return f, err
}
