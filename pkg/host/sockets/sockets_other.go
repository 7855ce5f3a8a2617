//go:build !linux

package sockets

import (
	"errors"
	"net/netip"
)

// List fails on this system.
func List(func(local netip.Addr) bool) ([]Socket, error) { return nil, errors.ErrUnsupported }

// Owners fails on this system.
func Owners(map[uint32]bool) (map[uint32]Process, error) { return nil, errors.ErrUnsupported }
