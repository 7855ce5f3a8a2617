package session

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"

	"kubevpn/internal/api"
)

// control is the laptop's end of the control stream: one ClientHello out, then ControlMessages in until the
// stream ends.
//
//	laptop ── ClientHello ──▶ manager
//	laptop ◀── Hello, Names(reset), State*, Names* ── manager
type control struct {
	stream io.ReadWriter
	dec    *json.Decoder
}

// startControl says hello and reads the manager's answer. A refusal comes back as the manager's *api.Error.
func startControl(stream io.ReadWriter, hello api.ClientHello) (*control, *api.ManagerHello, error) {
	c := &control{stream: stream, dec: json.NewDecoder(stream)}
	if err := json.NewEncoder(stream).Encode(hello); err != nil {
		return nil, nil, fmt.Errorf("greeting the traffic manager: %w", err)
	}
	var m api.ControlMessage
	if err := c.dec.Decode(&m); err != nil {
		return nil, nil, fmt.Errorf("reading the traffic manager's greeting: %w", err)
	}
	switch {
	case m.Error != nil:
		return nil, nil, m.Error
	case m.Hello == nil:
		return nil, nil, api.Errorf(api.ExitIncompatible, "the traffic manager's first message is not a greeting")
	case m.Hello.Protocol != api.Protocol:
		return nil, nil, api.Errorf(api.ExitIncompatible, "the traffic manager (%s) speaks protocol %d, this kubevpn (%s) speaks %d",
			m.Hello.Version, m.Hello.Protocol, hello.Version, api.Protocol).
			WithHint("Run `kubevpn connect --upgrade` to replace the manager, or install the kubevpn that matches it.")
	}
	return c, m.Hello, nil
}

// next reads the next message. An error that the manager sends comes back as its *api.Error.
func (c *control) next() (api.ControlMessage, error) {
	var m api.ControlMessage
	if err := c.dec.Decode(&m); err != nil {
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

// follow hands every further message to handle until the stream ends, which is an error unless ctx ended.
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
