package connection

import (
	"context"
	"errors"
	"log/slog"
	"net"
	"testing"
	"testing/synctest"

	"kubevpn/internal/api"
	"kubevpn/internal/kube/client"
)

// prepared returns a Prepared that has found a pod and dialed it.
func prepared(t *testing.T, guess podName, conn net.Conn, err error) *Prepared {
	t.Helper()
	c, loadErr := client.Load([]byte(kubeconfig), client.Options{})
	if loadErr != nil {
		t.Fatal(loadErr)
	}
	p := newPrepared(api.ConnectRequest{}, c, slog.New(slog.DiscardHandler))
	p.guess = guess
	close(p.guessed)
	p.forward <- forwarded{conn, err}
	close(p.forward)
	return p
}

func TestPreparedPortForwardServesOnlyItsPod(t *testing.T) {
	ours, theirs := net.Pipe()
	defer theirs.Close()
	at := podName{"kubevpn", "m-1"}
	p := prepared(t, at, ours, nil)
	if conn, err := p.portForward(t.Context(), podName{"kubevpn", "m-2"}); conn != nil || err != nil {
		t.Errorf("for another pod: %v, %v", conn, err)
	}
	if conn, err := p.portForward(t.Context(), at); conn != ours || err != nil {
		t.Errorf("for the pod: %v, %v", conn, err)
	}
	if conn, err := p.portForward(t.Context(), at); conn != nil || err != nil {
		t.Errorf("again: %v, %v", conn, err)
	}
}

func TestPreparedReportsFailureOnce(t *testing.T) {
	at, failure := podName{"kubevpn", "m-1"}, errors.New("the pod does not answer")
	p := prepared(t, at, nil, failure)
	if conn, err := p.portForward(t.Context(), at); conn != nil || !errors.Is(err, failure) {
		t.Errorf("got %v, %v", conn, err)
	}
	if conn, err := p.portForward(t.Context(), at); conn != nil || err != nil {
		t.Errorf("again: %v, %v", conn, err)
	}
}

func TestPreparedCloseClosesUnusedPortForward(t *testing.T) {
	ours, theirs := net.Pipe()
	p := prepared(t, podName{"kubevpn", "m-1"}, ours, nil)
	p.Close()
	if _, err := theirs.Read(make([]byte, 1)); err == nil {
		t.Error("it is open")
	}
}

// A choice that the user has made does not wait for what the cluster says about kube-proxy.
func TestNamedNetstackDoesNotWaitForLook(t *testing.T) {
	for _, tt := range []struct {
		asked string
		waits bool
	}{{api.NetstackAuto, true}, {api.NetstackGVisor, false}, {api.NetstackSystem, false}} {
		t.Run(tt.asked, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				s := newTestConnection(t)
				s.cfg.Request.Netstack = tt.asked
				new(fakeGateways).replace(s)
				s.greet("m-1")
				release := make(chan struct{})
				go s.chooser.look(t.Context(), func(context.Context, string) client.KubeProxy {
					<-release
					return iptablesProxy
				})
				chosen := make(chan error, 1)
				go func() { chosen <- s.chooser.choose(t.Context()) }()
				synctest.Wait()
				if waits := len(chosen) == 0; waits != tt.waits {
					t.Errorf("it waits: %v", waits)
				}
				close(release)
				if err := <-chosen; err != nil {
					t.Error(err)
				}
				synctest.Wait()
				if mode := s.Status().ProxyMode; mode != "iptables" {
					t.Errorf("the status has kube-proxy %q", mode)
				}
			})
		})
	}
}
