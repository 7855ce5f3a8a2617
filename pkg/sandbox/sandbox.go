// Package sandbox runs a program of the laptop's user with files of its own at paths of their choice and, if wanted, a
// network of its own, without privilege and without a trace on the laptop: all of it is namespaces, which end with the
// program.
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
// A container has namespaces already, made by its engine. There [Serve] does the part of init that is the network's, and
// [Attach] is the other end of its socket.
//
// # Ends
//
// Init is the first process of a PID namespace: when it ends, however, the kernel kills every process of the namespace
// and only then lets its parent's wait return, so nothing escapes by setsid, double fork or a deaf ear. Init ends when the
// program has ended; when the control socket closes, which is when the parent has died; and by the parent's death signal,
// which reaches an init that is stopped too. The death signal alone would not do: it may come before it is asked for, and
// the kernel forgets it at some execs. The mounts, the TUN and the namespaces are held by nothing but these processes,
// and by the file that [Process.TUN] gives.
//
// # Identity
//
// The program has the user and group of its parent; user and group IDs are the same inside and outside. For root all IDs
// are mapped; for others only their own, and the files of everybody else are seen as nobody's (65534), while access to
// them is as outside, supplementary groups included. The program has no capabilities and cannot gain any (no_new_privs):
// setuid programs such as sudo run with the rights of their caller. So it is for root too: a program there is the
// owner of root's files and no more.
//
// # Files
//
// The file system is the laptop's, and what the program writes goes to it. A [Mount] whose path exists covers it. Where a
// directory above it is missing, nothing is made on the laptop; the nearest directory that exists is mirrored:
//
//	outside                    inside, with a Mount at /etc/config/app
//	/etc/hosts                 tmpfs /etc
//	/etc/ssl/                    ├─ hosts   ── bind ──▶ outside's /etc/hosts
//	                             ├─ ssl/    ── bind ──▶ outside's /etc/ssl
//	                             └─ config/app ─ bind ▶ Mount.Source
//
// The mirror follows its directory: what appears there, disappears or is replaced outside does so inside, within some
// milliseconds. That goes one way. What the program makes directly in a mirrored directory that it may write to (/tmp, for
// a Mount at /tmp/x) stays inside and ends with the sandbox, and the log says so; a directory that it may not write to is
// read-only. A mirror of the root directory, for a Mount at /config, is of the time when the sandbox began. A directory
// that the user may not read is covered, so that a Mount at /root/.aws works.
//
// A Source that is a directory is shown live, so files that are replaced by a rename, as the kubelet does with ..data, are
// seen. A Source that is a file is that file: what is renamed to its name later is not.
//
// /proc is that of the new PID namespace, unless the kernel does not allow it, as in most containers, where a part of it
// is hidden: then it is the laptop's, and a process has another number there than the one that it sees of itself.
//
// # Network
//
// With Config.Network the program has loopback and one interface, [Interface], whose packets are read from and written to
// [Process.TUN]. Nothing else leads out, so a static binary can no more pass it by than another. What the interface's
// addresses are may be known only when its packets have a way, so the sandbox is made first, without the program:
//
//	Start ─▶ namespaces, files, TUN ─▶ SetNetwork ─▶ addresses, routes, names ─▶ Run ─▶ the program
//	                                       └── again, whenever it changes
//
// Names are asked of Network.DNS: inside, /etc/resolv.conf names it, /etc/nsswitch.conf has "files dns" for hosts, and nscd
// is hidden, as it and systemd-resolved would ask the laptop's servers. Every port may be listened on, and ping works.
// Unix sockets with a path are the laptop's; abstract ones are not seen.
//
// # Terminal
//
// The program is in the process group and session of its parent, so the terminal's signals and job control reach it as if
// it had been started by the shell. They reach the parent too, which has to survive them (signal.Notify) for as long as
// the program is to: when it dies the program is killed. Seen from inside, the group and the session are those of
// processes that are not there, and their IDs 0; shells make a group of their own then, and work. When a group that took
// the terminal has died with the sandbox, the parent takes it back.
package sandbox

import (
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"syscall"
)

// Interface is the name of the network interface inside, as it is in pods. In a container, whose eth0 is its engine's, it is
// ContainerInterface.
const (
	Interface          = "eth0"
	ContainerInterface = "tun0"
)

// ErrNotAllowed says that this machine, or what this process runs in, does not let this user make a sandbox. The error
// around it says why, and what would help.
var ErrNotAllowed = errors.New("sandboxes are not allowed here")

// ErrNoTUN is an [ErrNotAllowed] of sandboxes with Config.Network alone.
var ErrNoTUN = fmt.Errorf("%w with a network of their own", ErrNotAllowed)

// A Mount shows a file or directory of the laptop, or of a Volume, at another path.
type Mount struct {
	Path     string // where the program finds it: absolute, and neither / nor below /proc
	Source   string // what it is: absolute; empty: Volume is
	Volume   string // the name of one of Config.Volumes
	SubPath  string // of the volume, relative; empty: all of it. One file stays as it is at the beginning.
	ReadOnly bool
}

// A Network is a network of the program's own.
type Network struct {
	// Addresses are those of the interface. Every other address of the same families is routed to it.
	Addresses []netip.Prefix
	MTU       int // bytes, 1280 to 65535

	// DNS, Search and Options are the lines of /etc/resolv.conf. Without DNS there is no name server.
	DNS     []netip.Addr
	Search  []string
	Options []string // such as ndots:5
}

// Config is what a sandbox runs, and with what.
type Config struct {
	// Init are the arguments with which this program, run again from /proc/self/exe, calls [Init] before it does
	// anything else: those of a hidden command.
	Init []string

	Args []string // the program and its arguments; without a slash it is looked for in Env's PATH, inside
	Env  []string // all of its environment
	Dir  string   // where it starts, inside; empty: here

	Stdin, Stdout, Stderr *os.File // nil: /dev/null

	Mounts  []Mount
	Volumes []Volume
	Network bool // of the program's own; false: the laptop's
	Logger  *slog.Logger
}

// Sandbox is a sandbox that can be started, any number of times.
type Sandbox struct {
	cfg Config
	log *slog.Logger
}

// New checks the Config, and whether this machine allows sandboxes ([ErrNotAllowed]). It starts nothing. On systems other
// than Linux its error is [errors.ErrUnsupported].
func New(cfg Config) (*Sandbox, error) {
	if err := cfg.check(); err != nil {
		return nil, err
	}
	if err := Allowed(cfg.Network); err != nil {
		return nil, err
	}
	if cfg.Logger == nil {
		cfg.Logger = slog.New(slog.DiscardHandler)
	}
	return &Sandbox{cfg: cfg, log: cfg.Logger}, nil
}

// ExitStatus is how the program ended.
type ExitStatus struct {
	Code   int            // as a shell has it: for a signal 128 and its number
	Signal syscall.Signal // that killed it; 0: none
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
			if _, there := volumeOf(c.Volumes, m.Volume); !there {
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
	if m.Volume != "" {
		if m.Source != "" || m.SubPath != "" && !fs.ValidPath(m.SubPath) {
			return fmt.Errorf("mounting %q of the volume %s, and %q, at %s: one of them, and a relative path of the volume", m.SubPath, m.Volume, m.Source, m.Path)
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
	if len(n.Addresses) == 0 {
		return errors.New("a network of its own needs an address")
	}
	for _, p := range n.Addresses {
		if !p.IsValid() || p.Addr().Is4In6() || p.Addr().IsUnspecified() || p.Addr().IsMulticast() {
			return fmt.Errorf("%v cannot be the address of an interface", p)
		}
	}
	if n.MTU < 1280 || n.MTU > 65535 {
		return fmt.Errorf("an MTU of %d is not between 1280, which IPv6 needs, and 65535", n.MTU)
	}
	for _, a := range n.DNS {
		if !a.IsValid() {
			return errors.New("a name server without an address")
		}
	}
	for _, word := range append(append([]string(nil), n.Search...), n.Options...) {
		if word == "" || strings.ContainsAny(word, " \t\r\n\x00#;") {
			return fmt.Errorf("%q cannot be in resolv.conf", word)
		}
	}
	return nil
}
