package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log"
	"net"
	"net/netip"

	"kubevpn/pkg/host/redirect"
)

// meshAddress is the source address of Istio's proxy when it connects to applications. Istio's rules recognize the
// proxy by it.
var meshAddress = &net.TCPAddr{IP: net.IPv4(127, 0, 0, 6)}

func runMesh(ctx context.Context) error {
	l, err := net.Listen("tcp4", ":15006")
	if err != nil {
		return err
	}
	context.AfterFunc(ctx, func() { l.Close() })
	for {
		c, err := l.Accept()
		if err != nil {
			if ctx.Err() != nil {
				return nil
			}
			return err
		}
		go func() {
			defer c.Close()
			if err := passOn(ctx, c.(*net.TCPConn)); err != nil {
				log.Print(err)
			}
		}()
	}
}

func passOn(ctx context.Context, client *net.TCPConn) error {
	to, err := redirect.OriginalDestination(client)
	if err != nil {
		return err
	}
	to = netip.AddrPortFrom(to.Addr().Unmap(), to.Port())
	if to.Port() == 15006 {
		return fmt.Errorf("%s was not redirected", client.RemoteAddr())
	}
	conn, err := (&net.Dialer{LocalAddr: meshAddress}).DialContext(ctx, "tcp4", to.String())
	if err != nil {
		return errors.Join(err, client.SetLinger(0))
	}
	defer conn.Close()
	server := conn.(*net.TCPConn)
	up := make(chan error, 1)
	go func() {
		_, err := io.Copy(server, client)
		up <- errors.Join(err, server.CloseWrite())
	}()
	_, err = io.Copy(client, server)
	return errors.Join(err, client.CloseWrite(), <-up)
}
