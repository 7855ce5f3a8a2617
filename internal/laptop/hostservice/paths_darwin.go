package hostservice

const (
	// Socket is where the service accepts connections. A user connects to it in place of sudo.
	Socket = "/var/run/kubevpn-helper.sock"
	// programDir is not below /usr/local, which Homebrew gives to a user.
	programDir = "/Library/PrivilegedHelperTools/kubevpn"
	// Inspect and Log are the commands that show the state of the service and what it did.
	Inspect = "launchctl print system/" + label
	Log     = "cat " + logFile
)
