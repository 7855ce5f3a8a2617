package tun

import (
	"fmt"
	"strconv"
	"strings"

	"kubevpn/pkg/datapath/packet"
)

const (
	// familyLen is the length of the address family that precedes each packet on a utun of macOS, in network byte
	// order.
	familyLen = 4
	// familyOffset is its offset in a buffer for [Device.Read], so that the packet follows the virtio-net header.
	familyOffset = packet.VirtioLen - familyLen
	// The address families of macOS, from <sys/socket.h>.
	family4, family6 = 2, 30
)

// unitOf returns the unit of a control socket for a utun: its number plus one, or 0 for the first free number.
func unitOf(name string) (uint32, error) {
	number, ok := strings.CutPrefix(name, "utun")
	if ok && number == "" {
		return 0, nil
	}
	n, err := strconv.ParseUint(number, 10, 16)
	if !ok || err != nil {
		return 0, fmt.Errorf("%q cannot be the name of a TUN interface: it must be utun and a number", name)
	}
	return uint32(n) + 1, nil
}

// frame is a packet as a utun takes it, in pieces. The zero value is ready to use.
type frame struct {
	family [familyLen]byte
	pieces [][]byte
}

// set stores the packet in pieces, the first of which begins with a virtio-net header. The address family replaces the
// header. f refers to the pieces.
func (f *frame) set(pieces [][]byte) {
	f.pieces = append(f.pieces[:0], f.family[:])
	skip := packet.VirtioLen
	for _, p := range pieces {
		n := min(skip, len(p))
		if skip -= n; n < len(p) {
			f.pieces = append(f.pieces, p[n:])
		}
	}
	f.family[familyLen-1] = family4
	if len(f.pieces) > 1 && f.pieces[1][0]>>4 == 6 {
		f.family[familyLen-1] = family6
	}
}
