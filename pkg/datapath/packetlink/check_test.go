package packetlink

import (
	"bytes"
	"encoding/binary"
	"errors"
	"net/netip"
	"testing"

	"kubevpn/pkg/datapath/packet"
)

func TestCheckRejectsContradictingHeaders(t *testing.T) {
	super4 := spec{payload: 5000, gso: 1400, options: 12}.bytes()
	super6 := spec{v6: true, payload: 5000, gso: 1400}.bytes()
	partialUDP := spec{proto: packet.ProtoUDP, payload: 100, partial: true}.bytes()
	partialTCP := spec{v6: true, partial: true}.bytes()
	plain := spec{payload: 10}.bytes()
	// edit returns b with 16-bit fields of its virtio-net header changed; they are little endian.
	edit := func(b []byte, changes ...int) []byte {
		b = bytes.Clone(b)
		for i := 0; i < len(changes); i += 2 {
			binary.LittleEndian.PutUint16(b[changes[i]:], uint16(changes[i+1]))
		}
		return b
	}
	at := func(b []byte, i int, v byte) []byte {
		b = bytes.Clone(b)
		b[i] = v
		return b
	}
	const kind, headers, size, start, offset = 0, 2, 4, 6, 8
	const ip = packet.VirtioLen
	tests := []struct {
		name string
		b    []byte
		err  error
	}{
		{"super4", super4, nil},
		{"super6", super6, nil},
		{"super4_ecn", at(super4, 1, packet.GSOTCPv4|packet.GSOECN), nil},
		{"partial_udp", partialUDP, nil},
		{"partial_tcp6", partialTCP, nil},
		{"plain", plain, nil},
		{"plain_verified", at(plain, 0, packet.VirtioDataValid), nil},
		{"icmp", append(make([]byte, ip), (&packet.Outgoing{Src: netip4, Dst: netip4, Proto: 1}).Append(nil)...), nil},
		{"empty", nil, packet.ErrVirtio},
		{"no_packet", make([]byte, ip), packet.ErrTruncated},
		{"not_ip", at(plain, ip, 0x55), packet.ErrVersion},
		{"bytes_behind", append(bytes.Clone(plain), 0), packet.ErrTruncated},
		{"bytes_missing", plain[:len(plain)-1], packet.ErrTruncated},
		{"super_without_checksum", at(super4, 0, 0), packet.ErrVirtio},
		{"super_verified", at(super4, 0, packet.VirtioDataValid), packet.ErrVirtio},
		{"unknown_flag", at(plain, 0, 4), packet.ErrVirtio},
		{"both_flags", at(partialUDP, 0, 3), packet.ErrVirtio},
		{"super_of_the_other_version", at(super4, 1, packet.GSOTCPv6), packet.ErrVirtio},
		{"super6_as_4", at(super6, 1, packet.GSOTCPv4), packet.ErrVirtio},
		{"super_udp", at(super4, 1, packet.GSOUDPL4), packet.ErrVirtio},
		{"ecn_of_nothing", at(plain, 1, packet.GSOECN), packet.ErrVirtio},
		{"super_of_udp", at(super4, ip+9, packet.ProtoUDP), packet.ErrVirtio},
		{"segment_0", edit(super4, size, 0), packet.ErrVirtio},
		{"segment_15", edit(super4, size, 15), packet.ErrVirtio},
		{"segment_16", edit(super4, size, 16), nil},
		{"one_segment", edit(super4, size, 5000), packet.ErrVirtio},
		{"two_segments", edit(super4, size, 4999), nil},
		{"headers_short", edit(super4, headers, 40), packet.ErrVirtio},
		{"headers_long", edit(super4, headers, 53), packet.ErrVirtio},
		{"headers_with_payload", edit(super4, headers, 1452), packet.ErrVirtio},
		{"checksum_start", edit(super4, start, 24), packet.ErrVirtio},
		{"checksum_offset", edit(super4, offset, 6), packet.ErrVirtio},
		{"checksum_in_ip_header", edit(partialUDP, start, 0, offset, 10), packet.ErrVirtio},
		{"udp_as_tcp", edit(partialUDP, offset, 16), packet.ErrVirtio},
		{"checksum_of_icmp", at(partialUDP, ip+9, packet.ProtoICMP), packet.ErrVirtio},
		{"checksum_of_fragment", at(partialUDP, ip+6, 0x20), packet.ErrVirtio},
		{"super_fragment", at(super4, ip+6, 0x20), packet.ErrVirtio},
		{"super_later_fragment", at(super4, ip+7, 1), packet.ErrVirtio},
		{"tcp_header_of_16", at(super4, ip+20+12, 0x40), packet.ErrVirtio},
		{"tcp_header_of_60_where_52_are", at(super4, ip+20+12, 0xf0), packet.ErrVirtio},
		{"leftover_size", edit(plain, size, 1400), packet.ErrVirtio},
		{"leftover_start", edit(plain, start, 20), packet.ErrVirtio},
		{"leftover_headers", edit(partialTCP, headers, 60), packet.ErrVirtio},
		{"only_headers", edit(spec{gso: 1400}.bytes()), packet.ErrVirtio},
		{"unknown_type", edit(plain, kind, 0x0300), packet.ErrVirtio},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			before := bytes.Clone(tt.b)
			h, err := Check(tt.b)
			if !errors.Is(err, tt.err) {
				t.Fatalf("error %v, want %v", err, tt.err)
			}
			if err == nil && h.Len != len(tt.b)-ip {
				t.Errorf("length %d of %d", h.Len, len(tt.b)-ip)
			}
			if !bytes.Equal(before, tt.b) {
				t.Error("Check changed its argument")
			}
		})
	}
}

var netip4, _ = spec{}.addrs()

func mustV6() netip.Addr { a, _ := spec{v6: true}.addrs(); return a }

// The virtio-net headers of a kernel are looser than Check accepts. Header makes them strict.
func TestHeaderNormalizesForCheck(t *testing.T) {
	super := spec{payload: 5000, gso: 1400}.bytes()
	forwarded := bytes.Clone(super)
	binary.LittleEndian.PutUint16(forwarded[2:], 1440) // hdr_len is the length of the first buffer
	verified := bytes.Clone(super)
	verified[0] = packet.VirtioDataValid
	verified[packet.VirtioLen+20+16]++ // a whole checksum, not the partial one
	clear(verified[6:10])
	one := spec{payload: 1400, partial: true}.bytes()
	oneSegment := spec{payload: 1400, gso: 1400}.bytes()
	plain := spec{payload: 9}.bytes()
	// Only the kernel can leave an ICMPv6 checksum undone; Header completes it.
	icmp := func(partial bool) []byte {
		body := []byte{128, 0, 0, 0, 1, 2, 3, 4}
		out := packet.Outgoing{Src: mustV6(), Dst: mustV6(), Proto: packet.ProtoICMPv6, PayloadLen: len(body)}
		b := append(out.Append(make([]byte, packet.VirtioLen)), body...)
		sum := packet.PseudoHeader(packet.ProtoICMPv6, mustV6(), mustV6(), len(body))
		if partial {
			v := packet.Virtio{Flags: packet.VirtioNeedsChecksum, ChecksumStart: 40, ChecksumOffset: 2}
			v.Put(b)
		} else {
			sum = ^packet.Checksum(body, sum)
		}
		binary.BigEndian.PutUint16(b[packet.VirtioLen+42:], sum)
		return b
	}
	tests := []struct {
		name     string
		in, want []byte
	}{
		{"exact", super, super},
		{"forwarded", forwarded, super},
		{"verified_by_hardware", verified, super},
		{"one_segment", oneSegment, one},
		{"padding", append(bytes.Clone(plain), 0, 0, 0), plain},
		{"leftovers", append([]byte{0, 0, 0, 0, 0, 0, 20, 0, 0, 0}, plain[packet.VirtioLen:]...), plain},
		{"checksum_of_icmp", icmp(true), icmp(false)},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			f := frame(tt.in)
			defer f.Release()
			h, err := f.Header()
			if err != nil {
				t.Fatal(err)
			}
			if !bytes.Equal(f.Bytes(), tt.want) {
				t.Errorf("got  %.60x\nwant %.60x", f.Bytes(), tt.want)
			}
			if want, err := Check(f.Bytes()); err != nil || h != want {
				t.Errorf("Check: %+v, %v; Header: %+v", want, err, h)
			}
		})
	}
	f := frame(super)
	defer f.Release()
	f.SetLen(packet.VirtioLen)
	if _, err := f.Header(); !errors.Is(err, packet.ErrTruncated) {
		t.Errorf("Header of no packet: %v", err)
	}
}

func FuzzCheck(f *testing.F) {
	f.Add(spec{payload: 5000, gso: 1400, options: 12}.bytes())
	f.Add(spec{v6: true, payload: 3000, gso: 1000}.bytes())
	f.Add(spec{proto: packet.ProtoUDP, payload: 100, partial: true}.bytes())
	f.Add(spec{payload: 10}.bytes())
	f.Fuzz(func(t *testing.T, b []byte) {
		h, err := Check(b)
		if len(b) > maxFrame {
			return
		}
		g := frame(b)
		own, ownErr := g.Header()
		if err == nil && (ownErr != nil || own != h) {
			t.Fatalf("Header rejects a frame that Check accepts: %+v, %v", own, ownErr)
		}
		if ownErr != nil {
			g.Release()
			return
		}
		if again, err := Check(g.Bytes()); err != nil || again != own {
			t.Fatalf("Check rejects a frame after Header: %v", err)
		}
		l, err := g.finish()
		if err != nil {
			t.Fatalf("finish rejects a frame that Check accepts: %v", err)
		}
		defer l.release()
		size := 0
		for g := l.head; g != nil; g = g.next {
			size += g.end
			for b := g.buf[:g.end]; len(b) > 0; {
				n, err := frameLen(b)
				if err != nil {
					t.Fatal(err)
				}
				part := b[prefixLen : prefixLen+n]
				if h, err := Check(part); err != nil || part[0] != 0 || h.Src != own.Src {
					t.Fatalf("Check rejects a finished packet: %v", err)
				}
				b = b[prefixLen+n:]
			}
		}
		if size != l.size {
			t.Fatalf("%d bytes, counted as %d", size, l.size)
		}
	})
}
