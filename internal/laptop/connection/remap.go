package connection

import (
	"context"
	"encoding/binary"
	"net/netip"
	"slices"
	"time"

	"kubevpn/pkg/datapath/packet"
	"kubevpn/pkg/host/sockets"
	"kubevpn/pkg/wakeup"
)

const (
	// endPause is between two looks at flows that are about to end, and endTries the number of looks: a socket answers
	// within microseconds.
	endPause = 20 * time.Millisecond
	endTries = 10
)

// remap follows the mappings of a plan. Flows to networks that are mapped in another way end: their programs know
// addresses that mean something else from now on.
func (r *routes) remap(ctx context.Context, p planned) {
	before := r.planned.Mappings
	if slices.Equal(before, p.Mappings) {
		return
	}
	var changed []netip.Prefix
	for _, m := range slices.Concat(before, p.Mappings) {
		if !slices.Contains(before, m) || !slices.Contains(p.Mappings, m) {
			changed = append(changed, m.Cluster)
		}
	}
	if r.link.Name != "" { // connect and status show the first ones
		r.status.warn(p.mappedTexts(before)...)
		r.endFlows(ctx, changed)
	}
	if r.device != nil {
		r.device.Map(p.Mappings)
	}
	r.mappings.applied.Store(&p.Mappings)
}

// endFlows resets the TCP connections of this machine to networks of the cluster, and ends other flows to them, while
// their routes and mappings are still in force. The netstack ends its own. Of a connection whose packets cross whole,
// only the two ends know the sequence numbers, without which an RST is ignored (RFC 5961, section 3). So it is asked
// for them by a segment outside of its window (RFC 9293, section 3.10.7.4):
//
//	socket ◀─ segment ─ endFlows;  socket ─ ACK ─▶ steering.ended ─▶ gVisor, which knows no such connection ─ RST ─▶ socket
func (r *routes) endFlows(ctx context.Context, networks []netip.Prefix) {
	stack := r.stack.Load()
	if stack == nil || r.device == nil {
		return
	}
	stack.Abort(func(remote netip.Addr) bool { return covers(networks, remote) })
	to := r.packets.steering.Load()
	if !to.system {
		return
	}
	r.packets.steer(func(s *steering) { s.ended = networks })
	defer r.packets.steer(func(s *steering) { s.ended = nil })
	for range endTries {
		all, err := sockets.List(func(local netip.Addr) bool { return slices.Contains(to.own, local) })
		if err != nil {
			r.log.Info("cannot end the connections to networks that are mapped", "err", err)
			return
		}
		left := 0
		for _, s := range all {
			remote := netip.AddrPortFrom(r.mappings.now().ToCluster(s.Remote.Addr()), s.Remote.Port())
			if s.TCP == nil || !covers(networks, remote.Addr()) {
				continue
			}
			left++
			if err := r.device.Writev([][]byte{strayACK(remote, s.Local)}); err != nil {
				return // the device is gone
			}
		}
		if left == 0 || !wakeup.Pause(ctx, endPause) {
			return
		}
	}
}

// strayACK returns a virtio-net header and a TCP segment that no connection expects.
func strayACK(src, dst netip.AddrPort) []byte {
	const length, flagACK = 20, 0x10
	out := packet.Outgoing{Src: src.Addr(), Dst: dst.Addr(), Proto: packet.ProtoTCP, PayloadLen: length}
	b := out.Append(make([]byte, packet.VirtioLen, packet.VirtioLen+packet.IPv6HeaderLen+length))
	tcp := make([]byte, length)
	binary.BigEndian.PutUint16(tcp, src.Port())
	binary.BigEndian.PutUint16(tcp[2:], dst.Port())
	tcp[12], tcp[13] = length/4<<4, flagACK
	offset, _ := packet.ChecksumOffset(packet.ProtoTCP)
	sum := packet.PseudoHeader(packet.ProtoTCP, src.Addr(), dst.Addr(), length)
	binary.BigEndian.PutUint16(tcp[offset:], ^packet.Checksum(tcp, sum))
	return append(b, tcp...)
}
