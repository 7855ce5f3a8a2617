package daemon

import (
	"context"
	"crypto/rand"
	"errors"
	"log/slog"
	"net"

	"kubevpn/internal/api"
	"kubevpn/pkg/host/sandbox"
)

// HoldConfig configures Hold. One of Helper, Place and Proxy must be set: they are how programs reach the cluster.
type HoldConfig struct {
	Request api.InterceptRequest // Hold sets Attached; without workloads, there are no intercepts
	Helper  Helper               // changes the network of this machine; Hold owns it
	Place   sandbox.Place        // a network of the program's own
	// Proxy is on a loopback address. Hold closes it if it has served it: SOCKS5 and HTTP for programs of this machine.
	Proxy    net.Listener
	Owner    Owner           // of the intercepts
	Progress func(api.Event) // receives each event; may be called concurrently
	Logger   *slog.Logger
	Factory  Factory // nil: the product's
}

// Hold makes a connection, and intercepts on it, in this process. It keeps them until ctx ends, then removes them and
// returns nil, or until one of them ends. If ctx ends before they are established, it returns the cause of ctx. With
// Place or Proxy, it neither uses nor changes the network configuration of this machine.
//
//	Place: program ─▶ TUN ─▶ session ─┬─ the cluster's ══▶ traffic manager
//	            ▲                     └─ all else ───────▶ a socket of this process
//	            └── Place.Dial ◀── intercepts ◀══ agents
//
// It uses the connections of the daemon, with one connection. In place of the root helper, Place and Proxy have a
// Helper that needs no root.
func Hold(ctx context.Context, cfg HoldConfig) error {
	client, err := cfg.client()
	if err != nil {
		return err
	}
	cs := newConnections(cfg.Factory, client, cfg.Owner, cfg.Logger)
	helper := cfg.Helper
	switch {
	case cfg.Place != nil:
		h := newPlaceHelper(cfg.Place, "/etc/resolv.conf", cfg.Logger)
		cs.group.Go(h.follow)
		cs.dial, cs.intercepts.dial, cs.localhost, helper = cfg.Place.Dial, cfg.Place.Dial, cfg.Place, h
	case cfg.Proxy != nil:
		cs.proxy = newProxy(cfg.Proxy, cfg.Request.Connect.AddHeaders, cfg.Logger)
		helper = cs.proxy
	}
	if err := cs.adopt(helper); err != nil {
		return err
	}
	req := cfg.Request
	req.Attached = true
	err = cs.intercept(ctx, req, cfg.Progress)
	err = errors.Join(err, cs.shutDown(cfg.Progress))
	cs.intercepts.group.Wait()
	cs.group.Wait()
	return err
}

// client returns the secret of the client: that of the daemon of this user, or one of its own for a connection beside
// the daemon, which may have a connection to the same cluster.
func (c *HoldConfig) client() ([]byte, error) {
	if c.Helper != nil {
		return c.Owner.client()
	}
	client := make([]byte, 32)
	rand.Read(client) // never fails (crypto/rand)
	return client, nil
}
