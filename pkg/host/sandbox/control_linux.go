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

// The control socket is a SOCK_SEQPACKET pair. Each packet is one JSON message; some carry a descriptor.
//
//	parent                                   init
//	a file (memfd): the plan           ──▶
//	                                   ◀──   {"log":...}                       at any time
//	                                   ◀──   {"ready":true} + TUN, if any      or {"error":...}
//	{"id":1,"network":...}             ──▶
//	                                   ◀──   {"id":1}                          or {"id":1,"error":...}
//	{"id":2,"run":true}                ──▶
//	                                   ◀──   {"id":2}                          or {"id":2,"error":...}, and init's end
//	{"signal":2}                       ──▶
//	{"id":3,"dial":...}                ──▶
//	{"id":3,"cancel":true}             ──▶
//	                                   ◀──   {"id":3} + socket                 or {"id":3,"error":...}
//	{"id":4,"update":true} + a volume  ──▶
//	                                   ◀──   {"id":4}                          or {"id":4,"error":...}
//	                                   ◀──   {"ended":...}, and init's end
//	death                              ──▶   init's end
//
// Serve and Attach use the same messages, without plan, run and signals, and one more:
//
//	{"id":5,"resolve":...}             ──▶
//	                                   ◀──   {"id":5,"path":"..1/page"}        or {"id":5,"error":...}
const maxMessage = 64 << 10

// plan is the configuration of init.
type plan struct {
	Args, Env []string
	Dir       string
	Mounts    []Mount
	Volumes   []Volume
	Network   bool
}

// order is a message to init.
type order struct {
	ID      uint64   `json:"id,omitempty"`
	Network *Network `json:"network,omitempty"`
	Run     bool     `json:"run,omitempty"`
	Signal  int      `json:"signal,omitempty"`
	// OfTerminal reports that the terminal sent the signal to the process group of the parent and init.
	OfTerminal bool      `json:"ofTerminal,omitempty"`
	Dial       *endpoint `json:"dial,omitempty"`
	Cancel     bool      `json:"cancel,omitempty"`
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
	ID    uint64             `json:"id,omitempty"` // ID of the answered order
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
	if f == nil {
		_, err = w.conn.Write(b)
		return err
	}
	raw, err := f.SyscallConn()
	if err != nil {
		return err
	}
	var sendErr error
	err = raw.Control(func(fd uintptr) {
		_, _, sendErr = w.conn.WriteMsgUnix(b, unix.UnixRights(int(fd)), nil)
	})
	return errors.Join(err, sendErr)
}

// receive reads one message and its file, if it has one. It returns io.EOF when the other end has closed the socket.
func (w *controlConn) receive(message any) (*os.File, error) {
	packet, oob := make([]byte, maxMessage+1), make([]byte, unix.CmsgSpace(4))
	n, oobn, _, _, err := w.conn.ReadMsgUnix(packet, oob)
	if errors.Is(err, unix.ECONNRESET) {
		// The other end died with unread data. The kernel reports that once, before the messages that it had sent.
		n, oobn, _, _, err = w.conn.ReadMsgUnix(packet, oob)
	}
	if err == nil && n == 0 {
		err = io.EOF
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
