package transport

import (
	"encoding/binary"
	"fmt"
)

// Frames: spec.md, "Frames". An 8-byte header, then length bytes.
//
//	0       1               4               8
//	+-------+---------------+---------------+----------
//	| type  | length        | stream        | payload
//	+-------+---------------+---------------+----------
const (
	frameOpen   = 1  // stream; payload: request
	frameAnswer = 2  // stream; payload: code, reason
	frameData   = 3  // stream; payload: bytes, or one datagram
	frameFin    = 4  // stream; payload: nothing, the code that ends datagrams, or the length of a striped stream
	frameReset  = 5  // stream
	frameWindow = 6  // stream; payload: how many more bytes may come, uint32
	frameAck    = 7  // link; payload: bytes received so far, uint64
	framePing   = 8  // link; payload: number, or wornPing; bytes received so far, two uint64
	framePong   = 9  // link; payload: the ping's number, bytes received so far
	frameClose  = 10 // link; ends the session
	frameStripe = 11 // stream of another link; payload: that link, offset, bytes

	wornPing = 0 // asks for a new conn; an end without this feature answers only

	headerLen  = 8
	maxReason  = 512
	maxPayload = 64<<10 - headerLen // a frame is at most 64 KiB

	// MaxPacket is the largest datagram: the most that UDP over IPv4 carries.
	MaxPacket = 65507
)

// frameTypes are what the header of each type of frame may say.
var frameTypes = [...]struct {
	ofStream    bool
	least, most int // bytes of payload
}{
	frameOpen:   {true, 2, maxRequest},
	frameAnswer: {true, 1, 1 + maxReason},
	frameData:   {true, 0, maxPayload},
	frameFin:    {true, 0, 8},
	frameReset:  {true, 0, 0},
	frameWindow: {true, 4, 4},
	frameAck:    {false, 8, 8},
	framePing:   {false, 16, 16},
	framePong:   {false, 16, 16},
	frameClose:  {false, 0, 0},
	frameStripe: {true, stripeLen + 1, maxPayload},
}

type header struct {
	kind   byte
	length int
	stream uint32
}

func putHeader(b *[headerLen]byte, h header) {
	binary.BigEndian.PutUint32(b[:], uint32(h.kind)<<24|uint32(h.length))
	binary.BigEndian.PutUint32(b[4:], h.stream)
}

// parseHeader parses a header and checks all that it can without the payload, so that the other end cannot cause an
// allocation of more than one frame.
func parseHeader(b *[headerLen]byte) (header, error) {
	word := binary.BigEndian.Uint32(b[:])
	h := header{kind: byte(word >> 24), length: int(word & 0xffffff), stream: binary.BigEndian.Uint32(b[4:])}
	if h.kind == 0 || int(h.kind) >= len(frameTypes) {
		return h, fmt.Errorf("%w: frame type %d", ErrProtocol, h.kind)
	}
	is := frameTypes[h.kind]
	if h.length < is.least || h.length > is.most {
		return h, fmt.Errorf("%w: frame type %d of %d bytes", ErrProtocol, h.kind, h.length)
	}
	if is.ofStream != (h.stream != 0) {
		return h, fmt.Errorf("%w: frame type %d on stream %d", ErrProtocol, h.kind, h.stream)
	}
	return h, nil
}
