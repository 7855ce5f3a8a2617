package connection

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"kubevpn/internal/api"
	"kubevpn/internal/kube/client"
	"kubevpn/pkg/wire/transport"
	"kubevpn/pkg/wire/transport/transporttest"
)

// tryingTest returns the transports of a cluster that no test dials.
func tryingTest(t *testing.T) *transports {
	t.Helper()
	c, err := client.Load([]byte(kubeconfig), client.Options{})
	if err != nil {
		t.Fatal(err)
	}
	return newTrying(c, "kubevpn", "m-1")
}

func TestTryReturnsTheHelloAndAllTransports(t *testing.T) {
	listener := transporttest.NewListener()
	ctx, cancel := context.WithCancel(t.Context())
	served := make(chan error)
	go func() {
		served <- manage(ctx, listener, func(ctx context.Context, ts *transport.Session, control *transport.Stream) {
			json.NewEncoder(control).Encode(api.ControlMessage{Hello: &api.ManagerHello{Protocol: api.Protocol, Version: "v1"}})
			for {
				in, err := ts.Accept(ctx)
				if err != nil {
					return
				}
				in.Reject(transport.CodeProhibited) // no tickets
			}
		})
	}()
	began := time.Now()
	hello, all, err := tryingTest(t).try(ctx, listener.Dial)
	if took := time.Since(began); err != nil || hello.Version != "v1" || took > tryTimeout {
		t.Errorf("%+v after %v, %v", hello, took, err)
	}
	var got []string
	for _, one := range all {
		got = append(got, fmt.Sprintf("%s %s %v", one.Name, one.State, one.Seconds > 0))
	}
	want := []string{"port-forward in use true", "api-proxy failing false", "direct failing false"}
	if !slices.Equal(got, want) {
		t.Errorf("transports and whether they have a round trip: %q, want %q", got, want)
	}
	cancel()
	if err := <-served; err != nil {
		t.Error(err)
	}
}

func TestTryNamesTheFault(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		silent := func(context.Context) (net.Conn, error) { near, _ := net.Pipe(); return near, nil }
		refused := func(context.Context) (net.Conn, error) { return nil, errors.New("refused") }
		m := tryingTest(t)
		if _, _, err := m.try(t.Context(), silent); api.AsError(err) == nil || err.Error() != "the traffic manager does not answer" {
			t.Errorf("a manager that is silent: %v", err)
		}
		if _, _, err := m.try(t.Context(), refused); err == nil || err.Error() != "refused" {
			t.Errorf("a manager that cannot be dialed: %v", err)
		}
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		if _, _, err := m.try(ctx, silent); !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("the caller does not wait: %v", err)
		}
	})
}
