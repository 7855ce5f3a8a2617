package connection

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"sync/atomic"

	"kubevpn/internal/api"
	"kubevpn/internal/process/version"
	"kubevpn/pkg/wire/transport"
)

// maxMessage limits a message of the traffic manager, in bytes. The names of 100 000 Services fit.
const maxMessage = 8 << 20

// control is the laptop's end of the control stream: one ClientHello out, then ControlMessages in until the stream
// ends.
//
//	laptop ── ClientHello ──▶ manager      perhaps then: Challenge ◀──, Identity ──▶
//	laptop ◀── Hello, Names(reset), State*, Names* ── manager
type control struct{ lines *api.Lines }

// startControl sends a hello and reads the manager's. If the manager rejects the laptop, startControl returns the
// manager's *api.Error. identify returns the name of a request that answers the nonce of a challenge; nil: the hello
// does not promise it.
func startControl(stream io.ReadWriter, hello api.ClientHello,
	identify func(nonce string) (string, error)) (*control, *api.ManagerHello, error) {
	c := &control{api.NewLines(stream, maxMessage)}
	hello.Identifies = identify != nil
	m, err := c.ask(stream, hello)
	if err == nil && m.Challenge != nil && identify != nil {
		var answer api.Identity
		if answer.Request, err = identify(m.Challenge.Nonce); err == nil {
			m, err = c.ask(stream, answer)
		}
	}
	if err != nil {
		return nil, nil, err
	}
	switch {
	case m.Error != nil:
		return nil, nil, m.Error
	case m.Hello == nil:
		return nil, nil, api.Errorf(api.ExitIncompatible, "the traffic manager's first message is not a hello")
	case m.Hello.Protocol < api.OldestProtocol || m.Hello.Protocol > api.Protocol:
		return nil, nil, api.Errorf(api.ExitIncompatible,
			"the traffic manager (%s) speaks protocol %d, this kubevpn (%s) speaks %d",
			m.Hello.Version, m.Hello.Protocol, hello.Version, api.Protocol).
			WithHint("Run `kubevpn connect --upgrade` to replace the manager, or install the kubevpn that matches it.")
	}
	return c, m.Hello, nil
}

// ask sends a message and reads the answer.
func (c *control) ask(stream io.Writer, message any) (m api.ControlMessage, err error) {
	if err := json.NewEncoder(stream).Encode(message); err != nil {
		return m, fmt.Errorf("sending a hello to the traffic manager: %w", err)
	}
	if err := c.lines.Next(&m); err != nil {
		return m, fmt.Errorf("reading the traffic manager's hello: %w", err)
	}
	return m, nil
}

// next reads the next message. If the manager sends an error, next returns that *api.Error.
func (c *control) next() (api.ControlMessage, error) {
	var m api.ControlMessage
	if err := c.lines.Next(&m); err != nil {
		if errors.Is(err, io.EOF) {
			err = io.ErrUnexpectedEOF
		}
		return api.ControlMessage{}, fmt.Errorf("following the traffic manager: %w", err)
	}
	if m.Error != nil {
		return m, m.Error
	}
	return m, nil
}

// follow passes every further message to handle until the stream ends, which is an error unless ctx ended.
func (c *control) follow(ctx context.Context, handle func(api.ControlMessage)) error {
	for {
		m, err := c.next()
		switch {
		case err == nil:
			handle(m)
		case m.Error == nil && ctx.Err() != nil:
			return ctx.Err()
		default:
			return err
		}
	}
}

// greet opens a session of one link with a traffic manager and exchanges hellos, without a lease and without retries.
// It ends the session when then returns. The context of then ends with the session. cfg needs neither Links nor
// OnSession. An error means that then was not called.
func greet(ctx context.Context, cfg transport.ClientConfig,
	then func(context.Context, *transport.Session, *control, *api.ManagerHello)) error {
	ctx, end := context.WithCancelCause(ctx)
	defer end(nil)
	var greeted atomic.Bool
	dial := cfg.Dial
	cfg.Dial = func(ctx context.Context) (net.Conn, error) {
		conn, err := dial(ctx)
		if err != nil && !greeted.Load() {
			end(err)
		}
		return conn, err
	}
	cfg.Links = 1
	cfg.OnSession = func(ctx context.Context, ts *transport.Session) {
		stream, err := ts.Open(ctx, transport.Request{Proto: transport.ProtoControl})
		if err != nil {
			end(fmt.Errorf("opening the control stream: %w", err))
			return
		}
		defer stream.Close()
		c, hello, err := startControl(stream, api.ClientHello{Protocol: api.Protocol, Oldest: api.OldestProtocol,
			Version: version.String()}, nil)
		if err == nil {
			greeted.Store(true)
			then(ctx, ts, c, hello)
		}
		end(err)
	}
	if err := transport.NewClient(cfg).Run(ctx); err != nil || greeted.Load() {
		return err
	}
	return context.Cause(ctx)
}
