// Package guest runs a node on its own kernel: a user-mode Linux kernel, which is an ordinary program of this machine
// and has modules that the machine's kernel lacks. The guest sees the machine's files through hostfs and runs the
// machine's programs. Its memory holds what it writes.
//
//	machine                                    │ guest
//	                                           │
//	lab ── linux.uml init=... ─────────────────┼──▶ process 1: Boot
//	                                           │      └── Serve, alone in a network namespace
//	lab exec, kubelet's stand-in ── Client ────┼──▶       ├── kubelet
//	        169.254.1.1 ═══ a separate wire ═╪═ 169.254.1.2 └── bash ...
//	router's bridge ═══ the node's wire ═══════╪═ eth0
//
// Every program in the guest has a stand-in on the machine, a call of Client.Run. The stand-in has the program's
// standard streams and ends when the program ends. If the stand-in is killed, the guest kills the program.
package guest

import "net/netip"

// Variable names the file with a guest's Config. On the kernel's command line it becomes process 1's environment.
const Variable = "LAB_GUEST"

// Config describes a guest. The lab writes it to a file, which Boot reads.
type Config struct {
	Hostname string `json:"hostname"`

	Hidden  []string `json:"hidden"`  // directories that the guest replaces with empty ones
	Visible []string `json:"visible"` // directories that show the machine's files, read-only

	Modules  []string          `json:"modules"`  // of the kernel, which no program loads on demand
	Settings []string          `json:"settings"` // "net.ipv4.ip_forward=1"
	Files    map[string]string `json:"files"`    // content by path
	Links    map[string]string `json:"links"`    // symbolic links: target by path
	Groups   []string          `json:"groups"`   // control groups, parents first

	Network Network      `json:"network"`
	Control netip.Prefix `json:"control"` // the address that Serve listens on, on the device ControlDevice
}

// Network is the guest's one link to its lab.
type Network struct {
	Name      string         `json:"name"` // "eth0"
	Addresses []netip.Prefix `json:"addresses"`
	Routes    []Route        `json:"routes"`
}

// Route is a route through a neighbor.
type Route struct {
	To  netip.Prefix `json:"to"`
	Via netip.Addr   `json:"via"`
}

// The names of the devices when the kernel starts.
const (
	NetworkDevice = "vec0"
	ControlDevice = "vec1"
)

// Port is the port of Config.Control on which Serve listens.
const Port = 1

// Modules is the directory of the kernel's modules in Debian's package user-mode-linux. It contains a directory for
// each version.
const Modules = "/usr/lib/uml/modules"
