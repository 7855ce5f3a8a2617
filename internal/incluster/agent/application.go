//go:build linux

package agent

import (
	"bufio"
	"context"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"

	"kubevpn/pkg/protocol/interceptor"
)

// application connects to the pod's application, at the pod's address as the client did. If a TCP port refuses there,
// it tries the loopback addresses, but only if nothing was ever seen to listen on that port elsewhere. Otherwise a
// restarting proxy in front of the application would expose the application to the proxy's clients. The methods may be
// called concurrently.
type application struct {
	listeners func() ([]netip.AddrPort, error) // of TCP, in the pod's network namespace
	log       *slog.Logger

	mu      sync.Mutex
	exposed map[uint16]bool // TCP ports at which something listened at another address than a loopback one
}

func newApplication(listeners func() ([]netip.AddrPort, error), log *slog.Logger) *application {
	return &application{listeners: listeners, log: log, exposed: make(map[uint16]bool)}
}

// dial connects to the destination of f.
func (a *application) dial(ctx context.Context, f interceptor.Flow, dial dialFunc) (net.Conn, error) {
	conn, err := dial(ctx, f.Protocol, f.Client.Addr().Unmap(), f.Dst)
	if f.Protocol != "tcp" {
		return conn, err
	}
	if err == nil && !f.Dst.Addr().IsLoopback() {
		a.expose(f.Dst.Port())
	}
	if !errors.Is(err, syscall.ECONNREFUSED) || !a.loopbackAlone(f.Dst.Port()) {
		return conn, err
	}
	hosts := []netip.Addr{netip.AddrFrom4([4]byte{127, 0, 0, 1}), netip.IPv6Loopback()}
	if f.Dst.Addr().Is6() {
		slices.Reverse(hosts)
	}
	for _, host := range hosts {
		if conn, e := dial(ctx, f.Protocol, netip.Addr{}, netip.AddrPortFrom(host, f.Dst.Port())); e == nil {
			return conn, nil
		}
	}
	return nil, err
}

func (a *application) expose(number uint16) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.exposed[number] = true
}

// recordListeners records which ports are exposed now, and returns those with a listener at a loopback address.
func (a *application) recordListeners() (loopback map[uint16]bool, err error) {
	all, err := a.listeners()
	if err != nil {
		return nil, err
	}
	loopback = make(map[uint16]bool)
	for _, l := range all {
		if l.Addr().Unmap().IsLoopback() {
			loopback[l.Port()] = true
		} else {
			a.expose(l.Port())
		}
	}
	return loopback, nil
}

// loopbackAlone reports whether something listens at a loopback address, and nothing was ever seen to listen elsewhere.
func (a *application) loopbackAlone(number uint16) bool {
	if a.isExposed(number) {
		return false
	}
	loopback, err := a.recordListeners()
	if err != nil {
		a.log.Warn("cannot see where the application listens", "err", err)
		return false
	}
	return loopback[number] && !a.isExposed(number)
}

func (a *application) isExposed(number uint16) bool {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.exposed[number]
}

// readListeners returns the addresses at which TCP sockets listen in this network namespace.
func readListeners() ([]netip.AddrPort, error) { return readSockets(nil) }

// maxListeners limits the addresses in a report.
const maxListeners = 1000

// othersListeners is readListeners without the sockets of this process, sorted.
func othersListeners() ([]netip.AddrPort, error) {
	const files = "/proc/self/fd"
	entries, err := os.ReadDir(files)
	if err != nil {
		return nil, err
	}
	own := make(map[string]bool)
	for _, e := range entries {
		if to, err := os.Readlink(filepath.Join(files, e.Name())); err == nil { // unless it was closed meanwhile
			own[to] = true
		}
	}
	all, err := readSockets(own)
	slices.SortFunc(all, netip.AddrPort.Compare)
	all = slices.Compact(all)
	return all[:min(len(all), maxListeners)], err
}

// readSockets returns where sockets listen, except own ones, which are named as links in /proc/self/fd are.
func readSockets(own map[string]bool) ([]netip.AddrPort, error) {
	var all []netip.AddrPort
	for _, path := range []string{"/proc/net/tcp", "/proc/net/tcp6"} {
		f, err := os.Open(path)
		if errors.Is(err, fs.ErrNotExist) && path == "/proc/net/tcp6" {
			continue // a kernel without IPv6
		}
		if err != nil {
			return nil, err
		}
		some, err := parseListeners(f, own)
		f.Close()
		if err != nil {
			return nil, fmt.Errorf("reading %s: %w", path, err)
		}
		all = append(all, some...)
	}
	return all, nil
}

// parseListeners parses /proc/net/tcp and returns the addresses of listening sockets, except own ones.
func parseListeners(r io.Reader, own map[string]bool) ([]netip.AddrPort, error) {
	const (
		listening = "0A" // TCP_LISTEN
		inode     = 9    // index of the field
	)
	var all []netip.AddrPort
	lines := bufio.NewScanner(r)
	lines.Scan() // the headings
	for lines.Scan() {
		fields := strings.Fields(lines.Text())
		if len(fields) < 4 {
			return nil, fmt.Errorf("%q is not a socket", lines.Text())
		}
		if fields[3] != listening {
			continue
		}
		if len(fields) > inode && own["socket:["+fields[inode]+"]"] {
			continue
		}
		host, number, _ := strings.Cut(fields[1], ":")
		raw, err := hex.DecodeString(host)
		if err != nil || len(raw)%4 != 0 {
			return nil, fmt.Errorf("%q is not an address", fields[1])
		}
		for word := range slices.Chunk(raw, 4) { // each is printed in the machine's byte order
			binary.BigEndian.PutUint32(word, binary.NativeEndian.Uint32(word))
		}
		addr, is := netip.AddrFromSlice(raw)
		port, err := strconv.ParseUint(number, 16, 16)
		if err != nil || !is {
			return nil, fmt.Errorf("%q is not an address", fields[1])
		}
		all = append(all, netip.AddrPortFrom(addr, uint16(port)))
	}
	return all, lines.Err()
}
