// Package guest is what runs a node on a kernel of its own: a user-mode Linux kernel, which is an ordinary program of
// this machine and has what the machine's kernel lacks. The guest's files are the machine's, through hostfs, and what
// it writes stays in its memory; its programs are the machine's programs.
//
//	machine                                    │ guest
//	                                           │
//	lab ── linux.uml init=... ─────────────────┼──▶ process 1: Boot
//	                                           │      └── Serve, in a network namespace that nothing else is in
//	lab exec, kubelet's stand-in ── Client ────┼──▶       ├── kubelet
//	        169.254.1.1 ═══ a wire of its own ═╪═ 169.254.1.2 └── bash ...
//	router's bridge ═══ the node's wire ═══════╪═ eth0
//
// Every program in the guest has a stand-in on the machine, a Client's Run: it has the program's standard streams and
// ends as the program ends, and when it is killed, so is the program.
package guest

import "net/netip"

// Variable names the file with a guest's Config. On the kernel's command line it becomes process 1's environment.
const Variable = "LAB_GUEST"

// Config describes a guest. The lab writes it to a file, which Boot reads.
type Config struct {
	Hostname string `json:"hostname"`

	Hidden  []string `json:"hidden"`  // directories that are the guest's own, and empty at first
	Visible []string `json:"visible"` // directories that are the machine's own, read-only, as they change

	Modules  []string          `json:"modules"`  // of the kernel, that nothing asks for by itself
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

// Route is a route by way of a neighbour.
type Route struct {
	To  netip.Prefix `json:"to"`
	Via netip.Addr   `json:"via"`
}

// The devices' names, as the kernel has them at first.
const (
	NetworkDevice = "vec0"
	ControlDevice = "vec1"
)

// Port is where Serve listens, on Config.Control.
const Port = 1

// Modules is where Debian's package user-mode-linux has the kernel's modules, below its version.
const Modules = "/usr/lib/uml/modules"
