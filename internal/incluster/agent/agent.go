//go:build linux

package agent

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/netip"
	"syscall"
	"time"

	"golang.org/x/sync/errgroup"

	"kubevpn/internal/api"
	"kubevpn/pkg/wakeup"
	"kubevpn/pkg/wire/authlistener"
	"kubevpn/pkg/wire/nonblock"
)

const (
	// drainTime is the time that open connections get at the end.
	drainTime = 20 * time.Second
	// sidecarLinger is how long an ending sidecar accepts new connections, because Services may still lead to it.
	sidecarLinger = 5 * time.Second

	// The backoff between attempts to bind or dial the socket grows from firstRetry to lastRetry.
	firstRetry = 20 * time.Millisecond
	lastRetry  = 2 * time.Second
	// answerTimeout is how long the leader may leave registrations unanswered before the standby tells its owner.
	answerTimeout = 5 * time.Second

	// maxUnsent limits the unsent bytes of a conn that the kernel buffers, as in the traffic manager: no frame can
	// overtake them.
	maxUnsent = 128 << 10
)

// Config configures an Agent.
type Config struct {
	Owner     string          // hash of the owner's key
	OwnerName string          // user@host
	PodIPs    []netip.Addr    // addresses of the pod
	Socket    string          // abstract unix socket; api.AgentSocket
	Listen    []api.AgentPort // a sidecar's ports; empty: not a sidecar
	Output    io.Writer       // receives api.AgentInfo lines: standard output
	InfoPort  uint16          // port of 127.0.0.1 that serves the latest line for a minute; 0: none
	ReadyPort uint16          // for readiness probes of a pod without an application; 0: none
	Logger    *slog.Logger

	Pod         api.AgentPod
	CheckedFrom []netip.Prefix // where the kubelet connects from

	// New sets these, and tests replace them. kernel prepares redirects: each leader calls it at most once, and not for
	// a sidecar.
	kernel    func() (kernel, error)
	listenTCP func(port uint16) (net.Listener, error)
	sameUser  func(net.Conn) error
	dialPlain dialFunc
	// listeners returns the addresses on which TCP sockets of the pod listen.
	listeners func() ([]netip.AddrPort, error)
}

// Agent is one agent of a pod. Create it with New.
type Agent struct {
	cfg        Config
	log        *slog.Logger
	infoServer *infoServer // of Run; nil: none
}

// New returns an Agent. It starts nothing.
func New(cfg Config) *Agent {
	cfg.kernel = func() (kernel, error) { return openKernel(cfg) }
	cfg.listenTCP, cfg.sameUser, cfg.dialPlain, cfg.listeners = listenTCP, sameUser, dialPlain, readListeners
	return &Agent{cfg: cfg, log: cfg.Logger}
}

// Run runs the agent as standby, leader and draining, until ctx ends or nobody needs the agent any more. It writes an
// error to Config.Output as well.
func (a *Agent) Run(ctx context.Context) error {
	var closed func()
	a.infoServer, closed = openInfoServer(a.cfg.InfoPort, a.log)
	defer closed()
	err := a.run(ctx)
	if err != nil {
		err = errors.Join(err, a.announce(api.AgentInfo{Error: api.AsError(err)}))
	}
	return err
}

func (a *Agent) run(ctx context.Context) error {
	retry, since, told := time.Duration(0), time.Now(), false
	for ctx.Err() == nil {
		agents, err := listenAgents(ctx, a.cfg.Socket)
		if err == nil {
			return a.lead(ctx, agents)
		}
		if !errors.Is(err, syscall.EADDRINUSE) {
			return fmt.Errorf("cannot look for other agents: %w", err)
		}
		began := time.Now()
		switch err = a.follow(ctx, func(g api.AgentInfo) error {
			retry, told, g.Leader = 0, false, api.LeaderOther
			return a.announce(g)
		}); {
		case errors.Is(err, errForgotten):
			a.log.Info("ending", "reason", err)
			return nil
		case err == nil: // the leader ended
			a.log.Info("the leader ended", "after", time.Since(began))
			since = time.Now()
			continue
		}
		a.log.Debug("cannot register at the leader", "err", err)
		if !told && time.Since(since) > answerTimeout {
			told = true
			why := api.Errorf(api.ExitInject, "another agent leads in this pod, and does not accept this one: %w", err)
			if err := a.announce(api.AgentInfo{Error: why}); err != nil {
				return err
			}
		}
		retry = min(max(2*retry, firstRetry), lastRetry)
		wakeup.Pause(ctx, retry)
	}
	return nil
}

// follow stands by until the leader ends.
func (a *Agent) follow(ctx context.Context, announce func(api.AgentInfo) error) error {
	conn, err := dialAgent(ctx, a.cfg.Socket)
	if err != nil {
		return err
	}
	return standBy(ctx, conn, registration{a.cfg.Owner, a.cfg.OwnerName, a.cfg.Listen}, announce)
}

// announce tells the owner which agent leads.
func (a *Agent) announce(g api.AgentInfo) error {
	line, err := json.Marshal(g)
	if err == nil {
		line = append(line, '\n')
		_, err = a.cfg.Output.Write(line)
	}
	if err != nil {
		return fmt.Errorf("cannot tell the owner: %w", err)
	}
	if g.Error == nil { // the container's log and its end show errors
		a.infoServer.set(line)
	}
	return nil
}

// lead runs the agent as leader, and then drains. It closes agents.
func (a *Agent) lead(ctx context.Context, agents net.Listener) error {
	defer agents.Close()
	l, err := new(net.ListenConfig).Listen(ctx, "tcp", ":0")
	if err != nil {
		return fmt.Errorf("cannot listen for laptops: %w", err)
	}
	return a.serve(ctx, agents, nonblock.Listener{Listener: l, Unsent: maxUnsent},
		l.Addr().(*net.TCPAddr).AddrPort().Port())
}

// serve leads on these listeners, which it closes.
func (a *Agent) serve(ctx context.Context, agents, conns net.Listener, number uint16) error {
	defer conns.Close()
	live, stop := context.WithCancel(context.WithoutCancel(ctx)) // it outlives ctx, to drain
	defer stop()
	g, live := errgroup.WithContext(live)
	l, err := newLeader(live, conns, number, a.log)
	if err != nil {
		return err
	}
	l.sidecar, l.arrived, l.own = len(a.cfg.Listen) > 0, a.infoServer.close, a.cfg.PodIPs
	l.announce = func() error { return a.announce(l.info) }
	l.receiver = newReceiver(a.cfg, l, number)
	defer l.receiver.close()
	if err := l.receiver.start(a.cfg.Listen); err != nil {
		return err
	}
	var probes net.Listener
	if a.cfg.ReadyPort > 0 {
		if probes, err = a.cfg.listenTCP(a.cfg.ReadyPort); err != nil {
			return fmt.Errorf("listening for readiness probes: %w", err)
		}
		defer probes.Close()
	}
	l.mu.Lock()
	o, err := l.register(a.cfg.Owner, a.cfg.OwnerName)
	if err == nil {
		o.own = true
	}
	l.mu.Unlock()
	if err != nil {
		return err
	}
	others := a.standbyListener(agents)
	g.Go(func() error { return l.listener.Run(live) })
	g.Go(func() error { return others.Run(live) })
	if probes != nil {
		g.Go(func() error { return l.serveReady(live, probes) })
	}
	l.work.Go(l.dispatch)
	l.work.Go(func() { l.serveStandbys(others) })
	if err := l.announce(); err != nil {
		stop()
		return errors.Join(err, g.Wait())
	}
	a.log.Info("this agent is the leader", "port", number, "sidecar", l.sidecar)

	until, done := context.WithCancel(ctx)
	unwatch := context.AfterFunc(live, done) // one of the parts has failed
	why := l.watch(until)
	unwatch()
	done()
	a.log.Info("draining", "reason", why)
	if l.sidecar {
		wakeup.Pause(live, sidecarLinger)
	}
	l.quit()
	others.Close()
	l.receiver.drain()
	stop()
	err = g.Wait()
	l.work.Wait()
	a.log.Info("ended")
	return err
}

// standbyListener accepts processes of the agent's own user.
func (a *Agent) standbyListener(agents net.Listener) *authlistener.Listener {
	return authlistener.New(authlistener.Config{
		Name: "agents' socket", Listener: agents, Logger: a.log,
		Authenticate: func(conn net.Conn) (net.Conn, authlistener.Reason, error) {
			if err := a.cfg.sameUser(conn); err != nil {
				return nil, "another user", err
			}
			return conn, "", nil
		},
	})
}
