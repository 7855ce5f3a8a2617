//go:build !unix

package sshjump

import (
	"context"
	"io"
	"net"
)

// Client fails: the ssh program of this system shares no connections.
type Client struct{ config Config }

// New returns a client.
func New(c Config) *Client { return &Client{c} }

// Hosts returns the jump hosts.
func (c *Client) Hosts() Hosts { return c.config.Hosts }

// Open fails.
func (c *Client) Open(context.Context, io.Writer) error {
	return &Error{Hosts: c.config.Hosts, Said: "ssh on this system has no ControlMaster"}
}

// Release does nothing.
func (c *Client) Release() {}

// DialContext fails.
func (c *Client) DialContext(ctx context.Context, _ string) (net.Conn, error) {
	return nil, c.Open(ctx, nil)
}

// Peer fails.
func (c *Client) Peer(ctx context.Context) (string, error) { return "", c.Open(ctx, nil) }
