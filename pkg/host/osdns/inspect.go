package osdns

import (
	"net/netip"
	"time"
)

// Inspection describes the name resolution of this machine, and what a Configurator would do. Inspect changes nothing.
type Inspection struct {
	Mode        Mode             // that Set would use; ModeNone: none fits, see Warnings
	Nameservers []netip.AddrPort // that answer now, in order
	File        string           // /etc/resolv.conf after symlinks; empty where the system has none
	Writer      string           // the program that writes File, such as "NetworkManager"; empty: unknown, or a person
	Edited      bool             // File has the edit of a Configurator
	Changed     time.Time        // of File
	Warnings    []string         // that Set would give
}
