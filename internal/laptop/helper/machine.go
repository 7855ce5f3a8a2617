package helper

import (
	"io/fs"
	"os"
	"strings"
)

// Machine is a kind of machine whose network kubevpn cannot use as that of a laptop.
type Machine string

// The kinds of machines. WSL 1 has no kernel of its own, so no TUN devices.
const (
	Usual     Machine = ""
	Container Machine = "container" // of Docker, Podman or Kubernetes; also a dev container and a codespace
	WSL1      Machine = "WSL 1"
	WSL2      Machine = "WSL 2"
)

// ThisMachine returns the kind of this machine.
func ThisMachine() Machine { return machineOf(os.DirFS("/")) }

// machineOf returns the kind of the machine with these files. A container on WSL is a container.
func machineOf(root fs.FS) Machine {
	for _, mark := range []string{".dockerenv", "run/.containerenv", "var/run/secrets/kubernetes.io"} {
		if _, err := fs.Stat(root, mark); err == nil {
			return Container
		}
	}
	release, err := fs.ReadFile(root, "proc/sys/kernel/osrelease")
	switch {
	case err != nil || !strings.Contains(strings.ToLower(string(release)), "microsoft"):
		return Usual
	case strings.Contains(string(release), "-Microsoft"): // 4.4.0-19041-Microsoft
		return WSL1
	}
	return WSL2 // 5.15.167.4-microsoft-standard-WSL2
}

// withoutTUN returns what a user can do on a machine without a usable TUN device.
func (m Machine) withoutTUN() string {
	const proxy = "\n`kubevpn connect --socks` and `kubevpn run` need no device on this machine"
	switch m {
	case Container:
		return "this is a container: start it with --cap-add NET_ADMIN --device /dev/net/tun (devcontainer.json: " +
			"runArgs)" + proxy
	case WSL1:
		return "WSL 1 has no TUN devices: `wsl --set-version DISTRIBUTION 2` in Windows changes that" + proxy
	default:
		return "load the module with `modprobe tun`; root needs the capability NET_ADMIN and access to the device" +
			proxy
	}
}
