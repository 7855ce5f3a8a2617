//go:build !linux

package netstack

import "net"

func wasReset(*net.TCPConn) bool { return false }
