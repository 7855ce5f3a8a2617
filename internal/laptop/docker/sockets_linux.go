package docker

import (
	"errors"
	"fmt"
	"net"
	"os"
	"path"
	"path/filepath"
)

// socketDir creates a directory for the socket of one container. Every user of the container may enter it; on the
// laptop only the user may, because of the directories above it. The caller removes it when the container has
// connected.
func (r *run) socketDir() (string, error) {
	if err := r.Paths.MakeRuntimeDir(); err != nil {
		return "", err
	}
	dir, err := os.MkdirTemp(r.Paths.RuntimeDir, "docker-")
	if err != nil {
		return "", err
	}
	return dir, os.Chmod(dir, 0o755)
}

// listen listens on the socket in dir. Every user of the container may connect to it.
func listen(dir string) (*net.UnixListener, error) {
	at := filepath.Join(dir, socketName)
	l, err := net.ListenUnix("unix", &net.UnixAddr{Name: at, Net: "unix"})
	if err != nil {
		return nil, err
	}
	if err := os.Chmod(at, 0o666); err != nil {
		return nil, errors.Join(err, l.Close())
	}
	return l, nil
}

// connect connects to the socket of kubevpn, in a container.
func connect() (*net.UnixConn, error) {
	conn, err := net.DialUnix("unix", nil, &net.UnixAddr{Name: path.Join(control, socketName), Net: "unix"})
	if err != nil {
		return nil, fmt.Errorf("%w (%w)", errByHand, err)
	}
	return conn, nil
}
