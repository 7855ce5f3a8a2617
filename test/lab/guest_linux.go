package lab

import (
	"context"
	"crypto/sha256"
	_ "embed"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"kubevpn/test/lab/guest"
)

// guestKernel is Debian's user-mode Linux, a kernel that runs as a program.
const guestKernel = "linux.uml"

// guestMemory is the memory limit of a guest. A guest allocates it on demand and never releases it.
const guestMemory = "1536M"

// The link for commands to a guest has two addresses: one of the guest's place, and one of the guest.
const (
	controlLink = "control"
	controlPeer = "guest" // the guest's end
	controlNear = "169.254.1.1/30"
	controlFar  = "169.254.1.2/30"
)

// inGuest reports whether the programs of a place run in a guest.
func (l *Lab) inGuest(place string) bool {
	n, err := strconv.Atoi(strings.TrimPrefix(place, "node"))
	return err == nil && l.config.guest(n)
}

// inPlace returns the command line of a program in a place. In a guest this is the command line of the stand-in. If
// name is not empty, a guest runs only one program of that name at a time.
func (l *Lab) inPlace(place, name string, argv ...string) []string {
	if !l.inGuest(place) {
		return argv
	}
	command := []string{l.programs.Guest, "run"}
	if name != "" {
		command = append(command, "-alone", name)
	}
	return append(append(command, guestAddress()), argv...)
}

func guestAddress() string {
	return netip.AddrPortFrom(netip.MustParsePrefix(controlFar).Addr(), guest.Port).String()
}

// guest returns the client for the guest of a place.
func (l *Lab) guest(place string) guest.Client {
	return guest.Client{Connect: func(ctx context.Context) (net.Conn, error) {
		return l.dialFrom(ctx, place, "tcp", guestAddress())
	}}
}

// chooseKernel determines whether all nodes can run on the machine's kernel.
func (l *Lab) chooseKernel() error {
	if !l.config.usesIPVS() {
		return nil
	}
	has, err := hostHasIPVS()
	l.config.guests = !has
	return err
}

// hostHasIPVS reports whether the machine's kernel has, or can load, what kube-proxy needs in IPVS mode.
func hostHasIPVS() (bool, error) {
	if modprobe, err := systemProgram("modprobe"); err == nil {
		// A module that cannot be loaded may be built in.
		_ = exec.Command(modprobe, "--quiet", "--all", "ip_vs", "ip_vs_rr", "dummy", "ip_set").Run()
	}
	if _, err := os.Stat("/proc/net/ip_vs"); errors.Is(err, os.ErrNotExist) {
		return false, nil
	} else if err != nil {
		return false, err
	}
	has := false
	err := onThread(func() error {
		if err := unix.Unshare(unix.CLONE_NEWNET); err != nil {
			return fmt.Errorf("making a network namespace: %w", err)
		}
		has = netlink.LinkAdd(&netlink.Dummy{LinkAttrs: netlink.LinkAttrs{Name: "dummy0"}}) == nil
		return nil
	})
	return has, err
}

//go:embed uml/shim.c
var shimSource string

// buildShim builds the shim, unless the cache has it, and returns its path.
func buildShim(ctx context.Context, cache string) (string, error) {
	flags := []string{"-O2", "-Wall", "-Werror", "-shared", "-fPIC", "-nostdlib", "-x", "c", "-"}
	hash := fmt.Sprintf("%x", sha256.Sum256(fmt.Appendln(nil, flags, shimSource)))
	file := filepath.Join(cache, "shim-"+hash[:12]+".so")
	if _, err := os.Stat(file); err == nil {
		return file, nil
	}
	gcc, err := systemProgram("gcc")
	if err != nil {
		return "", err
	}
	temp, err := os.CreateTemp(cache, ".shim-")
	if err != nil {
		return "", err
	}
	temp.Close()
	defer os.Remove(temp.Name()) // does nothing after the rename
	command := exec.CommandContext(ctx, gcc, append(flags, "-o", temp.Name())...)
	command.Stdin = strings.NewReader(shimSource)
	if output, err := command.CombinedOutput(); err != nil {
		return "", fmt.Errorf("building the shim: %w\n%s", err, output)
	}
	return file, os.Rename(temp.Name(), file)
}

// startGuest boots the guest of a node and returns when it accepts commands.
func (l *Lab) startGuest(ctx context.Context, n int) error {
	place := fmt.Sprintf("node%d", n)
	dir := l.nodeDir(n)
	kernel, err := systemProgram(guestKernel)
	if err != nil {
		return err
	}
	description, err := json.MarshalIndent(l.guestConfig(n), "", "  ")
	if err != nil {
		return err
	}
	file := filepath.Join(dir, "guest.json")
	if err := os.WriteFile(file, description, 0o644); err != nil {
		return err
	}
	memory := filepath.Join(dir, "memory")
	if err := os.MkdirAll(memory, 0o755); err != nil {
		return err
	}
	args := []string{
		kernel, "mem=" + guestMemory, "loglevel=4",
		"root=/dev/root", "rootfstype=hostfs", "rootflags=/", "ro",
		"con=null", "con0=null,fd:1", "ssl=null", "uml_dir=" + dir + "/", "umid=uml",
		guest.NetworkDevice + ":transport=raw,gro=1,ifname=" + uplink + ",mac=" + guestMAC(n, 0),
		guest.ControlDevice + ":transport=raw,gro=1,ifname=" + controlPeer + ",mac=" + guestMAC(n, 1),
		"init=" + l.programs.Guest, guest.Variable + "=" + file,
	}
	err = l.start(Process{Name: "node-" + place, Place: place, Args: args}, func(command *exec.Cmd) error {
		command.Env = []string{"PATH=" + systemPath, "HOME=" + dir, "TMPDIR=" + memory, "LD_PRELOAD=" + l.programs.Shim}
		return errors.Join(ownMemory(memory), ownProcessor(n))
	})
	if err != nil {
		return err
	}
	err = l.poll(ctx, time.Minute, []string{"node-" + place}, func(ctx context.Context) error {
		ctx, cancel := context.WithTimeout(ctx, time.Second)
		defer cancel()
		conn, err := l.guest(place).Connect(ctx)
		if err == nil {
			conn.Close()
		}
		return err
	})
	if err != nil {
		return fmt.Errorf("booting the guest of %s: %w", place, err)
	}
	for _, f := range l.config.Families() {
		program := "iptables-restore"
		if f.Pods.Addr().Is6() {
			program = "ip6tables-restore"
		}
		if _, err := l.run(place, strings.NewReader(masqueradeLegacy(f)), program, "--noflush"); err != nil {
			return err
		}
	}
	return nil
}

// ownMemory gives the current thread a mount namespace with a tmpfs for a guest's memory, so that the size and the
// options do not depend on the machine's /dev/shm.
func ownMemory(dir string) error {
	if err := unix.Unshare(unix.CLONE_NEWNS); err != nil {
		return fmt.Errorf("making a mount namespace: %w", err)
	}
	if err := unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""); err != nil {
		return fmt.Errorf("making mounts private: %w", err)
	}
	if err := forgetNamespaces(); err != nil {
		return err
	}
	if err := unix.Mount("tmpfs", dir, "tmpfs", unix.MS_NOSUID|unix.MS_NODEV, "mode=700,size=100%"); err != nil {
		return fmt.Errorf("mounting a tmpfs on %s: %w", dir, err)
	}
	return nil
}

// ownProcessor binds the current thread to one processor. The processes of a guest run in turn, and waking each other
// on another processor takes six times as long.
func ownProcessor(n int) error {
	var allowed, one unix.CPUSet
	if err := unix.SchedGetaffinity(0, &allowed); err != nil {
		return fmt.Errorf("asking for processors: %w", err)
	}
	one.Set(nthProcessor(&allowed, n))
	if err := unix.SchedSetaffinity(0, &one); err != nil {
		return fmt.Errorf("choosing a processor: %w", err)
	}
	return nil
}

// nthProcessor returns the nth processor of a nonempty set, modulo its size.
func nthProcessor(allowed *unix.CPUSet, n int) int {
	n %= allowed.Count()
	for cpu := 0; ; cpu++ {
		if !allowed.IsSet(cpu) {
			continue
		}
		if n == 0 {
			return cpu
		}
		n--
	}
}

// guestConfig returns the configuration of a node's guest.
func (l *Lab) guestConfig(n int) guest.Config {
	place := fmt.Sprintf("node%d", n)
	c := guest.Config{
		Hostname: l.config.NodeName(n),
		Hidden:   hidden(),
		Visible:  []string{l.dir(), filepath.Dir(l.programs.Kube), filepath.Dir(l.programs.Guest)},
		Modules:  []string{"ipv6", "ip_vs", "nf_conntrack", "tun"},
		Settings: append(kernelNetwork(place), "fs.inotify.max_user_instances=8192"),
		Files:    map[string]string{"/etc/resolv.conf": l.config.nodeResolv(), cniFile: l.config.cniConfig(n)},
		Links:    map[string]string{},
		Groups:   []string{l.cgroups.name, filepath.Join(l.cgroups.name, place)},
		Network:  l.config.hostNetwork(n),
		Control:  netip.MustParsePrefix(controlFar),
	}
	for name, value := range kernelSettings() {
		c.Settings = append(c.Settings, strings.ReplaceAll(name, "/", ".")+"="+value)
	}
	// The guest's kernel has no nftables for IP, which Debian's default iptables needs.
	for _, family := range []string{"iptables", "ip6tables"} {
		for _, verb := range []string{"", "-save", "-restore"} {
			c.Links["/usr/sbin/"+family+verb] = "xtables-legacy-multi"
		}
	}
	return c
}

// guestMAC returns the hardware address of one of a guest's links.
func guestMAC(n, link int) string { return fmt.Sprintf("02:00:00:00:%02x:%02x", link, n) }

// masqueradeLegacy returns the rules of Config.masquerade for iptables-restore.
func masqueradeLegacy(f Family) string {
	return fmt.Sprintf("*nat\n-A POSTROUTING -o %s -s %s ! -d %s -j MASQUERADE\nCOMMIT\n", uplink, f.Pods, f.Pods)
}

// wireGuest creates a guest's two links: from its place to the router, and within its place. The guest reads and
// writes the packets of the links in its place through packet sockets; the machine's network stack does not process
// them.
func (l *Lab) wireGuest(router *place, n int) error {
	name := fmt.Sprintf("node%d", n)
	node, err := l.open(name)
	if err != nil {
		return err
	}
	defer node.Close()
	if err := router.wire(name, node, uplink); err != nil {
		return err
	}
	if err := router.enslave(name); err != nil {
		return err
	}
	if err := node.wire(controlLink, node, controlPeer); err != nil {
		return err
	}
	return node.address(controlLink, netip.MustParsePrefix(controlNear))
}
