// Package files is the far end of `kubevpn cp` and of remote volumes: a program in a pod that serves the files of one
// of its containers. Hello is also for `traffic supervise`, which serves those of its own container.
//
//	ephemeral container, with targetContainerName      the container itself, by pods/exec
//	──────────────────────────────────────────────     ──────────────────────────────────
//	traffic files --stay: keeps the container          kubevpn files, which the laptop has copied there
//	traffic files: becomes the user of the target's      │ removes its own file
//	  │ process, and opens /proc/PID/root                │ opens /
//	  ▼                                                  ▼
//	Hello, then remotefs.Server ◀═ standard input and output, by pods/exec ═▶ the laptop
package files

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
)

// Program is the program of the image, and Command the name of the command in it and in kubevpn.
const (
	Program = "/traffic"
	Command = "files"
)

// Protocol is the version of Hello and of package remotefs. Both ends must have the same.
const Protocol = 1

// Hello is the first line of the far end, as JSON.
type Hello struct {
	Protocol int `json:"protocol"`
	// Name is "." if the path is a directory, which is then served. Otherwise it is the last element of the path, and
	// the directory above is served; nothing need exist there.
	Name string `json:"name,omitempty"`
	// Error says why nothing is served. With Unseen, it is because this program cannot look into the container.
	Error  string `json:"error,omitempty"`
	Unseen bool   `json:"unseen,omitempty"`
}

// maxHello limits the first line of the far end, in bytes.
const maxHello = 64 << 10

// ErrVersion means that the far end has another Protocol.
var ErrVersion = errors.New("the program in the container has another version")

// ReadHello reads the Hello of the far end, and nothing after it. It closes the conn if ctx ends meanwhile.
func ReadHello(ctx context.Context, conn net.Conn) (hello Hello, err error) {
	defer context.AfterFunc(ctx, func() { conn.Close() })()
	line, err := readLine(conn, maxHello)
	switch {
	case ctx.Err() != nil:
		return hello, ctx.Err()
	case err != nil:
		return hello, err
	}
	if err := json.Unmarshal(line, &hello); err != nil {
		return hello, fmt.Errorf("its first line is invalid: %w", err)
	}
	if hello.Protocol != Protocol {
		return hello, ErrVersion
	}
	return hello, nil
}

// readLine reads a line, and nothing after it.
func readLine(r io.Reader, limit int) (line []byte, err error) {
	b := make([]byte, 1)
	for len(line) < limit {
		if _, err := io.ReadFull(r, b); err != nil {
			return nil, err
		}
		if b[0] == '\n' {
			return line, nil
		}
		line = append(line, b[0])
	}
	return nil, errors.New("its first line is too long")
}
