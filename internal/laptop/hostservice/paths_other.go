//go:build !darwin

package hostservice

const (
	// Socket is where the service accepts connections. A user connects to it in place of sudo.
	Socket     = "/run/kubevpn-helper.sock"
	programDir = "/usr/local/libexec/kubevpn"
	// Inspect and Log are the commands that show the state of the service and what it did.
	Inspect = "systemctl status " + socketName
	Log     = "journalctl -u 'kubevpn-helper*'"
)
