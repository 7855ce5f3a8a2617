//go:build !linux

package agent

import (
	"context"
	"errors"
	"net"
)

// Agents run in pods, on Linux.

func listenAgents(context.Context, string) (net.Listener, error) { return nil, errors.ErrUnsupported }

func dialAgent(context.Context, string) (net.Conn, error) { return nil, errors.ErrUnsupported }

func sameUser(net.Conn) error { return errors.ErrUnsupported }
