package hostservice

import (
	"bufio"
	_ "embed" // for the files below
	"fmt"
	"strings"

	"kubevpn/internal/api"
)

//go:embed kubevpn-helper.socket
var socketUnit string

//go:embed kubevpn-helper@.service
var serviceUnit string

//go:embed helper.yaml
var defaultPolicy string

const (
	unitDir     = "/etc/systemd/system"
	socketName  = "kubevpn-helper.socket"
	serviceName = "kubevpn-helper@.service"
	instances   = "kubevpn-helper@*.service"
)

// The keys of the socket's unit that `kubevpn service status` reads.
const (
	versionKey = "X-Kubevpn-Version"
	userKey    = "SocketUser"
	groupKey   = "SocketGroup"
)

// owner says who may connect. Exactly one field is set.
type owner struct {
	user  string // number
	group string // name
}

// units returns the content of the units by file name.
func units(version string, who owner) map[string]string {
	allowed := fmt.Sprintf("%s=%s\nSocketMode=0600", userKey, who.user)
	if who.group != "" {
		allowed = fmt.Sprintf("%s=%s\nSocketMode=0660", groupKey, who.group)
	}
	r := strings.NewReplacer("VERSION", version, "SOCKET", Socket, "OWNER", allowed)
	return map[string]string{
		socketName:  r.Replace(socketUnit),
		serviceName: strings.NewReplacer("PROGRAM", Program).Replace(serviceUnit),
	}
}

// parseUnit returns what the socket's unit says about the service.
func parseUnit(content string) api.HelperService {
	s := api.HelperService{Installed: true, Socket: Socket, Program: Program, Policy: PolicyFile}
	for lines := bufio.NewScanner(strings.NewReader(content)); lines.Scan(); {
		key, value, _ := strings.Cut(lines.Text(), "=")
		switch key {
		case versionKey:
			s.Version = value
		case userKey:
			s.User = value
		case groupKey:
			s.Group = value
		}
	}
	return s
}
