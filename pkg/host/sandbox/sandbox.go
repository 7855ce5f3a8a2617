// Package sandbox runs a program with additional files at chosen paths and, optionally, its own network. It needs no
// privilege and changes nothing on the laptop: it uses namespaces, which end with the program.
//
//	laptop's namespaces             the sandbox's: user, mount, PID, and network if it has one
//	───────────────────             ──────────────────────────────────────────────────────────
//	 your program
//	  │  Sandbox.Start
//	  ├──── clone ────────────────▶ init: the same binary, by Config.Init   PID 1
//	  │                              │  opens the TUN, mounts, remains
//	  │◀─── TUN, Dial's sockets ─────┤  capabilities over these namespaces only
//	  │     (control socket)         │
//	  │──── SetNetwork, Run ────────▶│  with a network of its own; else by itself
//	  │──── signals, dials ─────────▶├──── fork, no capabilities ──▶ the program
//	  │                              │                                ├─ its children
//	  │◀─── exit status ─────────────┘◀─────── orphans, reaped ───────┘   also after setsid
//	  ▼
//	 Wait
//
// A container already has namespaces. There [Serve] does the network part of init and writes the volumes, or
// [ServeProgram] does the part that starts the program, and [Attach] is the other end of its socket.
//
// # Termination
//
// Init is the first process of a PID namespace. When it ends for any reason, the kernel kills every process of the
// namespace and only then lets its parent's wait return. So no process escapes by setsid, a double fork or ignored
// signals. Init ends when the program has ended, when the control socket closes because the parent has died, and by
// the parent death signal, which also reaches a stopped init. The death signal alone is not sufficient: the parent
// may die before init requests it, and the kernel clears it at some execs. Only these processes, and the file of
// [Process.TUN], hold the mounts, the TUN and the namespaces.
//
// # Identity
//
// The program has the user and group of its parent; user and group IDs are the same inside and outside. For root
// all IDs are mapped. For other users only their own is mapped: files of other users seem to belong to nobody
// (65534), while access to them is as outside, supplementary groups included. The program has no capabilities and
// cannot gain any (no_new_privs), so setuid programs such as sudo run with the rights of their caller. This is the
// same for root: the program owns root's files, but has no other privilege.
//
// # Files
//
// The program uses the laptop's file system and writes to it. A [Mount] covers its path if that exists. If a directory
// above it is missing, the sandbox does not create it on the laptop but mirrors the nearest existing directory:
//
//	outside                    inside, with a Mount at /etc/config/app
//	/etc/hosts                 tmpfs /etc
//	/etc/ssl/                    ├─ hosts   ── bind ──▶ outside's /etc/hosts
//	                             ├─ ssl/    ── bind ──▶ outside's /etc/ssl
//	                             └─ config/app ─ bind ▶ Mount.Source
//
// Entries that are created, removed or replaced in the directory change in the mirror within milliseconds, but not
// the other way round. A file that the program creates directly in a mirrored directory (/tmp, for a Mount at
// /tmp/x) exists only inside and ends with the sandbox, and the log warns about it. The mirror of a directory that
// the user may not write to is read-only. A mirror of the root directory, for a Mount at /config, does not follow
// later changes. The mirror of a directory that the user may not read is empty, so that a Mount at /root/.aws
// works.
//
// An overlay file system, which needs no privilege in a user namespace since Linux 5.11, behaves differently.
// Measured on Linux 6.18 with the directory as the lower layer and a tmpfs as the upper one, as an unprivileged
// user:
//
//	                                                    mirror             overlay
//	the program writes to a file, or below a directory  the laptop has it  lost with the sandbox
//	a name appears outside after a failed lookup        seen               not found
//	a file is replaced by rename outside (resolv.conf)  the new one        the old one
//	a directory is missing right below /                works              refused for /: locked mounts
//
// A Source that is a directory shows later changes, including files replaced by a rename, as the kubelet does with
// ..data. A Source that is a file always shows that file, even if another one is renamed to its name.
//
// /proc is that of the new PID namespace if the kernel allows it. Most containers hide a part of /proc, and then
// the kernel does not: the program sees the laptop's /proc, in which its processes have other IDs.
//
// # Network
//
// With Config.Network the program has loopback and one interface, [Interface], whose packets are read from and
// written to [Process.TUN]. There is no other way out, not even for a static binary. The interface's addresses may
// be known only after its packets are connected to something, so Start creates the sandbox without the program:
//
//	Start ─▶ namespaces, files, TUN ─▶ SetNetwork ─▶ addresses, routes, names ─▶ Run ─▶ the program
//	                                       └── again, whenever it changes
//
// With Config.Names the program has the laptop's network, and Start creates the sandbox without the program as well.
//
// Network.DNS resolves names: inside, /etc/resolv.conf names it, /etc/nsswitch.conf has "files dns" for hosts, and
// nscd is hidden, because it and systemd-resolved would ask the laptop's servers. The program may listen on every
// port and ping. It can reach the laptop's Unix sockets by path; abstract ones are not visible.
//
// # Terminal and signals
//
// In the foreground of a terminal the program has the process group and session of its parent, so the terminal's
// signals and job control reach it as if the shell had started it. They also reach the parent, which must handle
// them (signal.Notify): when the parent dies, the kernel kills the program. Inside, the IDs of the group and the
// session are 0, because their leaders are outside the PID namespace; shells then create their own group, and work.
// If such a group was in the foreground when the sandbox ended, the parent returns to the foreground.
//
// Elsewhere the program has its own process group. So every signal arrives once if the parent passes it to Forward:
//
//	                          in the foreground of a terminal    elsewhere
//	Ctrl-C, Ctrl-\, hangup    by the process group               by Forward
//	SIGTERM and others        by Forward                         by Forward
//
// Two rare cases differ. In the foreground, a SIGINT, SIGQUIT or SIGHUP to the parent alone does not reach the
// program, and a SIGTERM to the whole group (kill %1 of a foreground job) reaches it twice.
package sandbox

import (
	"cmp"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
)

// Interface is the name of the network interface in a sandbox, as in pods. ContainerInterface is its name in a
// container, where eth0 belongs to the engine.
const (
	Interface          = "eth0"
	ContainerInterface = "tun0"
)

// ErrNotAllowed reports that this machine or container does not allow this user to create a sandbox. Errors that
// wrap it contain the cause and a remedy.
var ErrNotAllowed = errors.New("this machine does not allow user namespaces")

// ErrNoTUN is an [ErrNotAllowed] that concerns only sandboxes with Config.Network.
var ErrNoTUN = fmt.Errorf("%w with a network of their own", ErrNotAllowed)

// A Mount shows a file or directory of the laptop, or of a Volume, at another path.
type Mount struct {
	Path     string // its path inside: absolute, and neither / nor below /proc
	Source   string // its path on the laptop: absolute; empty if Volume is set
	Volume   string // the name of one of Config.Volumes
	SubPath  string // a relative path of the volume; empty for all of it. A mount of one file does not follow updates.
	ReadOnly bool
	Remote   bool // Config.Serve serves its files, without Source and Volume
}

// A Network configures the interface and name resolution of a sandbox. Without Addresses it configures only name
// resolution.
type Network struct {
	// Addresses are the addresses of the interface. Everything of the same address families is routed to it.
	Addresses []netip.Prefix
	MTU       int // bytes, 1280 to 65535

	// DNS, Search and Options become the lines of /etc/resolv.conf.
	DNS     []netip.Addr
	Search  []string
	Options []string // such as ndots:5
	// Hosts replaces /etc/hosts. A line for the program's own host name is added. Empty: the laptop's, as it was when
	// the sandbox began.
	Hosts string
}

// Config configures a sandbox.
type Config struct {
	// Init are the arguments of the hidden command of this program (/proc/self/exe) that calls [Init] first.
	Init []string

	Args []string // the program and its arguments; a name without a slash is found in the PATH of Env, inside
	Env  []string // the complete environment
	Dir  string   // the working directory, inside; empty for the current one

	Stdin, Stdout, Stderr *os.File // nil: /dev/null

	Mounts  []Mount
	Volumes []Volume
	// Serve serves the files of a Remote mount, on an open /dev/fuse that it owns, until the file system ends with the
	// sandbox. It is called in the order of the paths, and must return at once.
	Serve   func(path string, device *os.File) `json:"-"`
	Network bool                               // the program gets its own network instead of the laptop's
	Names   bool                               // the program gets its own name resolution; implied by Network

	Hostname string // inside; empty: the laptop's
	Logger   *slog.Logger
}

// Sandbox can start any number of sandboxes with one Config.
type Sandbox struct{ cfg Config }

// New returns an error if cfg is invalid or this machine does not allow sandboxes ([ErrNotAllowed]). It starts
// nothing. On systems other than Linux it returns [errors.ErrUnsupported].
func New(cfg Config) (*Sandbox, error) {
	if err := cfg.check(); err != nil {
		return nil, err
	}
	if err := Allowed(cfg.Network); err != nil {
		return nil, err
	}
	cfg.Logger = cmp.Or(cfg.Logger, slog.New(slog.DiscardHandler))
	return &Sandbox{cfg}, nil
}

// SetEnv replaces the environment of Config. Call it before a sandbox starts.
func (s *Sandbox) SetEnv(env []string) { s.cfg.Env = env }

// ExitStatus is the exit status of the program.
type ExitStatus struct {
	Code   int            // the exit code, or 128 plus the signal's number, as in a shell
	Signal syscall.Signal // the signal that killed it, or 0
}

func (c *Config) check() error {
	if len(c.Init) == 0 {
		return errors.New("a sandbox needs the arguments that start its init")
	}
	if len(c.Args) == 0 || c.Args[0] == "" {
		return errors.New("a sandbox needs a program to run")
	}
	for _, s := range append([]string{c.Dir}, c.Args...) {
		if strings.ContainsRune(s, 0) {
			return fmt.Errorf("a NUL byte in the working directory or an argument: %.40q", s)
		}
	}
	for _, v := range c.Env {
		if strings.ContainsRune(v, 0) {
			name, _, _ := strings.Cut(v, "=")
			return fmt.Errorf("a NUL byte in the environment variable %.40q", name) // its value may be secret
		}
	}
	if c.Dir != "" && !filepath.IsAbs(c.Dir) {
		return fmt.Errorf("the working directory %q is not an absolute path", c.Dir)
	}
	seen := make(map[string]bool, len(c.Mounts))
	for _, m := range c.Mounts {
		if err := m.check(); err != nil {
			return err
		}
		if m.Volume != "" {
			if !hasVolume(c.Volumes, m.Volume) {
				return fmt.Errorf("mounting at %s: there is no volume %q", m.Path, m.Volume)
			}
		}
		if seen[m.Path] {
			return fmt.Errorf("two mounts at %s", m.Path)
		}
		seen[m.Path] = true
	}
	names := make(map[string]bool, len(c.Volumes))
	for _, v := range c.Volumes {
		if err := v.check(); err != nil {
			return err
		}
		if names[v.Name] {
			return fmt.Errorf("two volumes %s", v.Name)
		}
		names[v.Name] = true
	}
	return nil
}

func (m *Mount) check() error {
	paths := []string{m.Path, m.Source}
	switch {
	case m.Remote:
		if m.Source != "" || m.Volume != "" {
			return fmt.Errorf("mounting at %s: a remote mount has no source", m.Path)
		}
		paths = paths[:1]
	case m.Volume != "":
		if m.Source != "" || m.SubPath != "" && !fs.ValidPath(m.SubPath) {
			return fmt.Errorf("mounting at %s: a mount needs either the source %q or the volume %q with a relative "+
				"path, not %q",
				m.Path, m.Source, m.Volume, m.SubPath)
		}
		paths = paths[:1]
	}
	for _, p := range paths {
		if !strings.HasPrefix(p, "/") || filepath.Clean(p) != p || strings.ContainsRune(p, 0) {
			return fmt.Errorf("mounting %q at %q: %q is not an absolute path in its shortest form", m.Source, m.Path, p)
		}
	}
	if m.Path == "/" || m.Path == "/proc" || strings.HasPrefix(m.Path, "/proc/") {
		return fmt.Errorf("mounting %s at %s: nothing can be mounted there", m.Source, m.Path)
	}
	return nil
}

func (n *Network) check() error {
	for _, p := range n.Addresses {
		if !p.IsValid() || p.Addr().Is4In6() || p.Addr().IsUnspecified() || p.Addr().IsMulticast() {
			return fmt.Errorf("%v cannot be the address of an interface", p)
		}
	}
	if len(n.Addresses) > 0 && (n.MTU < 1280 || n.MTU > 65535) {
		return fmt.Errorf("the MTU %d is not between 1280, which IPv6 needs, and 65535", n.MTU)
	}
	for _, a := range n.DNS {
		if !a.IsValid() {
			return errors.New("a nameserver has no valid address")
		}
	}
	for _, word := range slices.Concat(n.Search, n.Options) {
		if word == "" || strings.ContainsAny(word, " \t\r\n\x00#;") {
			return fmt.Errorf("%q cannot be in resolv.conf", word)
		}
	}
	return nil
}
