package remotefs

import (
	"bufio"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"strings"
	"sync"
	"syscall"

	"github.com/fxamacker/cbor/v2"
)

// Op is an operation. It says which fields of a Request the Server reads, and which of an Answer it sets.
type Op uint8

const (
	OpStat     Op = iota + 1 // Path or Handle ─▶ Attr; not of what a link leads to
	OpList                   // Path, Size: how many entries, with those of directories below ─▶ Dirs
	OpReadlink               // Path ─▶ Data
	OpOpen                   // Path, Flags, Mode ─▶ Handle, Attr; if Size bytes hold it, the whole Data
	OpRead                   // Handle, Offset, Size ─▶ Data; shorter only at the end of the file
	OpWrite                  // Handle, Offset, Data; with FlagAppend, at the end
	OpFsync                  // Handle, or Path of a directory
	OpClose                  // Handle
	OpSet                    // Path or Handle; Set ─▶ Attr
	OpMkdir                  // Path, Mode ─▶ Attr
	OpRemove                 // Path: a file, or an empty directory if Flags has FlagDir
	OpRename                 // Path, To
	OpLink                   // Path, To: the new name ─▶ Attr
	OpSymlink                // Path: the new name, To: where it leads ─▶ Attr
	OpStatfs                 // ─▶ Statfs
	OpLock                   // Handle, Lock ─▶ Lock, if it asks
	OpSum                    // Path ─▶ Data: SHA-256 of the file
)

// Flags of OpOpen and OpRemove. They are the same on each operating system.
const (
	FlagRead = 1 << iota
	FlagWrite
	FlagAppend
	FlagCreate
	FlagExclusive
	FlagTruncate
	FlagDir
)

// Attr are the attributes of a file.
type Attr struct {
	Inode  uint64 `cbor:"1,keyasint"`
	Mode   uint32 `cbor:"2,keyasint"` // as st_mode of Linux
	Links  uint32 `cbor:"3,keyasint"`
	UID    uint32 `cbor:"4,keyasint"`
	GID    uint32 `cbor:"5,keyasint"`
	Size   uint64 `cbor:"6,keyasint"`
	Blocks uint64 `cbor:"7,keyasint"` // of 512 bytes
	Access int64  `cbor:"8,keyasint"` // nanoseconds since 1970, as the next two
	Modify int64  `cbor:"9,keyasint"`
	Change int64  `cbor:"10,keyasint"`
}

// Entry is a name in a directory.
type Entry struct {
	Name string `cbor:"1,keyasint"`
	Attr Attr   `cbor:"2,keyasint"`
}

// Dir is a directory with all of its entries.
type Dir struct {
	Path    string  `cbor:"1,keyasint"`
	Entries []Entry `cbor:"2,keyasint"`
}

// Set says what OpSet changes: what is not nil.
type Set struct {
	Size   *uint64 `cbor:"1,keyasint,omitempty"`
	Mode   *uint32 `cbor:"2,keyasint,omitempty"` // permissions
	Access *int64  `cbor:"3,keyasint,omitempty"` // nanoseconds since 1970
	Modify *int64  `cbor:"4,keyasint,omitempty"`
}

// Lock is a lock of an open file: of a range, as by F_OFD_SETLK of fcntl(2), or of the file, as by flock(2).
type Lock struct {
	Type  uint8 `cbor:"1,keyasint,omitempty"` // F_RDLCK, F_WRLCK or F_UNLCK of Linux
	File  bool  `cbor:"2,keyasint,omitempty"` // by flock
	Ask   bool  `cbor:"3,keyasint,omitempty"` // only which lock of a range is in the way
	Start int64 `cbor:"4,keyasint,omitempty"`
	Len   int64 `cbor:"5,keyasint,omitempty"` // 0: to the end, however long the file becomes
}

// Statfs is the state of the file system.
type Statfs struct {
	BlockSize uint32 `cbor:"1,keyasint"` // bytes
	Blocks    uint64 `cbor:"2,keyasint"`
	Free      uint64 `cbor:"3,keyasint"`
	Available uint64 `cbor:"4,keyasint"`
	Files     uint64 `cbor:"5,keyasint"`
	FilesFree uint64 `cbor:"6,keyasint"`
}

// Request asks for one operation. Paths are relative to the Server's directory, with slashes, and clean; "." is the
// directory itself.
type Request struct {
	ID     uint64 `cbor:"1,keyasint"`
	Op     Op     `cbor:"2,keyasint"`
	Path   string `cbor:"3,keyasint,omitempty"`
	To     string `cbor:"4,keyasint,omitempty"`
	Handle uint64 `cbor:"5,keyasint,omitempty"`
	Offset int64  `cbor:"6,keyasint,omitempty"`
	Size   int    `cbor:"7,keyasint,omitempty"`
	Data   []byte `cbor:"8,keyasint,omitempty"`
	Flags  int    `cbor:"9,keyasint,omitempty"`
	Mode   uint32 `cbor:"10,keyasint,omitempty"`
	Set    *Set   `cbor:"11,keyasint,omitempty"`
	Lock   *Lock  `cbor:"12,keyasint,omitempty"`
}

// Answer answers the Request with the same ID.
type Answer struct {
	ID     uint64  `cbor:"1,keyasint"`
	Errno  uint32  `cbor:"2,keyasint,omitempty"` // of Linux; 0: it is done
	Attr   *Attr   `cbor:"3,keyasint,omitempty"`
	Dirs   []Dir   `cbor:"4,keyasint,omitempty"` // the one that was asked for is the first
	Data   []byte  `cbor:"5,keyasint,omitempty"`
	Handle uint64  `cbor:"6,keyasint,omitempty"`
	Statfs *Statfs `cbor:"7,keyasint,omitempty"`
	Lock   *Lock   `cbor:"8,keyasint,omitempty"`
}

const (
	// MaxData is the most that one read or write carries, in bytes.
	MaxData = 128 << 10
	// maxRequest and maxAnswer limit frames. An answer to OpList is the longest.
	maxRequest = 1 << 20
	maxAnswer  = 32 << 20
	maxPath    = 4096
	maxName    = 255
)

// errFrame means that the other end sent what the protocol does not allow.
var errFrame = errors.New("the remote file system sent an invalid message")

// wire sends and receives frames: the length, 4 bytes big endian, and CBOR (RFC 8949).
type wire struct {
	in    *bufio.Reader
	limit uint32 // of a frame that arrives

	mu  sync.Mutex
	out *bufio.Writer
	buf []byte
}

func newWire(conn io.ReadWriter, limit uint32) *wire {
	return &wire{in: bufio.NewReaderSize(conn, 64<<10), limit: limit, out: bufio.NewWriterSize(conn, 64<<10)}
}

// send is safe for concurrent use.
func (w *wire) send(v any) error {
	b, err := cbor.Marshal(v)
	if err != nil {
		return err
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	w.buf = binary.BigEndian.AppendUint32(w.buf[:0], uint32(len(b)))
	_, _ = w.out.Write(w.buf) // Flush returns the error
	_, _ = w.out.Write(b)
	return w.out.Flush()
}

// receive is for one goroutine.
func (w *wire) receive(v any) error {
	var head [4]byte
	if _, err := io.ReadFull(w.in, head[:]); err != nil {
		return err
	}
	n := binary.BigEndian.Uint32(head[:])
	if n > w.limit {
		return fmt.Errorf("%w: it has %d bytes", errFrame, n)
	}
	b := make([]byte, n)
	if _, err := io.ReadFull(w.in, b); err != nil {
		return fmt.Errorf("%w: it ends early: %w", errFrame, err)
	}
	if err := cbor.Unmarshal(b, v); err != nil {
		return fmt.Errorf("%w: %w", errFrame, err)
	}
	return nil
}

// check returns an error for a request that the Server must not carry out.
func (r *Request) check() error {
	for _, p := range []string{r.Path, r.To} {
		if len(p) > maxPath || strings.ContainsRune(p, 0) {
			return syscall.ENAMETOOLONG
		}
	}
	if r.Size < 0 || r.Offset < 0 || len(r.Data) > MaxData {
		return syscall.EINVAL
	}
	return nil
}

// changes reports whether a request may change files.
func (r *Request) changes() bool {
	switch r.Op {
	case OpStat, OpList, OpReadlink, OpRead, OpFsync, OpClose, OpStatfs, OpLock, OpSum:
		return false
	case OpOpen:
		return r.Flags&^(FlagRead|FlagDir) != 0
	}
	return true
}

// validName reports whether a name can be one in a directory.
func validName(name string) bool {
	return name != "" && name != "." && name != ".." && len(name) <= maxName && !strings.ContainsAny(name, "/\x00")
}
