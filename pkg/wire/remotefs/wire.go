package remotefs

import (
	"bufio"
	"bytes"
	"cmp"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/fxamacker/cbor/v2"
)

// Op is an operation. It says which fields of a Request the Server reads, and which of an Answer it sets.
type Op uint8

const (
	OpStat     Op = iota + 1 // Handle, or Path ─▶ Attr; not of what a link leads to
	OpList                   // Path, Size: how many entries, with those of directories below ─▶ Dirs
	OpReadlink               // Path ─▶ Data
	OpOpen                   // Path, Flags, Mode ─▶ Handle, Attr; if Size bytes hold it, the whole Data
	OpRead                   // Handle, Offset, Size ─▶ Data; shorter only at the end of the file
	OpWrite                  // Handle, Offset, Data; with FlagAppend, at the end
	OpFsync                  // Handle, or Path
	OpClose                  // Handle
	OpSet                    // Handle, or Path; Set ─▶ Attr
	OpMkdir                  // Path, Mode ─▶ Attr
	OpRemove                 // Path: a file, or an empty directory if Flags has FlagDir
	OpRename                 // Path, To
	OpLink                   // Path, To: the new name ─▶ Attr
	OpSymlink                // Path: the new name, To: where it leads ─▶ Attr
	OpStatfs                 // Path ─▶ Statfs
	OpLock                   // Handle, Lock ─▶ Lock, if it asks
	OpSum                    // Path ─▶ Data: SHA-256 of the file
	OpPut                    // Path; Data, Handle (FlagAside), or To: a link; Set; Flags as OpSynced ─▶ Attr. At once
	OpSynced                 // Flags: SyncedChanges, SyncedAll ─▶ when Server.Synced has returned
)

// Flags of OpOpen and OpRemove, the same on each operating system: those of open(2) of Linux, but the first two are
// bits.
const (
	FlagRead, FlagWrite               = 1, 2
	FlagCreate, FlagExclusive         = 0o100, 0o200
	FlagTruncate, FlagAppend, FlagDir = 0o1000, 0o2000, 0o200000
	// FlagAside makes a file beside the path, which is removed when it is closed unless OpPut has moved it there.
	FlagAside = 1 << 30
)

// AsidePrefix begins the names of files beside others. A Server that is killed may leave one.
const AsidePrefix = ".kubevpn-sync-"

// Flags of OpSynced: something has changed since the last one; the directory has everything that the Client has for it.
const SyncedChanges, SyncedAll = 1, 2

// Attr are the attributes of a file.
type Attr struct {
	_                             struct{} `cbor:",toarray"`
	Inode                         uint64
	Mode, Links, UID, GID         uint32 // Mode: as st_mode of Linux
	Size, Blocks                  uint64 // Blocks: of 512 bytes
	Access, Modify, Change, Birth int64  // nanoseconds since 1970; Birth: 0 if it is not known
}

// Entry is a name in a directory.
type Entry struct {
	_    struct{} `cbor:",toarray"`
	Name string
	Attr Attr
}

// Dir is a directory with all of its entries.
type Dir struct {
	_       struct{} `cbor:",toarray"`
	Path    string
	Entries []Entry
}

// Set says what OpSet changes: what is not nil.
type Set struct {
	_              struct{} `cbor:",toarray"`
	Size           *uint64
	Mode           *uint32 // permissions
	Access, Modify *int64  // nanoseconds since 1970
}

// Lock is a lock of an open file: of a range, as by F_OFD_SETLK of fcntl(2), or of the file, as by flock(2).
type Lock struct {
	_          struct{} `cbor:",toarray"`
	Type       uint8    // F_RDLCK, F_WRLCK or F_UNLCK of Linux
	File       bool     // by flock
	Ask        bool     // only which lock of a range is in the way
	Start, Len int64    // Len 0: to the end, however long the file becomes
}

// Statfs is the state of the file system.
type Statfs struct {
	_                                         struct{} `cbor:",toarray"`
	BlockSize                                 uint32   // bytes
	Blocks, Free, Available, Files, FilesFree uint64
}

// Request asks for one operation. Paths are relative to the Server's directory, with slashes, and clean; "." is the
// directory itself.
type Request struct {
	_           struct{} `cbor:",toarray"`
	ID, Handle  uint64
	Op          Op
	Path, To    string
	Offset      int64
	Size, Flags int
	Mode        uint32
	Data        []byte
	Set         *Set
	Lock        *Lock
}

// Answer answers the Request with the same ID.
type Answer struct {
	_          struct{} `cbor:",toarray"`
	ID, Handle uint64
	Errno      uint32 // of Linux; 0: it is done
	Attr       *Attr
	Dirs       []Dir // the one that was asked for is the first
	Data       []byte
	Statfs     *Statfs
	Lock       *Lock
}

const (
	// MaxData is the most that one read or write carries, in bytes.
	MaxData = 128 << 10
	// maxRequest and maxAnswer limit frames. An answer to OpList is the longest.
	maxRequest = MaxData + 4*maxPath
	maxAnswer  = 24 << 20
	maxPath    = 4096
	maxListed  = 8192 // entries of an answer to OpList, unless it is one directory
	maxName    = 255
	buffer     = 64 << 10 // of a stream, in each direction
	// While more than crowd requests are on the way, a frame waits up to hold for others to share a Write.
	crowd = 16
	hold  = time.Millisecond
)

// errFrame means that the other end sent what the protocol does not allow.
var errFrame = errors.New("the remote file system sent an invalid message")

// decoding accepts names that are not UTF-8: to Linux, they are bytes. The options are valid, so there is no error.
var decoding, _ = cbor.DecOptions{UTF8: cbor.UTF8DecodeInvalid}.DecMode()

// stream sends and receives frames: the length, 4 bytes big endian, and CBOR (RFC 8949).
type stream struct {
	io.ReadWriteCloser
	in      *bufio.Reader
	got     []byte       // the frame that is being received, unless it is longer
	senders atomic.Int32 // those in send
	sending sync.Mutex   // guards what follows
	out     *bufio.Writer
	holds   bool // flush comes
}

func newStream(conn io.ReadWriteCloser) *stream {
	return &stream{ReadWriteCloser: conn, in: bufio.NewReaderSize(conn, buffer), got: make([]byte, maxRequest),
		out: bufio.NewWriterSize(conn, buffer)}
}

// frame encodes a Request or an Answer with so many bytes of data.
func frame(v any, data int) []byte {
	b := bytes.NewBuffer(make([]byte, 4, 256+data))
	if err := cbor.MarshalToBuffer(v, b); err != nil {
		panic(err) // of a type that cannot be encoded
	}
	binary.BigEndian.PutUint32(b.Bytes(), uint32(b.Len()-4))
	return b.Bytes()
}

// send is safe for concurrent use. Frames that are sent at once, or while many requests are on the way, share a Write,
// which costs much on the way through the API server. If it fails, it closes the stream: receive returns the error.
func (s *stream) send(frame []byte, onTheWay int) {
	s.senders.Add(1)
	s.sending.Lock()
	defer s.sending.Unlock()
	_, err := s.out.Write(frame)
	switch {
	case s.senders.Add(-1) > 0 || s.holds: // another one flushes
	case onTheWay > crowd:
		s.holds = true
		time.AfterFunc(hold, s.flush)
	default:
		err = cmp.Or(err, s.out.Flush())
	}
	if err != nil {
		s.Close()
	}
}

func (s *stream) flush() {
	s.sending.Lock()
	defer s.sending.Unlock()
	s.holds = false
	if s.out.Flush() != nil {
		s.Close()
	}
}

// receive receives a frame of up to limit bytes. It is for one goroutine.
func (s *stream) receive(limit uint32, v any) error {
	var head [4]byte
	if _, err := io.ReadFull(s.in, head[:]); err != nil {
		return err
	}
	n := binary.BigEndian.Uint32(head[:])
	if n > limit {
		return fmt.Errorf("%w: it has %d bytes", errFrame, n)
	}
	b := s.got[:min(n, maxRequest)]
	if n > maxRequest { // a long list
		b = make([]byte, n)
	}
	_, err := io.ReadFull(s.in, b)
	if err == nil {
		err = decoding.Unmarshal(b, v) // which copies data
	}
	if err != nil {
		return fmt.Errorf("%w: %w", errFrame, err)
	}
	return nil
}

// check returns an error for a request that the Server must not carry out.
func (r *Request) check(readOnly bool) error {
	switch {
	case len(r.Path) > maxPath || len(r.To) > maxPath:
		return syscall.ENAMETOOLONG
	case strings.ContainsRune(r.Path+r.To, 0) || r.Size < 0 || r.Offset < 0 || len(r.Data) > MaxData:
		return syscall.EINVAL
	case r.Path == "" && r.Handle == 0:
		return syscall.ENOENT
	case readOnly && r.changes():
		return syscall.EROFS
	}
	return nil
}

// changes reports whether a request may change files.
func (r *Request) changes() bool {
	switch r.Op {
	case OpStat, OpList, OpReadlink, OpRead, OpFsync, OpClose, OpStatfs, OpLock, OpSum, OpSynced:
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
