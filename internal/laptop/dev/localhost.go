package dev

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"strconv"
	"sync"
	"syscall"

	corev1 "k8s.io/api/core/v1"

	"kubevpn/internal/api"
	"kubevpn/internal/kube/podconn"
	"kubevpn/pkg/protocol/socks"
	"kubevpn/pkg/wire/authlistener"
)

// maxForwards limits the conns to the pod's localhost: each is one to the API server.
const maxForwards = 256

// LocalhostPort is a port of the pod's localhost, and the port of this machine's that leads there.
type LocalhostPort struct{ Pod, Local uint16 }

// forwardLocalhost gives programs of this machine ports of the pod's localhost, until stop is called. It listens when
// it returns.
//
//	program ─▶ 127.0.0.1:15432 ─▶ port-forward ─▶ API server ─▶ kubelet ─▶ localhost:5432 in the pod
func (r *Runner) forwardLocalhost(p *Program) (stop func(), err error) {
	ctx, cancel := context.WithCancel(context.Background())
	f := &forwarder{namespace: r.target.Namespace, running: p.cfg.Running, pods: podconn.New(r.target.Cluster),
		log: slog.New(warner{warn: r.warn}), open: authlistener.Bound{Max: maxForwards}}
	stop = func() {
		cancel()
		f.conns.Wait()
	}
	for _, port := range r.Localhost {
		for _, host := range []string{"127.0.0.1", "::1"} {
			l, err := net.Listen("tcp", net.JoinHostPort(host, strconv.Itoa(int(port.Local))))
			if err != nil && host == "::1" && !errors.Is(err, syscall.EADDRINUSE) {
				continue // this machine has no IPv6
			}
			if err != nil {
				stop()
				return nil, api.Errorf(api.ExitUsage, "--localhost: %w", err).
					WithHint("choose a free port of this machine: --localhost %d:PORT", port.Pod)
			}
			context.AfterFunc(ctx, func() { l.Close() })
			f.conns.Go(func() { f.accept(ctx, l, port.Pod) })
		}
	}
	return stop, nil
}

// forwarder forwards conns of this machine to one running pod, and to another when that does not answer.
type forwarder struct {
	namespace string
	running   func(context.Context) (*corev1.Pod, error)
	pods      *podconn.Dialer
	log       *slog.Logger // shows the user warnings
	open      authlistener.Bound
	conns     sync.WaitGroup

	mu  sync.Mutex
	pod string // the name; empty: not known
}

func (f *forwarder) accept(ctx context.Context, l net.Listener, port uint16) {
	fail := func(err error) {
		if err != nil && ctx.Err() == nil {
			f.log.Warn(fmt.Sprintf("port %d of the pod's localhost: %v", port, err))
		}
	}
	fail(authlistener.Serve(ctx, l, f.log, func(conn net.Conn) {
		held := f.open.Enter(conn)
		f.conns.Go(func() {
			defer held.Leave()
			to, err := f.dial(ctx, port)
			if err == nil {
				socks.Relay(ctx, conn, to, conn)
				return
			}
			fail(err)
			conn.(*net.TCPConn).SetLinger(0) // fails only if conn is closed
			conn.Close()
		})
	}))
}

// dial connects to a port of the pod that it used last, or of one that runs now.
func (f *forwarder) dial(ctx context.Context, port uint16) (net.Conn, error) {
	f.mu.Lock()
	last := f.pod
	f.mu.Unlock()
	if last != "" {
		if conn, err := f.pods.DialPod(ctx, f.namespace, last, port); err == nil {
			return conn, nil
		}
	}
	pod, err := f.running(ctx)
	if err == nil && pod == nil {
		err = errors.New("no pod of the workload runs")
	}
	if err != nil {
		return nil, err
	}
	f.mu.Lock()
	f.pod = pod.Name
	f.mu.Unlock()
	return f.pods.DialPod(ctx, f.namespace, pod.Name, port)
}
