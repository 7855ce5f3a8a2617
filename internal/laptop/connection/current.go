package connection

import (
	"context"

	"kubevpn/pkg/wakeup"
	"kubevpn/pkg/wire/transport"
)

// current holds the current transport session, or nil. A flow that opens while there is none waits for the next
// session.
type current struct {
	session wakeup.Value[*transport.Session]
}

func (c *current) set(s *transport.Session) {
	c.session.Update(func(now **transport.Session) { *now = s })
}

// clear removes s, unless another session has replaced it.
func (c *current) clear(s *transport.Session) {
	c.session.Update(func(now **transport.Session) {
		if *now == s {
			*now = nil
		}
	})
}

// now returns the session, or nil.
func (c *current) now() *transport.Session { return c.session.Load() }

// wait returns the session as soon as there is one, or ctx's error.
func (c *current) wait(ctx context.Context) (*transport.Session, error) {
	return c.session.Await(ctx, func(s *transport.Session) bool { return s != nil })
}
