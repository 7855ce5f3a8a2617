package docker

import (
	"encoding/json"
	"io"
	"math"
	"net"
	"time"

	"kubevpn/pkg/host/subreaper"
)

// Where a container has what is ours.
const (
	inside     = "/.kubevpn"
	binary     = inside + "/kubevpn" // a file, read-only
	control    = inside + "/run"     // a directory, with the container's socket
	volumesAt  = inside + "/volumes" // the network container's: a tmpfs with the pod's volumes
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

// program is what PID 1 runs. The working directory is PID 1's own.
type program struct {
	Args []string `json:"args"`
	Env  []string `json:"env"` // wins over what the engine has given PID 1
	TTY  bool     `json:"tty"`
}

// wire is one end of a socket. One goroutine may receive while another sends.
type wire struct {
	conn net.Conn
	most *io.LimitedReader // what in reads
	in   *json.Decoder
	out  *json.Encoder
}

func newWire(conn net.Conn) *wire {
	most := &io.LimitedReader{R: conn, N: math.MaxInt64}
	return &wire{conn: conn, most: most, in: json.NewDecoder(most), out: json.NewEncoder(conn)}
}

// reportBytes is the size limit of a report. It holds the longest subreaper.Failure.
const reportBytes = 64 << 10

// receive reads a report. A longer one ends the wire: a container's program may have replaced our process there.
func (w *wire) receive(r *report) error {
	w.most.N = reportBytes
	return w.in.Decode(r)
}

// answerTimeout is how long the other end may take: it may have been stopped.
const answerTimeout = time.Minute

// ask sends an order and waits for its answer.
func (w *wire) ask(o order) (report, error) {
	var r report
	if err := w.conn.SetDeadline(time.Now().Add(answerTimeout)); err != nil {
		return r, err
	}
	// What is sent and received without a question may wait.
	defer w.conn.SetDeadline(time.Time{})
	if err := w.out.Encode(o); err != nil {
		return r, err
	}
	if err := w.receive(&r); err != nil {
		return r, err
	}
	if r.Error != nil {
		return r, r.Error
	}
	return r, nil
}
