package dial

import (
	"bytes"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"kubevpn/pkg/wire/transport"
)

// blockedLaptop implements packets. It accepts datagrams only while it is open.
type blockedLaptop struct {
	mu    sync.Mutex
	moved sync.Cond
	open  bool
	got   [][]byte
	err   error
}

func newBlockedLaptop() *blockedLaptop {
	l := &blockedLaptop{}
	l.moved.L = &l.mu
	return l
}

func (l *blockedLaptop) set(open bool, err error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.open, l.err = open, err
	l.moved.Broadcast()
}

func (l *blockedLaptop) TryWritePackets(b []byte, size int) (n int, err error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if !l.open || l.err != nil {
		return 0, l.err
	}
	for one := range each(b, size) {
		l.got = append(l.got, bytes.Clone(one))
		n++
	}
	return n, nil
}

func (l *blockedLaptop) WritePacket(b []byte) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	for !l.open && l.err == nil {
		l.moved.Wait()
	}
	l.got = append(l.got, bytes.Clone(b))
	return l.err
}

func (l *blockedLaptop) Wait() error                            { panic("not used") }
func (l *blockedLaptop) ReadPackets([]byte, []int) (int, error) { panic("not used") }
func (l *blockedLaptop) CloseWithCode(transport.Code) error     { panic("not used") }

func TestBacklogKeepsOrderAndBoundaries(t *testing.T) {
	synctest.Test(t, func(t *testing.T) { // no time passes, however slow the machine is
		l := newBlockedLaptop()
		q := backlog{laptop: l, buffers: &buffers{}}
		var want [][]byte
		put := func(n, size, last int) {
			t.Helper()
			p := bytes.Repeat([]byte{byte(len(want))}, (n-1)*size+last)
			for one := range each(p, size) {
				want = append(want, bytes.Clone(one))
			}
			if err := q.put(p, size); err != nil {
				t.Fatal(err)
			}
		}
		put(1, 0, 0)
		for round := range 30 {
			put(3, 1200, 700)
			put(1, 65507, 65507)
			put(1, 0, 0)
			put(54, 1200, 1200)
			if round == 15 {
				l.set(true, nil)
			}
		}
		q.drained.Wait()
		put(2, 10, 10)
		if !slices.EqualFunc(l.got, want, bytes.Equal) {
			t.Errorf("%d datagrams arrived, not the %d in their order", len(l.got), len(want))
		}
	})
}

func TestBacklogDropsWhenItIsFullOrLate(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l := newBlockedLaptop()
		q := backlog{laptop: l, buffers: &buffers{}}
		put := func(n int) {
			for range n {
				if err := q.put(make([]byte, 1000), 1000); err != nil {
					t.Fatal(err)
				}
			}
		}
		put(100)
		time.Sleep(time.Second) // the waiting datagrams are old, but few
		put(5000)
		synctest.Wait()
		if q.size < backlogSlack/2 || q.size > 2*backlogSlack {
			t.Errorf("%d bytes wait behind an old datagram", q.size)
		}
		l.set(true, nil)
		q.drained.Wait()
		l.set(false, nil)
		put(10_000)
		if q.size > backlogLimit || q.size < backlogLimit-64<<10 {
			t.Errorf("%d bytes wait", q.size)
		}
		l.set(true, transport.CodeRefused.Err())
		q.drained.Wait()
		if err := q.put(nil, 0); err == nil {
			t.Error("put returned no error after a failed write")
		}
		if q.size != 0 || len(q.waiting) != 0 {
			t.Errorf("%d bytes wait at the end", q.size)
		}
	})
}
