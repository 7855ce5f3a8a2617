package main

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"log"
	"net"
	"net/netip"

	"golang.org/x/sync/errgroup"

	"kubevpn/pkg/host/redirect"
)

// meshAddress is the source address of Istio's proxy when it connects to applications. Istio's rules recognize the
// proxy by it.
var meshAddress = &net.TCPAddr{IP: net.IPv4(127, 0, 0, 6)}

// stream is a connection whose halves close separately: TCP, or TLS on it.
type stream interface {
	net.Conn
	CloseWrite() error
}

// runMesh serves connections that the mesh's rules redirect. The pod's own ones leave inside TLS, with the certificate.
func runMesh(ctx context.Context, cert, key string) error {
	g, ctx := errgroup.WithContext(ctx)
	g.Go(func() error {
		return serveMesh(ctx, 15006, func(ctx context.Context, to string) (stream, error) {
			conn, err := (&net.Dialer{LocalAddr: meshAddress}).DialContext(ctx, "tcp4", to)
			if err != nil {
				return nil, err
			}
			return conn.(*net.TCPConn), nil
		})
	})
	if cert != "" {
		pair, err := tls.LoadX509KeyPair(cert, key)
		if err != nil {
			return err
		}
		secure := tls.Dialer{Config: &tls.Config{Certificates: []tls.Certificate{pair}, InsecureSkipVerify: true}}
		g.Go(func() error {
			return serveMesh(ctx, 15001, func(ctx context.Context, to string) (stream, error) {
				conn, err := secure.DialContext(ctx, "tcp4", to)
				if err != nil {
					return nil, err
				}
				return conn.(*tls.Conn), nil
			})
		})
	}
	return g.Wait()
}

func serveMesh(ctx context.Context, port uint16, dial func(context.Context, string) (stream, error)) error {
	l, err := net.Listen("tcp4", fmt.Sprintf(":%d", port))
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
			if err := passOn(ctx, c.(*net.TCPConn), port, dial); err != nil {
				log.Print(err)
			}
		}()
	}
}

func passOn(ctx context.Context, client *net.TCPConn, port uint16,
	dial func(context.Context, string) (stream, error)) error {
	to, err := redirect.OriginalDestination(client)
	if err != nil {
		return err
	}
	to = netip.AddrPortFrom(to.Addr().Unmap(), to.Port())
	if to.Port() == port {
		return fmt.Errorf("%s was not redirected", client.RemoteAddr())
	}
	server, err := dial(ctx, to.String())
	if err != nil {
		return errors.Join(err, client.SetLinger(0))
	}
	defer server.Close()
	up := make(chan error, 1)
	go func() {
		_, err := io.Copy(server, client)
		up <- errors.Join(err, server.CloseWrite())
	}()
	_, err = io.Copy(client, server)
	return errors.Join(err, client.CloseWrite(), <-up)
}
