package transport

import "time"

// Tuning holds the times and sizes of a session's end. Zero fields get the defaults. The ends need not agree.
type Tuning struct {
	Heartbeat time.Duration // ping when nothing was received for so long; 5 s
	DeadAfter time.Duration // give a conn up when nothing was received for so long; 12 s
	AckDelay  time.Duration // acknowledge at the latest so long after data came; 50 ms
	Handshake time.Duration // a conn's handshake may take so long; 10 s
	Linger    time.Duration // after Stream.Close, wait so long for the other end's FIN; 60 s

	ReplayBuffer int // bytes per link that may be unacknowledged; 4 MiB. Bounds a link's speed to this per round trip.
	Unsent       int // bytes per link that wait for the conn before writers block; 64 KiB. Small is low latency.
	// bytes that a stream's other end may send ahead of its reader, once tuned; 16 MiB. It begins with 256 KiB.
	MaxWindow    int
	WindowMemory int // bytes per session by which windows may grow beyond 256 KiB, all together; 64 MiB
}

const (
	// initialWindow is part of the protocol: both ends begin with it, so that it needs no message.
	initialWindow = 256 << 10

	farewellTime = time.Second // how long either end waits for the other's part in the session's end

	accountEvery = 64 << 10  // what a link may hold without the session's budget counting it
	ackEvery     = 256 << 10 // acknowledge at once after so many bytes
	quantum      = 32 << 10  // a writer's share per turn when others wait
	controlSlack = 4 << 20   // a peer that makes us hold so much in control frames is broken
	replayFloor  = 64 << 10  // a link may hold so much unacknowledged even when the session's budget is used up
	datagramCost = 8         // what a datagram costs of the window beyond its bytes

	maxPush   = 4 << 10                // a stream's writer sends so much by itself,
	quiet     = 200 * time.Microsecond // when the link has written nothing for so long
	maxGather = 16 << 10               // the sender does not wait for company with so much
)

func (t Tuning) withDefaults() Tuning {
	orDuration := func(d *time.Duration, v time.Duration) {
		if *d <= 0 {
			*d = v
		}
	}
	orInt := func(n *int, v int) {
		if *n <= 0 {
			*n = v
		}
	}
	orDuration(&t.Heartbeat, 5*time.Second)
	orDuration(&t.DeadAfter, 12*time.Second)
	orDuration(&t.AckDelay, 50*time.Millisecond)
	orDuration(&t.Handshake, 10*time.Second)
	orDuration(&t.Linger, time.Minute)
	orInt(&t.ReplayBuffer, 4<<20)
	orInt(&t.Unsent, 64<<10)
	orInt(&t.MaxWindow, 16<<20)
	orInt(&t.WindowMemory, 64<<20)
	t.MaxWindow = max(t.MaxWindow, initialWindow)
	t.ReplayBuffer = max(t.ReplayBuffer, 2*maxPayload)
	return t
}
