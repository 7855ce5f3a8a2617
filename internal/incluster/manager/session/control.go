package session

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"strconv"
	"time"

	"kubevpn/internal/api"
	"kubevpn/internal/incluster/access"
	"kubevpn/internal/incluster/dial"
	"kubevpn/internal/incluster/manager/watch"
	"kubevpn/internal/process/version"
	"kubevpn/pkg/wire/transport"
)

const (
	maxHello     = 64 << 10 // bytes of a ClientHello
	maxPiece     = 8 << 10  // bytes of names, about
	settleTime   = 3 * time.Second
	farewellTime = 5 * time.Second
)

// acceptControl holds the control stream:
//
//	laptop                     manager
//	  │ ClientHello ─────────────▶│   perhaps first Challenge and Identity (authorize.go)
//	  │◀──────── Hello with State │   or Error, and the session ends
//	  │◀──────────── Names, Reset │   if Services may be watched
//	  │◀── State, Names, State... │   when something has changed
//
// A session has one control stream. Each laptop gets the latest notice when it is ready to read. A slow laptop skips
// notices and blocks nobody.
func (s *session) acceptControl(ctx context.Context, in *transport.Incoming) error {
	laptop, err := in.Accept()
	if err != nil {
		return err
	}
	defer laptop.Close()
	hello, err := readHello(laptop)
	if err != nil {
		s.refuse(laptop, api.Errorf(api.ExitIncompatible, "invalid ClientHello: %w", err))
		return nil
	}
	by, err := parseCaller(hello)
	if refusal := incompatible(hello); refusal != nil {
		s.refuse(laptop, refusal)
		return nil
	} else if err != nil {
		s.refuse(laptop, api.Errorf(api.ExitUsage, "%w", err))
		return nil
	}
	// kube-proxy picks the endpoints of a system netstack's packets, so the manager could not limit them.
	if s.server.cfg.Limited && hello.Netstack == api.NetstackSystem && !hello.MayUseGVisor {
		s.refuse(laptop, api.Errorf(api.ExitNetstack, "%w, which needs `--netstack gvisor`", access.ErrNotAllowed).
			WithHint("use `kubevpn connect --netstack gvisor`"))
		return nil
	}
	var refusal *api.Error
	if by.User, err = s.authenticate(ctx, laptop, &hello); errors.As(err, &refusal) {
		s.refuse(laptop, refusal)
		return nil
	} else if err != nil {
		s.log.Warn("session refused", "err", err)
		return s.transport.Close() // the laptop tries again
	}
	if err := s.identify(by); err != nil {
		s.log.Warn("session refused", "err", err)
		return s.transport.Close() // the laptop tries again
	}
	s.log.Info("laptop", "version", hello.Version, "client", shortHash(hello.Client), "namespace", hello.Namespace,
		"scheduler", by.Scheduler)

	session := ctx
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	go func() {
		defer cancel()
		io.Copy(io.Discard, laptop) // the laptop sends nothing more; this ends with the stream
	}()
	// A manager that has just started knows little yet, and should not send that as its state.
	select {
	case <-s.server.cfg.Watch.Ready:
	case <-time.After(settleTime):
	case <-ctx.Done():
	}
	// A ready manager also knows which networks the lease must avoid.
	system := hello.Netstack == api.NetstackSystem && !s.server.cfg.Limited
	lease, run := s.peer.Admit(&hello, system, s.server.around())
	if run != nil {
		s.streams.Go(func() { run(session) })
	}
	served := dial.NodeServes(ctx, s.server.cfg.Watch.Self.APIServer)
	s.log.Info("lease", "addrs", lease.Addrs, "netstack", hello.Netstack)
	return s.sendNotices(ctx, laptop, s.server.hello(&hello, lease), served)
}

// sendNotices writes notices until the stream ends.
func (s *session) sendNotices(ctx context.Context, laptop io.Writer, hello *api.ManagerHello,
	served string) error {
	latest, newer := s.server.cfg.Watch.Notices.Get()
	first := *latest
	first.State.Sessions = s.server.Laptops() // this one may be younger than the notice
	s.server.cfg.Router.Describe(&first.State)
	first.State.NodeServes = served
	told := &first
	hello.State = first.State
	hello.State.InnerNetworks = s.server.cfg.Router.Others(s.peer, first.State.InnerNetworks)
	messages := append([]api.ControlMessage{{Hello: hello}},
		watch.Changes(&watch.Notice{State: first.State}, told)...)
	for {
		for _, message := range messages {
			if message.State != nil {
				state := *message.State // which all sessions share
				state.InnerNetworks = s.server.cfg.Router.Others(s.peer, state.InnerNetworks)
				message.State = &state
			}
			if err := send(laptop, message); err != nil {
				return nil // the laptop is gone
			}
		}
		select {
		case <-newer:
		case <-ctx.Done():
			return nil
		}
		latest, newer = s.server.cfg.Watch.Notices.Get()
		messages = watch.Changes(told, latest)
		told = latest
	}
}

// send writes a message. It writes names in pieces: as one piece, those of a large cluster would occupy a megabyte for
// each laptop that does not read.
func send(laptop io.Writer, message api.ControlMessage) error {
	d := message.Names
	if d == nil {
		return json.NewEncoder(laptop).Encode(message)
	}
	line := fmt.Appendf(nil, `{"names":{"reset":%t`, d.Reset)
	for _, part := range []struct {
		field string
		names map[string][]string
	}{{"add", d.Add}, {"remove", d.Remove}, {"changed", d.Changed}} {
		if len(part.names) == 0 {
			continue
		}
		line = fmt.Appendf(line, `,%q`, part.field)
		separator := ":{"
		for namespace, names := range part.names {
			line = fmt.Appendf(line, `%s%q:[`, separator, namespace)
			separator = ","
			for i, name := range names {
				if i > 0 {
					line = append(line, ',')
				}
				line = strconv.AppendQuote(line, name) // a DNS label has nothing to escape
				if len(line) < maxPiece {
					continue
				}
				if _, err := laptop.Write(line); err != nil {
					return err
				}
				line = line[:0]
			}
			line = append(line, ']')
		}
		line = append(line, '}')
	}
	_, err := laptop.Write(append(line, "}}\n"...))
	return err
}

// hello returns the answer to a laptop's hello, without the state.
func (s *Server) hello(to *api.ClientHello, lease api.Lease) *api.ManagerHello {
	protocol, _ := api.CommonProtocol(to.Protocol, to.Oldest) // incompatible has checked it
	return &api.ManagerHello{
		Protocol: protocol, Version: version.String(), Pod: s.cfg.PodName, Node: s.cfg.Watch.Self.Node, Lease: lease,
	}
}

// readHello reads the laptop's first line. It ignores unknown fields, because the protocol's number alone decides about
// compatibility.
func readHello(r io.Reader) (api.ClientHello, error) {
	var hello api.ClientHello
	err := json.NewDecoder(io.LimitReader(r, maxHello)).Decode(&hello)
	return hello, err
}

// shortHash returns a hash for the log. The identity itself is secret: it allows taking over the client's lease.
func shortHash(client string) string {
	sum := sha256.Sum256([]byte(client))
	return hex.EncodeToString(sum[:4])
}

// incompatible returns an error if the manager cannot serve the laptop, or nil.
func incompatible(hello api.ClientHello) *api.Error {
	if _, ok := api.CommonProtocol(hello.Protocol, hello.Oldest); ok {
		return nil
	}
	err := api.Errorf(api.ExitIncompatible,
		"the traffic manager is kubevpn %s and speaks protocol %d; this kubevpn is %s and speaks protocol %d",
		version.String(), api.Protocol, hello.Version, hello.Protocol)
	if hello.Protocol > api.Protocol {
		return err.WithHint("`kubevpn connect --upgrade` replaces the traffic manager; it ends the sessions of " +
			"others who use it")
	}
	return err.WithHint("install kubevpn %s on this machine; `kubevpn connect --upgrade` would put this older "+
		"version into the cluster instead, and end the sessions of others",
		version.String())
}

// refuse sends the reason to the laptop, and ends the session once the laptop has read it.
func (s *session) refuse(laptop *transport.Stream, why *api.Error) {
	s.log.Warn("session refused", "err", why)
	if err := json.NewEncoder(laptop).Encode(api.ControlMessage{Error: why}); err == nil {
		laptop.CloseWrite()
		laptop.SetReadDeadline(time.Now().Add(farewellTime))
		io.Copy(io.Discard, laptop) // until the laptop has closed its end
	}
	s.transport.Close()
}
