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

	"kubevpn/pkg/pid1"
)

// What goes over the control socket, a pair of type SOCK_SEQPACKET: one JSON message a packet, a descriptor with some.
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
// Serve and Attach say the same to each other, without plan, run, volumes and signals.
const maxMessage = 64 << 10

// plan is what init does.
type plan struct {
	Args, Env []string
	Dir       string
	Mounts    []Mount
	Volumes   []Volume
	Network   bool
}

// order is a message to init.
type order struct {
	ID      uint64    `json:"id,omitempty"`
	Network *Network  `json:"network,omitempty"`
	Run     bool      `json:"run,omitempty"`
	Signal  int       `json:"signal,omitempty"`
	Dial    *endpoint `json:"dial,omitempty"`
	Cancel  bool      `json:"cancel,omitempty"`
	Update  bool      `json:"update,omitempty"` // of a volume, which is in the file
}

type endpoint struct {
	Network string `json:"network"`
	Address string `json:"address"`
}

// report is a message from init.
type report struct {
	ID    uint64        `json:"id,omitempty"` // of the order that it answers
	Ready bool          `json:"ready,omitempty"`
	Error *pid1.Failure `json:"error,omitempty"`
	Ended *ExitStatus   `json:"ended,omitempty"`
	Log   *logLine      `json:"log,omitempty"`
}

type logLine struct {
	Level   slog.Level `json:"level"`
	Message string     `json:"msg"`
	Attrs   []string   `json:"attrs,omitempty"` // key, value, key, value
}

// wire is one end of the control socket. One goroutine may receive while any number send.
type wire struct {
	conn    *net.UnixConn
	files   string // what received files are called
	sending sync.Mutex
}

// openWire takes file over.
func openWire(file *os.File) (*wire, error) {
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
	return newWire(socket)
}

var errNotControl = errors.New("it is not a control socket, which is a unix socket of type SOCK_SEQPACKET")

// newWire takes conn over.
func newWire(conn *net.UnixConn) (*wire, error) {
	if conn.LocalAddr().Network() != "unixpacket" {
		conn.Close()
		return nil, errNotControl
	}
	return &wire{conn: conn}, nil
}

// send writes one message, and with it the descriptor of f unless f is nil. f stays the caller's.
func (w *wire) send(message any, f syscall.Conn) error {
	b, err := json.Marshal(message)
	if err != nil {
		return err
	}
	if len(b) > maxMessage {
		return fmt.Errorf("a message of %d bytes: at most %d", len(b), maxMessage)
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

// receive reads one message, and the descriptor that came with it if there was one. At the end it returns io.EOF.
func (w *wire) receive(message any) (*os.File, error) {
	packet, oob := make([]byte, maxMessage+1), make([]byte, unix.CmsgSpace(4))
	n, oobn, _, _, err := w.conn.ReadMsgUnix(packet, oob)
	if errors.Is(err, unix.ECONNRESET) {
		// The other end has died with something unread. This is said once, before what it had sent.
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
		if f, err = w.fileOf(oob[:oobn]); err != nil {
			return nil, err
		}
	}
	if n > maxMessage {
		err = fmt.Errorf("a message of more than %d bytes", maxMessage)
	} else {
		err = json.Unmarshal(packet[:n], message)
	}
	if err != nil && f != nil {
		f.Close()
		f = nil
	}
	return f, err
}

func (w *wire) fileOf(oob []byte) (*os.File, error) {
	messages, err := unix.ParseSocketControlMessage(oob)
	if err != nil {
		return nil, err
	}
	if len(messages) != 1 {
		return nil, fmt.Errorf("%d control messages", len(messages))
	}
	fds, err := unix.ParseUnixRights(&messages[0])
	if err != nil {
		return nil, err
	}
	if len(fds) != 1 {
		for _, fd := range fds {
			unix.Close(fd)
		}
		return nil, fmt.Errorf("%d descriptors", len(fds))
	}
	return os.NewFile(uintptr(fds[0]), w.files), nil
}
