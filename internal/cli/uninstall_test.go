package cli

import (
	"context"
	"encoding/json"
	"net"
	"testing"
	"time"

	"kubevpn/internal/api"
	"kubevpn/pkg/transport"
)

// TestGreet counts the laptops of a manager that says what a test wants.
func TestGreet(t *testing.T) {
	hello := func(sessions int) api.ControlMessage {
		return api.ControlMessage{Hello: &api.ManagerHello{State: api.ManagerState{Sessions: sessions}}}
	}
	state := func(sessions int) api.ControlMessage {
		return api.ControlMessage{State: &api.ManagerState{Sessions: sessions}}
	}
	for _, tt := range []struct {
		name string
		says []api.ControlMessage
		want int
		fail bool
	}{
		{name: "nobody_else", says: []api.ControlMessage{hello(1)}},
		{name: "another", says: []api.ControlMessage{hello(2)}, want: 1},
		{name: "one_was_just_leaving", says: []api.ControlMessage{hello(2), {Names: &api.NameDelta{Reset: true}}, state(1)}},
		{name: "one_of_two_was_just_leaving", says: []api.ControlMessage{hello(3), state(2)}, want: 1},
		{name: "one_comes_meanwhile", says: []api.ControlMessage{hello(2), state(3)}, want: 1},
		{name: "no_greeting", says: []api.ControlMessage{state(1)}, fail: true},
		{name: "a_refusal", says: []api.ControlMessage{{Error: api.Errorf(api.ExitIncompatible, "no")}}, fail: true},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			got, err := greetManager(t, tt.says)
			if got != tt.want || (err != nil) != tt.fail {
				t.Errorf("%d others, error %v; want %d, error %v", got, err, tt.want, tt.fail)
			}
		})
	}
}

// greetManager is greet, with a manager at the other end that says these things.
func greetManager(t *testing.T, says []api.ControlMessage) (others int, err error) {
	t.Helper()
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
	defer cancel()
	served, dialled := make(chan error, 1), make(chan error, 1)
	server := transport.NewServer(transport.ServerConfig{OnSession: func(ctx context.Context, s *transport.Session) {
		in, err := s.Accept(ctx)
		if err != nil {
			return
		}
		stream, err := in.Accept()
		if err != nil {
			return
		}
		e := json.NewEncoder(stream)
		for _, m := range says {
			if err := e.Encode(m); err != nil {
				return
			}
		}
		<-ctx.Done()
	}})
	go func() { served <- server.Serve(ctx, listener) }()
	client := transport.NewClient(transport.ClientConfig{
		Links: 1,
		Dial: func(ctx context.Context) (net.Conn, error) {
			var d net.Dialer
			return d.DialContext(ctx, "tcp", listener.Addr().String())
		},
		OnSession: func(ctx context.Context, s *transport.Session) {
			others, err = greet(ctx, s)
			cancel()
		},
	})
	go func() { dialled <- client.Run(ctx) }()
	if e := <-dialled; e != nil {
		t.Error(e)
	}
	if e := <-served; e != nil {
		t.Error(e)
	}
	return others, err
}
