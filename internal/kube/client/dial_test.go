package client

import (
	"context"
	"errors"
	"io"
	"log"
	"net"
	"net/netip"
	"testing"

	"github.com/google/go-cmp/cmp"
)

func quietLog() *log.Logger { return log.New(io.Discard, "", 0) }

func TestDialerRemembersAddresses(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	_, port, _ := net.SplitHostPort(l.Addr().String())
	d := newDialer()
	d.lookup = func(_ context.Context, _, host string) ([]netip.Addr, error) {
		if host != "api.example" {
			return nil, errors.New("who?")
		}
		return []netip.Addr{netip.MustParseAddr("::ffff:192.0.2.7"), netip.MustParseAddr("2001:db8::7")}, nil
	}
	for _, host := range []string{"api.example", "198.51.100.4", "fe80::1%eth0"} {
		if err := d.resolve(t.Context(), host); err != nil {
			t.Fatal(err)
		}
	}
	if err := d.resolve(t.Context(), "other.example"); err == nil {
		t.Fatal("resolved")
	}
	conn, err := d.DialContext(t.Context(), "tcp", l.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	conn.Close()
	want := []string{"127.0.0.1", "192.0.2.7", "198.51.100.4", "2001:db8::7", "fe80::1"}
	var got []string
	for _, a := range d.addresses() {
		got = append(got, a.String())
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Fatal(diff)
	}
	// The name cannot be resolved any more; the address that worked still does.
	d.remember("gone.invalid", netip.MustParseAddr("127.0.0.1"))
	conn, err = d.DialContext(t.Context(), "tcp", net.JoinHostPort("gone.invalid", port))
	if err != nil {
		t.Fatal(err)
	}
	conn.Close()
}

func TestClusterIDIsStable(t *testing.T) {
	load := func(kubeconfig string) *Cluster {
		t.Helper()
		c, err := Load([]byte(kubeconfig), Options{})
		if err != nil {
			t.Fatal(err)
		}
		return c
	}
	const config = `{"current-context":"x","contexts":[{"name":"x","context":{"cluster":"lab","user":"u"}}],
		"clusters":[{"name":"lab","cluster":{"server":"https://10.0.0.1:6443"}}],"users":[{"name":"u","user":{"token":"t"}}]}`
	c := load(config)
	if c.ID() != "addfdceacb1f" {
		t.Errorf("ID %s", c.ID()) // it names routes, links and files: it must not change
	}
	if ids, err := Identify([]byte(config)); err != nil || ids.Cluster != c.ID() || ids.Connection != c.ConnectionID() {
		t.Errorf("Identify = %+v, %v; want %s and %s", ids, err, c.ID(), c.ConnectionID())
	}
	if c.Name() != "lab" || c.Context() != "x" || c.Server() != "https://10.0.0.1:6443" {
		t.Errorf("%s %s %s", c.Name(), c.Context(), c.Server())
	}
	if err := c.Resolve(t.Context()); err != nil || len(c.Addresses()) != 1 || c.Addresses()[0] != netip.MustParseAddr("10.0.0.1") {
		t.Errorf("%v, %v", c.Addresses(), err)
	}
}

func TestResolveUsesTheProxysAddress(t *testing.T) {
	c, err := Load([]byte(`{"current-context":"x","contexts":[{"name":"x","context":{"cluster":"lab"}}],
		"clusters":[{"name":"lab","cluster":{"server":"https://api.example:6443","proxy-url":"socks5://192.0.2.9:1080"}}]}`), Options{})
	if err != nil {
		t.Fatal(err)
	}
	if err := c.Resolve(t.Context()); err != nil || len(c.Addresses()) != 1 || c.Addresses()[0] != netip.MustParseAddr("192.0.2.9") {
		t.Errorf("%v, %v", c.Addresses(), err)
	}
}
