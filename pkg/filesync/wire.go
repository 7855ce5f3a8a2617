package filesync

import (
	"bufio"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net"
	"path"
	"strings"
	"sync"
	"time"
)

// The two ends exchange frames: a byte that says the kind, the length of the rest (32 bits, big endian), the rest.
//
//	source                                        target
//	hello: JSON, its version               ─▶
//	                                       ◀─     hello: the same
//	list: entries                     (n times)
//	                                       ◀─     differs: numbers of entries, in the order of the list, and how (n times)
//	listed                                 ─▶
//	                                       ◀─     gone: paths that a source named once and that were not listed (n times)
//	                                       ◀─     listed
//
//	then, for each round:
//	data: pieces of a tar archive     (n times)
//	data: empty, its end                   ─▶
//	touch: entries, for their mode and time
//	remove: paths, below before above
//	end: 1 after a comparison of everything, else 0
//	                                       ◀─     failed: a path and why (n times)
//	                                       ◀─     done: files, touched, removed, bytes; the error of OnSync
//
//	when the target cannot go on, at any time:
//	                                       ◀─     refused: why
//	the end of the connection              ─▶
//
// Either end sends an alive frame when it has sent nothing for a while. Each may be anywhere among the others.
//
// In lists, a number is a varint as encoding/binary has it, and a string is its length and its bytes. Paths are relative, clean,
// with slashes. The archive's records are PAX; a global header that has discardRecord says that the file before is not to be
// put into place, because it changed while it was read.
type kind byte

const (
	kindHello kind = iota + 1
	kindList
	kindDiffers
	kindGone
	kindListed
	kindData
	kindTouch
	kindRemove
	kindEnd
	kindFailed
	kindDone
	kindAlive
	kindRefused
)

// version is that of the wire format.
const version = 1

// ErrVersion is what Run and Serve give when the other end is of a version that this one does not understand.
var ErrVersion = errors.New("the two ends of the file sync have different versions")

// errProtocol is for what the other end must not send.
var errProtocol = errors.New("not the file sync's protocol")

const (
	headerSize = 5
	maxFrame   = 64 << 10 // of the rest
	maxPath    = 4096
	maxEntries = 1 << 20 // that a target remembers, and a list has

	aliveEvery = 5 * time.Second
	silence    = 30 * time.Second // until the other end counts as gone
	handshake  = 20 * time.Second // for the connection to be made, which may be no more than promised, and both hellos
	farewell   = 5 * time.Second  // for the source to take in that it is refused

	discardRecord = "KUBEVPN.discard"
)

// hello begins a connection, in both directions.
type hello struct {
	Protocol string `json:"protocol"` // helloProtocol
	Version  int    `json:"version"`
	// The source's.
	Name    string `json:"name,omitempty"`    // of Dir
	File    bool   `json:"file,omitempty"`    // it is one file, and all entries are called Name
	NoModes bool   `json:"noModes,omitempty"` // its system has none: the target keeps those that it has
}

const helloProtocol = "kubevpn-filesync"

// wire is a connection's frames. Sending is safe for concurrent use, receiving is for one goroutine.
type wire struct {
	conn net.Conn
	r    *bufio.Reader
	in   []byte
	// patience bounds each write, if it is not 0. A source has none: a target that computes hashes takes nothing for as long as
	// that takes, but says that it is alive.
	patience time.Duration

	mu   sync.Mutex
	out  []byte
	sent time.Time
}

func newWire(conn net.Conn) *wire {
	return &wire{conn: conn, r: bufio.NewReaderSize(conn, maxFrame), sent: time.Now()}
}

// send writes a frame.
func (w *wire) send(k kind, payload []byte) error {
	if len(payload) > maxFrame {
		return fmt.Errorf("a frame of %d bytes", len(payload))
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	w.out = append(w.out[:0], byte(k))
	w.out = binary.BigEndian.AppendUint32(w.out, uint32(len(payload)))
	w.out = append(w.out, payload...)
	w.sent = time.Now()
	if w.patience > 0 {
		_ = w.conn.SetWriteDeadline(w.sent.Add(w.patience)) // as with reading
	}
	_, err := w.conn.Write(w.out)
	return err
}

// keepAlive sends a frame whenever none was sent for a while, until done is closed or sending fails.
func (w *wire) keepAlive(done <-chan struct{}) {
	tick := time.NewTicker(aliveEvery)
	defer tick.Stop()
	for {
		select {
		case <-done:
			return
		case <-tick.C:
		}
		w.mu.Lock()
		idle := time.Since(w.sent) >= aliveEvery
		w.mu.Unlock()
		if idle && w.send(kindAlive, nil) != nil {
			return // whoever receives sees the end too
		}
	}
}

// receive reads the next frame that is not an alive one. The payload is valid until the next call.
func (w *wire) receive() (kind, []byte, error) {
	for {
		// If the connection is closed, reading says how.
		_ = w.conn.SetReadDeadline(time.Now().Add(silence))
		var header [headerSize]byte
		if _, err := io.ReadFull(w.r, header[:]); err != nil {
			return 0, nil, err
		}
		n := binary.BigEndian.Uint32(header[1:])
		if n > maxFrame {
			return 0, nil, fmt.Errorf("%w: a frame of %d bytes", errProtocol, n)
		}
		if int(n) > cap(w.in) {
			w.in = make([]byte, n, max(n, 4096))
		}
		w.in = w.in[:n]
		if _, err := io.ReadFull(w.r, w.in); err != nil {
			return 0, nil, unexpected(err)
		}
		if k := kind(header[0]); k != kindAlive {
			return k, w.in, nil
		}
	}
}

// refuse tells the source why it is not served any more, and waits for it to go: what is on its way to somebody who closes the
// connection before may be lost.
func (w *wire) refuse(why error) {
	w.mu.Lock()
	w.patience = farewell
	w.mu.Unlock()
	text := why.Error()
	if w.send(kindRefused, []byte(text[:min(len(text), maxFrame)])) != nil {
		return // it has gone already
	}
	_ = w.conn.SetReadDeadline(time.Now().Add(farewell)) // as with reading
	_, _ = io.Copy(io.Discard, w.r)                      // it ends when it ends
}

// refusal is what the target says when it cannot go on.
type refusal struct{ why string }

func (r *refusal) Error() string { return "at the other end: " + r.why }

func unexpected(err error) error {
	if errors.Is(err, io.EOF) {
		return io.ErrUnexpectedEOF
	}
	return err
}

func (w *wire) sendHello(h hello) error {
	h.Protocol, h.Version = helloProtocol, version
	b, err := json.Marshal(h)
	if err != nil {
		return err
	}
	return w.send(kindHello, b)
}

func (w *wire) receiveHello() (hello, error) {
	k, payload, err := w.receive()
	if err != nil {
		return hello{}, err
	}
	return parseHello(k, payload)
}

func parseHello(k kind, payload []byte) (hello, error) {
	var h hello
	if k != kindHello || json.Unmarshal(payload, &h) != nil || h.Protocol != helloProtocol {
		return hello{}, fmt.Errorf("%w: no hello", errProtocol)
	}
	if h.Version != version {
		return hello{}, fmt.Errorf("%w: %d here, %d there", ErrVersion, version, h.Version)
	}
	if h.File && checkPath(h.Name) != nil {
		return hello{}, fmt.Errorf("%w: the name %q", errProtocol, h.Name)
	}
	return h, nil
}

// list collects records into frames of one kind.
type list struct {
	w    *wire
	kind kind
	buf  []byte
}

// add appends a record, after it has sent what it would not fit with.
func (l *list) add(record []byte) error {
	if len(l.buf)+len(record) > maxFrame {
		if err := l.flush(); err != nil {
			return err
		}
	}
	l.buf = append(l.buf, record...)
	return nil
}

func (l *list) flush() error {
	if len(l.buf) == 0 {
		return nil
	}
	err := l.w.send(l.kind, l.buf)
	l.buf = l.buf[:0]
	return err
}

// entry is a file, a directory or a link.
type entry struct {
	kind  entryKind
	perm  fs.FileMode
	size  int64  // of a file
	mtime int64  // of a file, in nanoseconds
	link  string // where a link leads
}

type entryKind byte

const (
	file entryKind = 'f'
	dir  entryKind = 'd'
	link entryKind = 'l'
)

// newEntry is that of what Lstat found; false if it is nothing that is copied. A link's target is for the caller to read.
func newEntry(info fs.FileInfo) (entry, bool) {
	perm := info.Mode().Perm()
	switch info.Mode().Type() {
	case 0:
		return entry{kind: file, perm: perm, size: info.Size(), mtime: info.ModTime().UnixNano()}, true
	case fs.ModeDir:
		return entry{kind: dir, perm: perm | ownerAll}, true
	case fs.ModeSymlink:
		return entry{kind: link}, true
	}
	return entry{}, false
}

// ownerAll is what the owner of a directory needs for putting files into it.
const ownerAll fs.FileMode = 0o700

func (e entry) append(b []byte, p string) []byte {
	b = append(b, byte(e.kind))
	b = appendString(b, p)
	switch e.kind {
	case file:
		b = binary.AppendUvarint(b, uint64(e.perm))
		b = binary.AppendUvarint(b, uint64(e.size))
		b = binary.AppendVarint(b, e.mtime)
	case dir:
		b = binary.AppendUvarint(b, uint64(e.perm))
	case link:
		b = appendString(b, e.link)
	}
	return b
}

func appendString(b []byte, s string) []byte {
	return append(binary.AppendUvarint(b, uint64(len(s))), s...)
}

// records takes apart what a frame has. The first thing that is wrong stays in err, and from then on all is zero.
type records struct {
	rest []byte
	err  error
}

func (r *records) more() bool { return r.err == nil && len(r.rest) > 0 }

func (r *records) fail(what string) {
	if r.err == nil {
		r.err = fmt.Errorf("%w: %s", errProtocol, what)
	}
	r.rest = nil
}

func (r *records) byte() byte {
	if len(r.rest) == 0 {
		r.fail("a record is cut off")
		return 0
	}
	b := r.rest[0]
	r.rest = r.rest[1:]
	return b
}

func (r *records) uvarint(limit uint64) uint64 {
	v, n := binary.Uvarint(r.rest)
	if n <= 0 || v > limit {
		r.fail("a number is too big or cut off")
		return 0
	}
	r.rest = r.rest[n:]
	return v
}

func (r *records) varint() int64 {
	v, n := binary.Varint(r.rest)
	if n <= 0 {
		r.fail("a number is too big or cut off")
		return 0
	}
	r.rest = r.rest[n:]
	return v
}

func (r *records) bytes(n int) []byte {
	if n > len(r.rest) {
		r.fail("a record is cut off")
		return nil
	}
	b := r.rest[:n]
	r.rest = r.rest[n:]
	return b
}

func (r *records) string() string { return string(r.bytes(int(r.uvarint(maxFrame)))) }

func (r *records) path() string {
	p := r.string()
	if r.err != nil {
		return ""
	}
	if err := checkPath(p); err != nil {
		r.fail(err.Error())
		return ""
	}
	return p
}

func (r *records) entry() (string, entry) {
	e := entry{kind: entryKind(r.byte())}
	p := r.path()
	switch e.kind {
	case file:
		e.perm = fs.FileMode(r.uvarint(uint64(fs.ModePerm)))
		e.size = int64(r.uvarint(1<<63 - 1))
		e.mtime = r.varint()
	case dir:
		e.perm = fs.FileMode(r.uvarint(uint64(fs.ModePerm))) | ownerAll
	case link:
		e.link = r.string()
	default:
		r.fail("an entry of an unknown kind")
	}
	if r.err != nil {
		return "", entry{}
	}
	return p, e
}

// checkPath says what is wrong with a path that came over the wire. That it stays within the directory is os.Root's business; this
// is so that one path has one name.
func checkPath(p string) error {
	if p == "" || p == "." || len(p) > maxPath || path.Clean(p) != p || p[0] == '/' || p == ".." ||
		strings.HasPrefix(p, "../") || strings.ContainsRune(p, 0) {
		return fmt.Errorf("the path %q", p[:min(len(p), 100)])
	}
	return nil
}

// appendDone is what a done frame has; said is the error of OnSync.
func appendDone(b []byte, round Batch, said string) []byte {
	for _, n := range []int64{int64(round.Files), int64(round.Touched), int64(round.Removed), round.Bytes} {
		b = binary.AppendUvarint(b, uint64(n))
	}
	return appendString(b, said)
}
