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
	"kubevpn/pkg/door"
	"kubevpn/pkg/rawio"
)

const (
	// drainTime is what open connections have at the end.
	drainTime = 20 * time.Second
	// sidecarLinger is for how long a sidecar that has to end takes new connections: so long Services may lead to it.
	sidecarLinger = 5 * time.Second

	// The wait before the socket is tried again grows from first to last.
	firstRetry = 20 * time.Millisecond
	lastRetry  = 2 * time.Second
	// mute is for how long the owner is told nothing when there is another agent, and it does not answer.
	mute = 5 * time.Second

	// unsent is what the kernel may hold of a carrier before it is sent, as with the traffic manager's: more would only be a
	// queue before which nothing can go.
	unsent = 128 << 10
)

// Config is what an Agent is made of.
type Config struct {
	Owner     string       // hash of the owner's key
	OwnerName string       // user@host
	Port      uint16       // where the primary takes carriers; 0: any
	PodIPs    []netip.Addr // of the pod
	Socket    string       // abstract unix socket; api.AgentSocket
	Listen    []Listen     // a sidecar's ports; empty: it is none
	Greetings io.Writer    // where the owner reads
	Greet     uint16       // port of 127.0.0.1 where the same is said for a minute; 0: none
	Logger    *slog.Logger

	// What a test has instead. kernel opens what redirects need: it is called at most once by each primary, and not for a sidecar.
	kernel    func() (kernel, error)
	listenTCP func(port uint16) (net.Listener, error)
	sameUser  func(net.Conn) error
	dialPlain dialFunc
}

// Listen is a port on which a sidecar listens for the application.
type Listen struct {
	Protocol string `json:"protocol"` // "tcp" or "udp"
	Port     uint16 `json:"port"`     // the application's
	Listen   uint16 `json:"listen"`
}

// Agent is one agent of a pod. Make it with New.
type Agent struct {
	cfg      Config
	log      *slog.Logger
	doorstep *doorstep // of Run; nil: none
}

// New starts nothing.
func New(cfg Config) *Agent {
	if cfg.kernel == nil {
		cfg.kernel = func() (kernel, error) { return openKernel(cfg.Logger) }
	}
	if cfg.listenTCP == nil {
		cfg.listenTCP = listenTCP
	}
	if cfg.sameUser == nil {
		cfg.sameUser = sameUser
	}
	if cfg.dialPlain == nil {
		cfg.dialPlain = dialPlain
	}
	return &Agent{cfg: cfg, log: cfg.Logger}
}

// Run is the agent's life: standby, primary, draining. It returns nil when ctx ends, and when the agent is not needed any
// more. An error is on Config.Greetings as well.
func (a *Agent) Run(ctx context.Context) error {
	var closed func()
	a.doorstep, closed = openDoorstep(a.cfg.Greet, a.log)
	defer closed()
	err := a.run(ctx)
	if err != nil {
		err = errors.Join(err, a.greet(api.AgentGreeting{Error: api.AsError(err)}))
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
			return fmt.Errorf("looking for other agents: %w", err)
		}
		began := time.Now()
		switch err = a.follow(ctx, func(g api.AgentGreeting) error {
			retry, told = 0, false
			return a.greet(g)
		}); {
		case errors.Is(err, errForgotten):
			a.log.Info("ending", "why", err)
			return nil
		case err == nil: // the primary has gone
			a.log.Info("the primary has gone", "after", time.Since(began))
			since = time.Now()
			continue
		}
		a.log.Debug("registering at the primary", "err", err)
		if !told && time.Since(since) > mute {
			told = true
			why := api.Errorf(api.ExitInject, "another agent has this pod, and does not take this one: %w", err)
			if err := a.greet(api.AgentGreeting{Error: why}); err != nil {
				return err
			}
		}
		retry = min(max(2*retry, firstRetry), lastRetry)
		select {
		case <-time.After(retry):
		case <-ctx.Done():
		}
	}
	return nil
}

// follow is standing by, until the primary has gone.
func (a *Agent) follow(ctx context.Context, greet func(api.AgentGreeting) error) error {
	conn, err := dialAgent(ctx, a.cfg.Socket)
	if err != nil {
		return err
	}
	return standBy(ctx, conn, registration{a.cfg.Owner, a.cfg.OwnerName, a.cfg.Listen}, greet)
}

// greet tells the owner where to go.
func (a *Agent) greet(g api.AgentGreeting) error {
	line, err := json.Marshal(g)
	if err == nil {
		line = append(line, '\n')
		_, err = a.cfg.Greetings.Write(line)
	}
	if err != nil {
		return fmt.Errorf("greeting the owner: %w", err)
	}
	if g.Error == nil { // the log says it, and the container's end
		a.doorstep.say(line)
	}
	return nil
}

// lead is being the primary, and draining. It takes agents over.
func (a *Agent) lead(ctx context.Context, agents net.Listener) error {
	defer agents.Close()
	l, err := new(net.ListenConfig).Listen(ctx, "tcp", netip.AddrPortFrom(netip.IPv6Unspecified(), a.cfg.Port).String())
	if errors.Is(err, syscall.EAFNOSUPPORT) {
		l, err = new(net.ListenConfig).Listen(ctx, "tcp", netip.AddrPortFrom(netip.IPv4Unspecified(), a.cfg.Port).String())
	}
	if err != nil {
		return fmt.Errorf("listening for laptops: %w", err)
	}
	return a.serve(ctx, agents, rawio.Listener{Listener: l, Unsent: unsent}, l.Addr().(*net.TCPAddr).AddrPort().Port())
}

// serve is lead on listeners that are there.
func (a *Agent) serve(ctx context.Context, agents, carriers net.Listener, number uint16) error {
	defer carriers.Close()
	live, stop := context.WithCancel(context.WithoutCancel(ctx)) // it outlives ctx by the time to drain
	defer stop()
	g, live := errgroup.WithContext(live)
	p, err := newPrimary(live, carriers, number, a.log)
	if err != nil {
		return err
	}
	p.stays, p.arrived = len(a.cfg.Listen) > 0, a.doorstep.close
	p.plane = newPlane(a.cfg, p, number)
	defer p.plane.close()
	if err := p.plane.start(a.cfg.Listen); err != nil {
		return err
	}
	p.mu.Lock()
	o, err := p.register(a.cfg.Owner, a.cfg.OwnerName)
	if err == nil {
		o.home = true
	}
	p.mu.Unlock()
	if err != nil {
		return err
	}
	others := a.standbyDoor(agents)
	g.Go(func() error { return p.door.Run(live) })
	g.Go(func() error { return others.Run(live) })
	p.work.Go(p.dispatch)
	p.work.Go(func() { p.serveStandbys(others) })
	if err := a.greet(p.greeting); err != nil {
		stop()
		return errors.Join(err, g.Wait())
	}
	a.log.Info("primary", "port", number, "sidecar", p.stays)

	until, done := context.WithCancel(ctx)
	unwatch := context.AfterFunc(live, done) // one of the parts has failed
	why := p.watch(until)
	unwatch()
	done()
	a.log.Info("draining", "why", why)
	if p.stays && live.Err() == nil {
		select {
		case <-time.After(sidecarLinger):
		case <-live.Done():
		}
	}
	p.quit()
	others.Close()
	p.plane.drain()
	stop()
	err = g.Wait()
	p.work.Wait()
	a.log.Info("end")
	return err
}

// standbyDoor lets in processes of the agent's own user.
func (a *Agent) standbyDoor(agents net.Listener) *door.Door {
	return door.New(door.Config{
		Name: "agents' socket", Listener: agents, Logger: a.log,
		Admit: func(conn net.Conn) (net.Conn, door.Reason, error) {
			if err := a.cfg.sameUser(conn); err != nil {
				return nil, "of another user", err
			}
			return conn, "", nil
		},
	})
}
