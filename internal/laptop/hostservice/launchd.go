package hostservice

import (
	_ "embed" // for the file below
	"strconv"
	"strings"
)

//go:embed kubevpn-helper.plist
var plist string

const (
	// label names the job of launchd.
	label     = "kubevpn-helper"
	plistName = label + ".plist"
	logFile   = "/var/log/kubevpn-helper.log"
)

// job returns the property list of launchd's job. number is that of the user or of the group.
func job(version string, who owner, number int) string {
	key, mode, allowed := "SockPathOwner", 0o600, userKey+"="+who.user
	if who.group != "" {
		key, mode, allowed = "SockPathGroup", 0o660, groupKey+"="+who.group
	}
	return strings.NewReplacer(
		"VERSION", version, "OWNER", allowed, "LABEL", label, "PROGRAM", Program, "SOCKET", Socket, "LOG", logFile,
		"MODE", strconv.Itoa(mode), "WHO", key, "NUMBER", strconv.Itoa(number),
	).Replace(plist)
}
