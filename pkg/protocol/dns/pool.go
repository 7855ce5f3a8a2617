package dns

import (
	"net"
	"sync"
	"time"
)

const (
	poolSize = 32              // idle sockets kept per nameserver
	poolIdle = 4 * time.Second // an idle socket is closed after one to two times this
	poolUses = 64              // queries per socket: its port, which a forger must guess, does not stay for long
)

// pool keeps idle UDP sockets of one nameserver. The zero value is ready for use. No goroutine waits: a timer runs
// while a socket is idle.
type pool struct {
	mu     sync.Mutex
	idle   []idleSocket // the most recently used last
	timer  *time.Timer
	closed bool
}

type idleSocket struct {
	conn  net.Conn
	used  int
	since time.Time
}

// take removes and returns the most recently used socket and its number of uses, or nil.
func (p *pool) take() (c net.Conn, used int) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if len(p.idle) == 0 {
		return nil, 0
	}
	last := p.idle[len(p.idle)-1]
	p.idle[len(p.idle)-1] = idleSocket{}
	p.idle = p.idle[:len(p.idle)-1]
	return last.conn, last.used
}

// put returns a socket to the pool, or closes it.
func (p *pool) put(c net.Conn, used int) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.closed || used >= poolUses || len(p.idle) >= poolSize {
		c.Close()
		return
	}
	p.idle = append(p.idle, idleSocket{conn: c, used: used, since: time.Now()})
	if p.timer == nil {
		p.timer = time.AfterFunc(poolIdle, p.sweep)
	}
}

// sweep closes sockets that have been idle for poolIdle.
func (p *pool) sweep() {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.closed {
		return
	}
	old, now := 0, time.Now()
	for old < len(p.idle) && now.Sub(p.idle[old].since) >= poolIdle {
		p.idle[old].conn.Close()
		old++
	}
	p.idle = append(p.idle[:0:0], p.idle[old:]...)
	p.timer = nil
	if len(p.idle) > 0 {
		p.timer = time.AfterFunc(poolIdle, p.sweep)
	}
}

// close closes all idle sockets, and makes put close later ones.
func (p *pool) close() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.closed = true
	if p.timer != nil {
		p.timer.Stop()
	}
	for _, s := range p.idle {
		s.conn.Close()
	}
	p.idle = nil
}
