package api

import (
	"fmt"
	"strconv"
	"strings"
)

// Inbound is a port of this laptop that other laptops may connect to. Its text is "8080" or "8080/tcp" for a TCP port,
// "8080/udp" for a UDP port, and "all" for every port and protocol. The zero value allows nothing.
type Inbound struct {
	All  bool
	UDP  bool // UDP, else TCP
	Port uint16
}

func (i Inbound) String() string {
	switch {
	case i.All:
		return "all"
	case i.UDP:
		return fmt.Sprintf("%d/udp", i.Port)
	}
	return strconv.Itoa(int(i.Port))
}

// MarshalText implements encoding.TextMarshaler.
func (i Inbound) MarshalText() ([]byte, error) { return []byte(i.String()), nil }

// UnmarshalText implements encoding.TextUnmarshaler.
func (i *Inbound) UnmarshalText(text []byte) error {
	s := string(text)
	if s == "all" {
		*i = Inbound{All: true}
		return nil
	}
	port, proto, _ := strings.Cut(s, "/")
	n, err := strconv.ParseUint(port, 10, 16)
	if err != nil || n == 0 || proto != "" && proto != "tcp" && proto != "udp" {
		return fmt.Errorf("%q is not a port; write it like 8080, 8080/udp or all", s)
	}
	*i = Inbound{Port: uint16(n), UDP: proto == "udp"}
	return nil
}
