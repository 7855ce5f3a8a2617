package filesync

import (
	"bufio"
	"cmp"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net"
	"path"
	"slices"
	"strings"
	"sync"
	"time"
)

// kind is the first byte of a frame. The length of the payload (32 bits, big endian) and the payload follow.
//
//	source                                        target
//	hello: JSON                            ─▶
//	                                       ◀─     hello: JSON
//	                                       ◀─     entry: a path that was sent earlier and still exists (n times)
//	                                       ◀─     end
//
//	then, for each round:
//	entry: a directory, a link, or the start of a file ─┐
//	data: content of the file          (n times)        │ (n times)
//	put or discard: the end of the file                ─┘
//	remove: a path, children before parents (n times)
//	end: 1 if the target now has everything, else 0 ─▶
//	                                       ◀─     failed: JSON, a path and the reason (n times)
//	                                       ◀─     done: JSON, a Batch
//
//	instead of any of its frames:          ◀─     refused: the reason
//	the end of the connection              ─▶
//
// Both ends send an alive frame every 5 seconds, between any other two frames. Content is not a tar archive, since a
// tar header promises the size before the content is read, and a file that changes meanwhile must be discarded.
type kind byte

const (
	kindHello kind = iota + 1
	kindEntry
	kindData
	kindPut
	kindDiscard
	kindRemove
	kindEnd
	kindFailed
	kindDone
	kindAlive
	kindRefused
)

// The newest and the oldest version of the wire format that this end speaks. Both ends use the newest that both speak.
const version, oldestVersion = 2, 2

// ErrVersion is the error of Run and Serve when the two ends speak different versions.
var ErrVersion = errors.New("the two ends of the file sync have different versions")

// errRefused precedes the reason of a refused frame.
var errRefused = errors.New("at the other end")

// errProtocol means that the other end sent something that the protocol does not allow.
var errProtocol = errors.New("file sync protocol violated")

const (
	headerSize = 5
	maxFrame   = 64 << 10 // of the payload
	maxPath    = 4096
	maxEntries = 1 << 20  // that a target remembers
	maxNames   = 64 << 20 // bytes of the paths that a source accepts from a target

	aliveEvery   = 5 * time.Second
	silence      = 30 * time.Second // without a frame, until the connection counts as broken
	helloTimeout = 20 * time.Second // for the connection to be established and both hellos
	lingerTime   = 5 * time.Second  // for the source to read why it was refused
)

// hello is the first frame in each direction.
type hello struct {
	Protocol string `json:"protocol"`                // helloProtocol
	Version  int    `json:"version"`                 // the newest
	Oldest   int    `json:"oldestVersion,omitempty"` // 0: Version alone
	// Only the source sets these.
	File string `json:"file,omitempty"` // the only path that it will send; empty: a directory
	Name string `json:"name,omitempty"` // what the user calls that file
}

const helloProtocol = "kubevpn-filesync"

// failedReport is the payload of a failed frame.
type failedReport struct {
	Path  []byte `json:"path"`
	Error string `json:"error"`
}

// wire sends and receives frames. Sending is safe for concurrent use; receiving is for one goroutine.
type wire struct {
	conn net.Conn
	r    *bufio.Reader
	in   []byte

	mu           sync.Mutex
	out          *bufio.Writer
	writeTimeout time.Duration // of each write; 0: none
}

func newWire(conn net.Conn) *wire {
	return &wire{conn: conn, r: bufio.NewReaderSize(conn, maxFrame), out: bufio.NewWriterSize(conn, maxFrame)}
}

// send sends a frame. Frames that describe files stay in the buffer until it is full or another frame follows.
func (w *wire) send(k kind, payload []byte) error {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.writeTimeout > 0 {
		_ = w.conn.SetWriteDeadline(time.Now().Add(w.writeTimeout)) // a closed connection reports its error below
	}
	header := binary.BigEndian.AppendUint32(append(w.out.AvailableBuffer(), byte(k)), uint32(len(payload)))
	_, _ = w.out.Write(header) // the next write returns the same error
	_, err := w.out.Write(payload)
	switch k {
	case kindEntry, kindData, kindPut, kindDiscard, kindRemove, kindFailed:
		return err
	}
	return w.out.Flush()
}

func (w *wire) sendJSON(k kind, v any) error {
	b, err := json.Marshal(v)
	if err != nil {
		return err
	}
	return w.send(k, b)
}

// keepAlive sends alive frames until done is closed or sending fails.
func (w *wire) keepAlive(done <-chan struct{}) {
	tick := time.NewTicker(aliveEvery)
	defer tick.Stop()
	for {
		select {
		case <-done:
			return
		case <-tick.C:
			if w.send(kindAlive, nil) != nil {
				return // the receiver sees the end too
			}
		}
	}
}

// receive returns the next frame that is not an alive frame. The payload is valid until the next call.
func (w *wire) receive() (kind, []byte, error) {
	for {
		_ = w.conn.SetReadDeadline(time.Now().Add(silence)) // a closed connection reports its error when it is read
		var header [headerSize]byte
		if _, err := io.ReadFull(w.r, header[:]); err != nil {
			return 0, nil, err
		}
		n := binary.BigEndian.Uint32(header[1:])
		if n > maxFrame {
			return 0, nil, fmt.Errorf("%w: a frame of %d bytes", errProtocol, n)
		}
		w.in = slices.Grow(w.in[:0], int(n))[:n]
		if _, err := io.ReadFull(w.r, w.in); err != nil {
			return 0, nil, unexpected(err)
		}
		if k := kind(header[0]); k != kindAlive {
			return k, w.in, nil
		}
	}
}

// refuse tells the source why the target ends the connection, and waits until the source closes it: closing first could
// discard the reason.
func (w *wire) refuse(reason error) {
	w.mu.Lock()
	w.writeTimeout = lingerTime
	w.mu.Unlock()
	text := reason.Error()
	if w.send(kindRefused, []byte(text[:min(len(text), maxPath)])) != nil {
		return
	}
	_ = w.conn.SetReadDeadline(time.Now().Add(lingerTime))
	_, _ = io.Copy(io.Discard, w.r)
}

func unexpected(err error) error {
	if errors.Is(err, io.EOF) {
		return io.ErrUnexpectedEOF
	}
	return err
}

func (w *wire) sendHello(h hello) error {
	h.Protocol, h.Version, h.Oldest = helloProtocol, version, oldestVersion
	return w.sendJSON(kindHello, h)
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
	if min(h.Version, version) < max(cmp.Or(h.Oldest, h.Version), oldestVersion) {
		return hello{}, fmt.Errorf("%w: %d here, %d there", ErrVersion, version, h.Version)
	}
	if h.File != "" && (checkPath(h.File) != nil || checkPath(h.Name) != nil || strings.Contains(h.Name, "/")) {
		return hello{}, fmt.Errorf("%w: the name %q", errProtocol, h.Name)
	}
	return h, nil
}

// entry describes a file, a directory or a symbolic link. Entries are equal if the target need not be changed.
type entry struct {
	kind  entryKind
	perm  fs.FileMode
	size  int64  // of a file
	mtime int64  // of a file, in nanoseconds
	link  string // destination of a link
}

type entryKind string

const (
	file    entryKind = "file"
	dir     entryKind = "dir"
	symlink entryKind = "link"
	other   entryKind = "other" // at the target, in place of something that was sent
)

// ownerAll are the permissions that the owner of a directory needs to put files into it.
const ownerAll fs.FileMode = 0o700

// newEntry describes the result of an Lstat. The caller reads the destination of a link.
func newEntry(info fs.FileInfo) entry {
	perm := info.Mode().Perm()
	switch info.Mode().Type() {
	case 0:
		return entry{kind: file, perm: perm, size: info.Size(), mtime: info.ModTime().UnixNano()}
	case fs.ModeDir:
		return entry{kind: dir, perm: perm}
	case fs.ModeSymlink:
		return entry{kind: symlink}
	}
	return entry{kind: other}
}

// wireEntry is the payload of an entry frame. Names are bytes, since JSON strings hold Unicode only.
type wireEntry struct {
	Path  []byte      `json:"path"`
	Kind  entryKind   `json:"kind"`
	Perm  fs.FileMode `json:"perm,omitempty"`
	Size  int64       `json:"size,omitempty"`
	MTime int64       `json:"mtime,omitempty"`
	Link  []byte      `json:"link,omitempty"`
}

func (w *wire) sendEntry(name string, e entry) error {
	return w.sendJSON(kindEntry, wireEntry{[]byte(name), e.kind, e.perm, e.size, e.mtime, []byte(e.link)})
}

func parseEntry(payload []byte) (string, entry, error) {
	var r wireEntry
	if err := json.Unmarshal(payload, &r); err != nil {
		return "", entry{}, fmt.Errorf("%w: %w", errProtocol, err)
	}
	name := string(r.Path)
	if err := checkPath(name); err != nil {
		return "", entry{}, err
	}
	valid := r.Kind == file || r.Kind == dir || r.Kind == symlink || r.Kind == other
	if !valid || r.Perm&^fs.ModePerm != 0 || r.Size < 0 {
		return "", entry{}, fmt.Errorf("%w: an entry that is not valid", errProtocol)
	}
	return name, entry{kind: r.Kind, perm: r.Perm, size: r.Size, mtime: r.MTime, link: string(r.Link)}, nil
}

// checkPath ensures that each path has one name. os.Root ensures that it stays within the directory.
func checkPath(p string) error {
	if p == "" || p == "." || len(p) > maxPath || path.Clean(p) != p || p[0] == '/' || p == ".." ||
		strings.HasPrefix(p, "../") || strings.ContainsRune(p, 0) {
		return fmt.Errorf("%w: the path %q", errProtocol, p[:min(len(p), 100)])
	}
	return nil
}
