package transport

import (
	"encoding/binary"
	"fmt"
	"net"
	"net/netip"
)

// Proto is the kind of data that a stream carries. Values are IP protocol numbers where one exists.
type Proto uint8

// The kinds of streams.
const (
	ProtoControl Proto = 0  // messages between laptop and manager
	ProtoEcho    Proto = 1  // ICMP echo of either family, as datagrams
	ProtoIP      Proto = 4  // frames of whole IP packets
	ProtoTicket  Proto = 5  // requests a ticket: the right to open conns over another transport
	ProtoTCP     Proto = 6  // the bytes of one TCP connection
	ProtoMeter   Proto = 7  // the manager's end of the session echoes it, to try a transport
	ProtoRecord  Proto = 8  // an agent records requests for the laptop
	ProtoUDP     Proto = 17 // the datagrams of one UDP flow
)

var protoNames = map[Proto]string{ProtoControl: "control", ProtoEcho: "echo", ProtoIP: "ip", ProtoTicket: "ticket",
	ProtoTCP: "tcp", ProtoMeter: "meter", ProtoRecord: "record", ProtoUDP: "udp"}

// String returns "control", "echo", "ip", "ticket", "tcp", "meter", "record", "udp" or the number.
func (p Proto) String() string {
	if name, known := protoNames[p]; known {
		return name
	}
	return fmt.Sprintf("protocol %d", uint8(p))
}

// Request describes a stream to open. Src and Dst may be zero if they have no meaning (control, ticket). The wire
// format omits IPv6 zones.
type Request struct {
	Proto Proto
	Src   netip.AddrPort
	Dst   netip.AddrPort
}

// String is for logs: "tcp 10.0.0.1:5 -> 10.96.0.1:443".
func (r Request) String() string { return fmt.Sprintf("%s %s -> %s", r.Proto, r.Src, r.Dst) }

const maxRequest = 2 + 2*(1+16+2)

// appendRequest appends the payload of an OPEN frame: mode, protocol, and two addresses, each as its length
// (0, 4 or 16), its bytes and its port.
func appendRequest(b []byte, r Request, datagrams bool) []byte {
	mode := byte(0)
	if datagrams {
		mode = 1
	}
	b = append(b, mode, byte(r.Proto))
	for _, ap := range [2]netip.AddrPort{r.Src, r.Dst} {
		addr := ap.Addr().WithZone("").AsSlice()
		b = append(b, byte(len(addr)))
		b = append(b, addr...)
		b = binary.BigEndian.AppendUint16(b, ap.Port())
	}
	return b
}

func parseRequest(b []byte) (r Request, datagrams bool, err error) {
	if len(b) < 2 || b[0] > 1 {
		return r, false, fmt.Errorf("%w: bad stream header", ErrProtocol)
	}
	datagrams, r.Proto = b[0] == 1, Proto(b[1])
	b = b[2:]
	for _, ap := range [2]*netip.AddrPort{&r.Src, &r.Dst} {
		if len(b) < 1 {
			return r, false, fmt.Errorf("%w: short stream header", ErrProtocol)
		}
		n := int(b[0])
		if n != 0 && n != 4 && n != 16 || len(b) < 1+n+2 {
			return r, false, fmt.Errorf("%w: bad address in stream header", ErrProtocol)
		}
		addr, _ := netip.AddrFromSlice(b[1 : 1+n]) // zero for no bytes
		*ap = netip.AddrPortFrom(addr, binary.BigEndian.Uint16(b[1+n:]))
		b = b[1+n+2:]
	}
	if len(b) != 0 {
		return r, false, fmt.Errorf("%w: %d bytes after stream header", ErrProtocol, len(b))
	}
	return r, datagrams, nil
}

// netAddr returns an address of the request as package net does.
func (r Request) netAddr(ap netip.AddrPort) net.Addr {
	if r.Proto == ProtoUDP {
		return net.UDPAddrFromAddrPort(ap)
	}
	return net.TCPAddrFromAddrPort(ap)
}
