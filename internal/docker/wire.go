package docker

import (
	"encoding/json"
	"io"
	"math"
	"net"
	"time"

	"kubevpn/pkg/host/subreaper"
)

// Paths of kubevpn inside a container.
const (
	inside     = "/.kubevpn"
	binary     = inside + "/kubevpn" // a file, read-only
	control    = inside + "/run"     // a directory with the container's socket
	volumesAt  = inside + "/volumes" // in the network container: a tmpfs with the pod's volumes
	socketName = "socket"
)

// An order goes from kubevpn to PID 1 of a container, over the container's socket, as JSON; a report goes back.
//
//	{"program":...}  ─▶
//	                 ◀─  {} or {"error":...}, and the end
//	{"signal":15}    ─▶                          any number
//	                 ◀─  {"ended":0}, and the end
//
// A process whose socket ends, ends. (The network container uses the control socket of pkg/host/sandbox.)
type order struct {
	Program *program `json:"program,omitempty"`
	Signal  int      `json:"signal,omitempty"`
}

type report struct {
	Error *subreaper.Failure `json:"error,omitempty"`
	Ended *int               `json:"ended,omitempty"`
}

// program is the program that PID 1 starts, in the working directory of PID 1.
type program struct {
	Args []string `json:"args"`
	Env  []string `json:"env"` // overrides the environment that the engine gave PID 1
	TTY  bool     `json:"tty"`
}

// wire is one end of a socket. One goroutine may receive while another sends.
type wire struct {
	conn net.Conn
	most *io.LimitedReader // the reader of in
	in   *json.Decoder
	out  *json.Encoder
}

func newWire(conn net.Conn) *wire {
	most := &io.LimitedReader{R: conn, N: math.MaxInt64}
	return &wire{conn: conn, most: most, in: json.NewDecoder(most), out: json.NewEncoder(conn)}
}

// reportBytes is the size limit of a report. It holds the longest subreaper.Failure.
const reportBytes = 64 << 10

// receive reads a report. A report over the limit is an error: a container's program may have replaced our process.
func (w *wire) receive(r *report) error {
	w.most.N = reportBytes
	return w.in.Decode(r)
}

// answerTimeout limits the time of an answer, because the other end may have been stopped.
const answerTimeout = time.Minute

// ask sends an order and waits for its answer.
func (w *wire) ask(o order) error {
	if err := w.conn.SetDeadline(time.Now().Add(answerTimeout)); err != nil {
		return err
	}
	defer w.conn.SetDeadline(time.Time{}) // later messages may take any time
	if err := w.out.Encode(o); err != nil {
		return err
	}
	var r report
	if err := w.receive(&r); err != nil {
		return err
	}
	if r.Error != nil {
		return r.Error
	}
	return nil
}
