//go:build linux

package main

import (
	"fmt"
	"net/netip"
	"slices"

	"kubevpn/internal/api"
)

// path is one way from the laptop to a pod. It is a column of the tables.
type path string

const (
	kernel        path = "kernel, routed"
	portForward   path = "`kubectl port-forward`"
	upgraded      path = "raw upgrade"
	gvisorForward path = "gvisor, port-forward"
	systemForward path = "system, port-forward"
	gvisorProxy   path = "gvisor, api-proxy"
	systemProxy   path = "system, api-proxy"
	gvisorDirect  path = "gvisor, direct"
	systemDirect  path = "system, direct"
)

// The other columns.
const (
	laptopSide  path = "laptop"  // kubevpn's processes there
	managerSide path = "manager" // the traffic manager's
	all         path = "all"
)

// paths lists the paths in the order of the tables.
var paths = []path{kernel, portForward, upgraded, gvisorForward, systemForward, gvisorProxy, systemProxy, gvisorDirect,
	systemDirect}

// ours reports whether kubevpn is in the path.
func (p path) ours() bool { return slices.Contains(paths[3:], p) }

// stages are the connections that kubevpn makes in each round. beside lists other paths that are measured in the same
// stage, for comparison.
var stages = []struct {
	path      path
	netstack  string
	transport string
	beside    []path
}{
	{systemForward, "system", api.TransportPortForward, nil},
	{gvisorForward, "gvisor", api.TransportPortForward, nil},
	{systemDirect, "system", api.TransportDirect, nil},
	{gvisorDirect, "gvisor", api.TransportDirect, []path{kernel}},
	{systemProxy, "system", api.TransportAPIProxy, nil},
	{gvisorProxy, "gvisor", api.TransportAPIProxy, []path{portForward, upgraded}},
}

// The ports of the echo server (test/lab/echo), and the offset of the port-forward's ports from them.
const (
	echoPort, sinkPort, sourcePort, silentPort = 9001, 9002, 9003, 9007
	forwardOffset                              = 10000
)

// upgrades maps ports to paths. At such a path, the echo server's HTTP port upgrades to the protocol of that port.
var upgrades = map[int]string{echoPort: "/upgrade/echo", sinkPort: "/upgrade/sink", sourcePort: "/upgrade/source"}

// target returns how a path reaches a port of the echo server: by an address, or by the path of an HTTP request.
func (b *bench) target(p path, port int) string {
	switch p {
	case kernel:
		return netip.AddrPortFrom(b.twin, uint16(port)).String()
	case portForward:
		return fmt.Sprintf("127.0.0.1:%d", port+forwardOffset)
	case upgraded:
		return upgrades[port]
	}
	return netip.AddrPortFrom(b.pod, uint16(port)).String()
}

// measurement is one way to use a path.
type measurement struct {
	row    string
	unit   string
	kind   string
	port   int
	flows  int
	value  func(measured) float64
	beside *load
}

// load is traffic beside a measurement.
type load struct {
	kind  string
	port  int
	flows int
}

func (m measurement) bulk() bool { return m.kind == "down" || m.kind == "up" }

func bytesPerSecond(m measured) float64 { return m.MBps }
func medianTime(m measured) float64     { return m.P50us }
func perSecond(m measured) float64      { return m.PerS }

const (
	rttRow    = "round trip of 1 byte, median"
	loadedRow = "the same beside an upload"
)

var measurements = []measurement{
	{"down, 1 flow", "MB/s", "down", sourcePort, 1, bytesPerSecond, nil},
	{"down, 8 flows", "MB/s", "down", sourcePort, 8, bytesPerSecond, nil},
	{"up, 1 flow", "MB/s", "up", sinkPort, 1, bytesPerSecond, nil},
	{"up, 8 flows", "MB/s", "up", sinkPort, 8, bytesPerSecond, nil},
	{rttRow, "µs", "rtt", echoPort, 1, medianTime, nil},
	{loadedRow, "µs", "rtt", echoPort, 1, medianTime, &load{"up", sinkPort, 1}},
	{"new connections, 16 at a time", "/s", "connect", echoPort, 16, perSecond, nil},
	{"new connections, 128 at a time", "/s", "connect", echoPort, 128, perSecond, nil},
}

// The other figures of a bulk measurement.
func processorRow(row string) string      { return row + ": processor time per GB" }
func laptopRow(row string) string         { return row + ": of it, the laptop's" }
func memoryRow(row string, p path) string { return row + ": " + string(p) }
