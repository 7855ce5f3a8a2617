package transport

import (
	"cmp"
	"time"
)

// Tuning holds times of one end of a session. Zero fields mean the defaults. The two ends may differ.
type Tuning struct {
	Heartbeat time.Duration // silence after which the link pings; 5 s
	DeadAfter time.Duration // silence after which the link drops its conn; 12 s
	Linger    time.Duration // timeout for the other end's FIN after Stream.Close; 60 s
}

const (
	// initialWindow is part of the protocol: both ends begin with it, so that it needs no message.
	initialWindow = 256 << 10

	handshakeTime = 10 * time.Second      // timeout of a conn's handshake
	farewellTime  = time.Second           // timeout for the other end's part in the end of the session
	ackDelay      = 50 * time.Millisecond // the longest time from data to its acknowledgement

	replayBuffer = 4 << 20  // unacknowledged bytes per link, so a link sends at most this much per round trip
	maxUnsent    = 64 << 10 // bytes per link that wait for the conn before writers block; less means lower latency
	maxWindow    = 16 << 20 // the largest window of a stream
	windowMemory = 64 << 20 // bytes by which all windows of a session together may exceed initialWindow each

	accountEvery = 64 << 10             // bytes that a link may hold before the session's budget counts them
	ackEvery     = 256 << 10            // bytes after which the link acknowledges at once
	ackSome      = 8 << 10              // bytes after which the link acknowledges at once,
	ackPause     = 4 * time.Millisecond // if its last such acknowledgement is this old
	quantum      = 32 << 10             // bytes that a writer sends per turn while others wait
	leastShare   = 2 << 10              // bytes that a writer may send per turn in any case
	controlSlack = 4 << 20              // bytes of unread control frames that the other end may cause
	replayFloor  = 64 << 10             // bytes that a link may hold unacknowledged even if the budget is used up
	datagramCost = 8                    // bytes of the window that a datagram costs beyond its length

	datagramPause = 10 * time.Millisecond // how long the reader of datagrams may pause without holding up a fast sender

	holePause = 400 * time.Millisecond // for which lost packets of a far path may hold up what is behind them

	maxPush   = 4 << 10                // a stream's writer writes up to this much to the conn itself,
	quiet     = 200 * time.Microsecond // if the link has written nothing for this long
	maxGather = 16 << 10               // with this much to write, the sender does not wait for more
)

func (t Tuning) withDefaults() Tuning {
	t.Heartbeat = cmp.Or(t.Heartbeat, 5*time.Second)
	t.DeadAfter = cmp.Or(t.DeadAfter, 12*time.Second)
	t.Linger = cmp.Or(t.Linger, time.Minute)
	return t
}
