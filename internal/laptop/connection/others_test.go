package connection

import (
	"context"
	"encoding/json"
	"errors"
	"net"
	"testing"
	"testing/synctest"

	"kubevpn/internal/api"
	"kubevpn/pkg/wire/transport"
	"kubevpn/pkg/wire/transport/transporttest"
)

func TestOthersAreCounted(t *testing.T) {
	hello := func(sessions int) api.ControlMessage {
		return api.ControlMessage{Hello: &api.ManagerHello{Protocol: api.Protocol, State: api.ManagerState{Sessions: sessions}}}
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
			synctest.Test(t, func(t *testing.T) {
				got, err := askManager(t, tt.says)
				if got != tt.want || (err != nil) != tt.fail {
					t.Errorf("%d others, error %v; want %d, error %v", got, err, tt.want, tt.fail)
				}
			})
		})
	}
}

func TestOthersFailsWithoutAnAnswer(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		refused := errors.New("refused")
		if _, err := others(t.Context(), func(context.Context) (net.Conn, error) { return nil, refused }); err != refused {
			t.Errorf("a manager that cannot be dialed: %v", err)
		}
		silent := func(context.Context) (net.Conn, error) { near, _ := net.Pipe(); return near, nil }
		if _, err := others(t.Context(), silent); !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("a manager that is silent: %v", err)
		}
	})
}

// askManager is others, with a manager at the other end that says these things.
func askManager(t *testing.T, says []api.ControlMessage) (int, error) {
	t.Helper()
	listener := transporttest.NewListener()
	speak := func(ctx context.Context, _ *transport.Session, control *transport.Stream) {
		e := json.NewEncoder(control)
		for _, m := range says {
			if err := e.Encode(m); err != nil {
				return
			}
		}
		<-ctx.Done()
	}
	ctx, cancel := context.WithCancel(t.Context())
	served := make(chan error)
	go func() { served <- manage(ctx, listener, speak) }()
	defer func() {
		cancel()
		if err := <-served; err != nil {
			t.Error(err)
		}
	}()
	return others(ctx, listener.Dial)
}
