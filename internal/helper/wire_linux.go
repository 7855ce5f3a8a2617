package helper

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

	"kubevpn/internal/api"
	"kubevpn/pkg/host/unixsocket"
)

// The socketpair carries JSON messages, one at a time in each direction. A message is one SOCK_SEQPACKET packet, or
// several for a long one. The first byte of a packet says whether more of the message follows. A descriptor comes with
// a message's last packet.
//
//	packet = more | last, up to 32 KiB of a message
//
//	daemon                                  helper
//	                                  ◀──   {"ready":true}                 once, read by Start
//	{"id":1,"op":"tun","name":...}    ──▶
//	                                  ◀──   {"id":1} + descriptor
//	{"id":2,"op":"apply","state":...} ──▶
//	                                  ◀──   {"id":2,"applied":...}
//	                                  ◀──   {"changed":...} {"log":...}    at any time
//	shutdown(SHUT_WR), or death       ──▶   removes everything
//	                                  ◀──   {"closed":true,"error":...}
//	                                  ◀──   close, exit
const (
	packetLast, packetMore = 0, 1
	maxPacket              = 32 << 10
	maxMessage             = 16 << 20 // routes, named networks and domains of 16 links, each at its limit, are less
)

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
	ID      uint64              `json:"id,omitempty"` // of the request; 0: unasked
	Error   *api.Error          `json:"error,omitempty"`
	Applied *api.NetworkApplied `json:"applied,omitempty"`
	Changed *api.NetworkApplied `json:"changed,omitempty"`
	Log     *logLine            `json:"log,omitempty"`
	Ready   bool                `json:"ready,omitempty"`
	Closed  bool                `json:"closed,omitempty"`
}

// logLine is a log record of the helper. The helper writes no files; the daemon logs it.
type logLine struct {
	Level   slog.Level `json:"level"`
	Message string     `json:"msg"`
	Attrs   []string   `json:"attrs,omitempty"` // key, value, key, value
}

// wire is one end of the socketpair. One goroutine may receive while any number send.
type wire struct {
	conn    *net.UnixConn
	sending sync.Mutex
}

// openWire returns a wire that owns socket, which must be an end of a SOCK_SEQPACKET pair.
func openWire(socket *os.File) (*wire, error) {
	defer socket.Close()
	if err := checkSocket(int(socket.Fd())); err != nil {
		return nil, err
	}
	conn, err := net.FileConn(socket)
	if err != nil {
		return nil, err
	}
	return &wire{conn: conn.(*net.UnixConn)}, nil
}

// checkSocket returns an error for a descriptor that Start does not create.
func checkSocket(fd int) error {
	for _, want := range []struct{ option, value int }{
		{unix.SO_DOMAIN, unix.AF_UNIX}, {unix.SO_TYPE, unix.SOCK_SEQPACKET},
	} {
		if got, err := unix.GetsockoptInt(fd, unix.SOL_SOCKET, want.option); err != nil || got != want.value {
			return errors.New("not a socket of `kubevpn connect`")
		}
	}
	return nil
}

// send writes one message, and a descriptor with it if f is not nil. The caller keeps f.
func (w *wire) send(message any, f *os.File) error {
	b, err := json.Marshal(message)
	if err != nil {
		return err
	}
	if len(b) > maxMessage {
		return fmt.Errorf("the message has %d bytes, more than the limit of %d", len(b), maxMessage)
	}
	w.sending.Lock()
	defer w.sending.Unlock()
	for {
		n := min(len(b), maxPacket)
		packet := append([]byte{packetMore}, b[:n]...)
		var with syscall.Conn
		if b = b[n:]; len(b) == 0 {
			packet[0] = packetLast
			if f != nil {
				with = f
			}
		}
		if _, err := unixsocket.Send(w.conn, packet, with); err != nil {
			return err
		}
		if len(b) == 0 {
			return nil
		}
	}
}

// receive reads one message into message, and returns the descriptor that came with it if files is true. At the end it
// returns io.EOF.
func (w *wire) receive(message any, files bool) (f *os.File, err error) {
	var b []byte
	packet := make([]byte, maxPacket+2)
	oob := []byte(nil) // the kernel discards descriptors without room
	if files {
		oob = make([]byte, unix.CmsgSpace(4))
	}
	defer func() {
		if err != nil && f != nil {
			f.Close()
			f = nil
		}
	}()
	for {
		n, oobn, _, _, err := w.conn.ReadMsgUnix(packet, oob)
		if err != nil {
			if errors.Is(err, unix.ECONNRESET) {
				err = io.EOF // the other end ended with unread data
			}
			return f, err
		}
		if oobn > 0 && f == nil {
			if f, err = unixsocket.File(oob[:oobn], "from helper"); err != nil {
				return nil, err
			}
		}
		if n > maxPacket+1 || len(b)+n > maxMessage {
			return f, fmt.Errorf("the message has more than %d bytes", maxMessage)
		}
		b = append(b, packet[1:n]...)
		if packet[0] == packetLast {
			return f, json.Unmarshal(b, message)
		}
	}
}
