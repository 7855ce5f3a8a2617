package socks

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net"
	"net/netip"
	"slices"
	"strconv"
	"syscall"
	"time"

	"kubevpn/pkg/wire/authlistener"
)

// Numbers of RFC 1928 and RFC 1929.
const (
	version5        = 5
	passwordVersion = 1

	methodPassword = 2
	methodNone     = 0xff

	commandConnect   = 1
	commandAssociate = 3

	addressIPv4 = 1
	addressName = 3
	addressIPv6 = 4

	replySucceeded          = 0
	replyFailed             = 1
	replyNotAllowed         = 2
	replyNetworkUnreachable = 3
	replyHostUnreachable    = 4
	replyRefused            = 5
	replyTimeout            = 6
	replyCommand            = 7
	replyAddress            = 8
)

var (
	errMethods  = errors.New("the client offers no user name and password")
	errPassword = errors.New("wrong user name or password")
	errAddress  = errors.New("unknown type of address")
)

// serveSOCKS serves a conn whose version has been read.
func (s *Server) serveSOCKS(ctx context.Context, conn net.Conn, pending *authlistener.Held) error {
	if err := s.authenticate(conn); err != nil {
		return err
	}
	pending.Leave()
	command, to, err := readRequest(conn)
	if err != nil {
		if errors.Is(err, errAddress) {
			err = errors.Join(err, writeReply(conn, replyAddress, nil))
		}
		return err
	}
	if err := conn.SetReadDeadline(time.Time{}); err != nil {
		return err
	}
	switch command {
	case commandConnect:
		target, err := s.dial(ctx, "tcp", to.String())
		if err != nil {
			return errors.Join(err, writeReply(conn, replyTo(err), nil))
		}
		defer target.Close()
		if err := writeReply(conn, replySucceeded, target.LocalAddr()); err != nil {
			return err
		}
		Relay(ctx, conn, target, conn)
		return nil
	case commandAssociate:
		return s.associate(ctx, conn)
	}
	return errors.Join(fmt.Errorf("unsupported command %d", command), writeReply(conn, replyCommand, nil))
}

// authenticate reads the methods, which follow the version, and checks the user name and the password.
func (s *Server) authenticate(conn net.Conn) error {
	methods, err := readString(conn)
	if err != nil {
		return err
	}
	if !slices.Contains([]byte(methods), methodPassword) {
		_, err := conn.Write([]byte{version5, methodNone})
		return errors.Join(errMethods, err)
	}
	if _, err := conn.Write([]byte{version5, methodPassword}); err != nil {
		return err
	}
	user, password, err := readPassword(conn)
	if err != nil {
		return err
	}
	if !s.allows(user, password) {
		_, err := conn.Write([]byte{passwordVersion, 1})
		return errors.Join(errPassword, err)
	}
	_, err = conn.Write([]byte{passwordVersion, 0})
	return err
}

// readPassword reads the user name and the password (RFC 1929).
func readPassword(r io.Reader) (user, password string, err error) {
	var version [1]byte
	if _, err := io.ReadFull(r, version[:]); err != nil {
		return "", "", err
	}
	if version[0] != passwordVersion {
		return "", "", fmt.Errorf("version %d of the user name and password", version[0])
	}
	if user, err = readString(r); err != nil {
		return "", "", err
	}
	password, err = readString(r)
	return user, password, err
}

// readString reads a string of at most 255 bytes with its length before it.
func readString(r io.Reader) (string, error) {
	var size [1]byte
	if _, err := io.ReadFull(r, size[:]); err != nil {
		return "", err
	}
	b := make([]byte, size[0])
	_, err := io.ReadFull(r, b)
	return string(b), err
}

// endpoint is the target of a request. Host is an address or a name.
type endpoint struct {
	host string
	port uint16
}

func (e endpoint) String() string { return net.JoinHostPort(e.host, strconv.Itoa(int(e.port))) }

// readRequest reads the command and the target.
func readRequest(r io.Reader) (command byte, to endpoint, err error) {
	var header [3]byte
	if _, err := io.ReadFull(r, header[:]); err != nil {
		return 0, endpoint{}, err
	}
	if header[0] != version5 {
		return 0, endpoint{}, fmt.Errorf("version %d in a request", header[0])
	}
	to, err = readEndpoint(r)
	return header[1], to, err
}

// readEndpoint reads the type of an address, the address and the port.
func readEndpoint(r io.Reader) (to endpoint, err error) {
	var kind [1]byte
	if _, err := io.ReadFull(r, kind[:]); err != nil {
		return endpoint{}, err
	}
	switch kind[0] {
	case addressIPv4:
		var b [4]byte
		_, err = io.ReadFull(r, b[:])
		to.host = netip.AddrFrom4(b).String()
	case addressIPv6:
		var b [16]byte
		_, err = io.ReadFull(r, b[:])
		to.host = netip.AddrFrom16(b).Unmap().String()
	case addressName:
		to.host, err = readString(r)
	default:
		err = fmt.Errorf("%w %d", errAddress, kind[0])
	}
	if err != nil {
		return endpoint{}, err
	}
	var port [2]byte
	_, err = io.ReadFull(r, port[:])
	to.port = binary.BigEndian.Uint16(port[:])
	return to, err
}

// appendEndpoint appends what readEndpoint reads. A name has at most 255 bytes.
func appendEndpoint(b []byte, e endpoint) []byte {
	switch a, err := netip.ParseAddr(e.host); {
	case err != nil || a.String() != e.host || a.Zone() != "": // readEndpoint would return another host
		b = append(append(b, addressName, byte(len(e.host))), e.host...)
	case a.Is4():
		b = append(append(b, addressIPv4), a.AsSlice()...)
	default:
		b = append(append(b, addressIPv6), a.AsSlice()...)
	}
	return binary.BigEndian.AppendUint16(b, e.port)
}

// writeReply answers a request. bound is the proxy's own address towards the target; one without an IP address is
// written as 0.0.0.0:0.
func writeReply(w io.Writer, code byte, bound net.Addr) error {
	at := endpoint{host: "0.0.0.0"}
	if bound != nil {
		if a, err := netip.ParseAddrPort(bound.String()); err == nil {
			at = endpoint{a.Addr().Unmap().WithZone("").String(), a.Port()}
		}
	}
	_, err := w.Write(appendEndpoint([]byte{version5, code, 0}, at))
	return err
}

// replyTo returns the reply for an error of a dial.
func replyTo(err error) byte {
	var name *net.DNSError
	switch {
	case errors.Is(err, syscall.ECONNREFUSED):
		return replyRefused
	case errors.Is(err, syscall.ENETUNREACH):
		return replyNetworkUnreachable
	case errors.Is(err, syscall.EHOSTUNREACH), errors.As(err, &name):
		return replyHostUnreachable
	case errors.Is(err, fs.ErrPermission):
		return replyNotAllowed
	case isTimeout(err):
		return replyTimeout
	}
	return replyFailed
}

func isTimeout(err error) bool {
	var timeout net.Error
	return errors.Is(err, context.DeadlineExceeded) || errors.As(err, &timeout) && timeout.Timeout()
}
