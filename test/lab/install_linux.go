package lab

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
)

// requirement is a Debian package, and programs whose presence shows that the package or an equivalent is installed.
type requirement struct {
	name     string
	programs []string
}

func (l *Lab) requirements() []requirement {
	all := []requirement{
		{"containerd", []string{"containerd", "ctr", "containerd-shim-runc-v2"}},
		{"runc", []string{"runc"}},
		{"containernetworking-plugins", nil}, // see findCNI
		{"iptables", []string{"iptables", "ip6tables", "iptables-restore"}},
		{"nftables", []string{"nft"}},
		{"ipset", []string{"ipset"}},
		{"conntrack", []string{"conntrack"}},
		{"iproute2", []string{"ip"}},
		{"util-linux", []string{"nsenter"}},
		{"curl", []string{"curl"}}, // for the user of the laptop
	}
	if l.config.usesIPVS() {
		all = append(all, requirement{"ipvsadm", []string{"ipvsadm"}})
	}
	if l.config.guests {
		all = append(all, requirement{"user-mode-linux", []string{guestKernel}}, requirement{"gcc", []string{"gcc"}})
	}
	return all
}

// missing lists the Debian packages that the lab needs and this machine lacks.
func (l *Lab) missing() []string {
	var missing []string
	for _, r := range l.requirements() {
		absent := slices.ContainsFunc(r.programs, func(name string) bool {
			_, err := systemProgram(name)
			return err != nil
		})
		if r.name == "containernetworking-plugins" {
			absent = findCNI() == ""
		}
		if absent {
			missing = append(missing, r.name)
		}
	}
	return missing
}

// findCNI returns the directory of the CNI plugins, or "" if there is none.
func findCNI() string {
	for _, dir := range []string{"/usr/lib/cni", "/opt/cni/bin"} {
		if !slices.ContainsFunc([]string{"ptp", "host-local", "portmap", "loopback"}, func(name string) bool {
			_, err := os.Stat(filepath.Join(dir, name))
			return err != nil
		}) {
			return dir
		}
	}
	return ""
}

// Install installs the missing Debian packages without asking.
func (l *Lab) Install(ctx context.Context) error {
	if err := l.chooseKernel(); err != nil {
		return err
	}
	missing := l.missing()
	if len(missing) == 0 {
		return nil
	}
	apt, err := systemProgram("apt-get")
	if err != nil {
		return fmt.Errorf("this machine lacks %s, and has no apt-get to install them", strings.Join(missing, ", "))
	}
	l.progress.say("installing Debian packages: %s", strings.Join(missing, " "))
	install := append([]string{"install", "--yes", "--no-install-recommends"}, missing...)
	if err := l.apt(ctx, apt, install...); err == nil {
		return nil
	}
	// The package lists may be missing or outdated.
	if err := l.apt(ctx, apt, "update"); err != nil {
		return err
	}
	if err := l.apt(ctx, apt, install...); err != nil {
		return err
	}
	if still := l.missing(); len(still) > 0 {
		return fmt.Errorf("apt-get installed %s, but their programs are missing", strings.Join(still, ", "))
	}
	return nil
}

func (l *Lab) apt(ctx context.Context, apt string, args ...string) error {
	done := l.progress.step("apt-get %s", args[0])
	command := exec.CommandContext(ctx, apt, append([]string{"--quiet", "-o", "Dpkg::Use-Pty=0"}, args...)...)
	command.Env = append(os.Environ(), "DEBIAN_FRONTEND=noninteractive", "PATH="+systemPath)
	output, err := command.CombinedOutput()
	done(err)
	if err != nil {
		return fmt.Errorf("apt-get %s: %w\n%s", strings.Join(args, " "), err, bytes.TrimSpace(output))
	}
	return nil
}
