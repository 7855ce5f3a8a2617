package transport

import (
	"cmp"
	"time"
)

// Tuning holds the times and sizes of one end of a session. Zero fields mean the defaults. The two ends may differ.
type Tuning struct {
	Heartbeat time.Duration // silence after which the link pings; 5 s
	DeadAfter time.Duration // silence after which the link drops its conn; 12 s
	AckDelay  time.Duration // the longest time from data to its acknowledgement; 50 ms
	Handshake time.Duration // timeout of a conn's handshake; 10 s
	Linger    time.Duration // timeout for the other end's FIN after Stream.Close; 60 s

	ReplayBuffer int // unacknowledged bytes per link; 4 MiB. A link sends at most this much per round trip.
	Unsent       int // bytes per link that wait for the conn before writers block; 64 KiB. Less means lower latency.
	MaxWindow    int // the largest window of a stream, which begins with 256 KiB; 16 MiB
	WindowMemory int // bytes by which all windows of a session together may exceed 256 KiB each; 64 MiB
}

const (
	// initialWindow is part of the protocol: both ends begin with it, so that it needs no message.
	initialWindow = 256 << 10

	farewellTime = time.Second // timeout for the other end's part in the end of the session

	accountEvery = 64 << 10             // bytes that a link may hold before the session's budget counts them
	ackEvery     = 256 << 10            // bytes after which the link acknowledges at once
	ackSome      = 8 << 10              // bytes after which it does so
	ackPause     = 4 * time.Millisecond // this long after the last time
	quantum      = 32 << 10             // bytes that a writer sends per turn while others wait
	leastShare   = 2 << 10              // bytes that a writer may send per turn in any case
	controlSlack = 4 << 20              // bytes of unread control frames that the other end may cause
	replayFloor  = 64 << 10             // bytes that a link may hold unacknowledged even if the budget is used up
	datagramCost = 8                    // bytes of the window that a datagram costs beyond its length

	datagramPause = 10 * time.Millisecond // how long the reader of datagrams may pause without holding up a fast sender

	maxPush   = 4 << 10                // a stream's writer writes up to this much to the conn itself,
	quiet     = 200 * time.Microsecond // if the link has written nothing for this long
	maxGather = 16 << 10               // with this much to write the sender does not wait for more
)

func (t Tuning) withDefaults() Tuning {
	t.Heartbeat = cmp.Or(t.Heartbeat, 5*time.Second)
	t.DeadAfter = cmp.Or(t.DeadAfter, 12*time.Second)
	t.AckDelay = cmp.Or(t.AckDelay, 50*time.Millisecond)
	t.Handshake = cmp.Or(t.Handshake, 10*time.Second)
	t.Linger = cmp.Or(t.Linger, time.Minute)
	t.Unsent = cmp.Or(t.Unsent, 64<<10)
	t.WindowMemory = cmp.Or(t.WindowMemory, 64<<20)
	t.MaxWindow = max(cmp.Or(t.MaxWindow, 16<<20), initialWindow)
	t.ReplayBuffer = max(cmp.Or(t.ReplayBuffer, 4<<20), 2*maxPayload)
	return t
}
