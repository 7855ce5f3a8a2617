package hostservice

import (
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"kubevpn/internal/api"
)

// settings returns the lines of a unit that systemd reads.
func settings(unit string) string {
	var b strings.Builder
	for line := range strings.Lines(unit) {
		if line != "\n" && !strings.HasPrefix(line, "#") {
			b.WriteString(line)
		}
	}
	return b.String()
}

func TestSocketBelongsToItsUsers(t *testing.T) {
	want := `[Unit]
Description=Connections of kubevpn's users to its root helper
X-Kubevpn-Version=1.2.3 (3f2a91c04b7e)
[Socket]
ListenStream=/run/kubevpn-helper.sock
Accept=yes
%
MaxConnections=32
MaxConnectionsPerSource=4
RemoveOnStop=yes
[Install]
WantedBy=sockets.target
`
	for _, tt := range []struct {
		who     owner
		allowed string
		status  api.HelperService
	}{
		{owner{user: "1000"}, "SocketUser=1000\nSocketMode=0600", api.HelperService{User: "1000"}},
		{owner{group: "developers"}, "SocketGroup=developers\nSocketMode=0660", api.HelperService{Group: "developers"}},
	} {
		unit := units("1.2.3 (3f2a91c04b7e)", tt.who)[socketName]
		if diff := cmp.Diff(strings.Replace(want, "%", tt.allowed, 1), settings(unit)); diff != "" {
			t.Errorf("-want +got\n%s", diff)
		}
		tt.status.Installed, tt.status.Version = true, "1.2.3 (3f2a91c04b7e)"
		tt.status.Socket, tt.status.Program, tt.status.Policy = Socket, Program, PolicyFile
		if diff := cmp.Diff(tt.status, parseUnit(unit)); diff != "" {
			t.Errorf("status: -want +got\n%s", diff)
		}
	}
}

// A line that this test lacks is less protection than was decided.
func TestServiceIsHardened(t *testing.T) {
	want := `[Unit]
Description=kubevpn's root helper for one connection
CollectMode=inactive-or-failed
[Service]
ExecStart=/usr/local/libexec/kubevpn/kubevpn helper
StandardInput=socket
StandardOutput=journal
StandardError=journal
TimeoutStopSec=30
MemoryMax=256M
TasksMax=64
CapabilityBoundingSet=CAP_NET_ADMIN
NoNewPrivileges=yes
SystemCallFilter=@system-service
SystemCallFilter=~@privileged
SystemCallFilter=@chown
SystemCallErrorNumber=EPERM
SystemCallArchitectures=native
RestrictAddressFamilies=AF_UNIX AF_NETLINK AF_INET AF_INET6
ProtectSystem=strict
StateDirectory=kubevpn
StateDirectoryMode=0700
ReadWritePaths=/etc /proc/sys/net
ProtectKernelTunables=yes
UMask=0077
DevicePolicy=closed
DeviceAllow=/dev/net/tun rw
ProtectHome=yes
PrivateTmp=yes
ProtectClock=yes
ProtectControlGroups=yes
ProtectHostname=yes
ProtectKernelLogs=yes
ProtectKernelModules=yes
LockPersonality=yes
MemoryDenyWriteExecute=yes
RestrictNamespaces=yes
RestrictRealtime=yes
RestrictSUIDSGID=yes
`
	if diff := cmp.Diff(want, settings(units("1.2.3", owner{user: "1000"})[serviceName])); diff != "" {
		t.Errorf("-want +got\n%s", diff)
	}
}
