package lab

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// state is the content of a lab's state.json. It lets another program attach to the lab.
type state struct {
	Name      string    `json:"name"`
	Nodes     int       `json:"nodes"`
	ProxyMode ProxyMode `json:"proxyMode"`
	IPv6      bool      `json:"ipv6"`
	Ranges    int       `json:"ranges"`
	Guests    bool      `json:"guests"` // nodes with ProxyIPVS are guests

	ProxySettings map[string]string `json:"proxySettings,omitempty"`
	NodeModes     []ProxyMode       `json:"nodeModes,omitempty"`
	Kubernetes    string            `json:"kubernetes,omitempty"`

	Created time.Time `json:"created"`
	BootID  string    `json:"bootID"` // of the machine: after a reboot, other processes have the PIDs
	Ready   bool      `json:"ready"`  // Up has finished

	Programs    programs `json:"programs"`
	Snapshotter string   `json:"snapshotter"` // containerd's

	Processes []Process `json:"processes"`
}

func (s state) config(dir string) Config {
	c := Config{
		Name: s.Name, Nodes: s.Nodes, ProxyMode: s.ProxyMode, IPv6: s.IPv6, Ranges: s.Ranges, Dir: dir,
		ProxySettings: s.ProxySettings, NodeModes: s.NodeModes, guests: s.Guests,
	}.withDefaults()
	c.Kubernetes = s.Kubernetes // not the environment's
	return c
}

func bootID() (string, error) {
	b, err := os.ReadFile("/proc/sys/kernel/random/boot_id")
	return strings.TrimSpace(string(b)), err
}

// readState reads the state of a lab; the error is os.ErrNotExist if there is none.
func readState(file string) (state, error) {
	var s state
	b, err := os.ReadFile(file)
	if err != nil {
		return s, err
	}
	if err := json.Unmarshal(b, &s); err != nil {
		return s, fmt.Errorf("reading %s: %w", file, err)
	}
	return s, nil
}

// writeState replaces the state file atomically.
func writeState(file string, s state) error {
	b, err := json.MarshalIndent(s, "", "  ")
	if err != nil {
		return err
	}
	if err := os.WriteFile(file+".new", append(b, '\n'), 0o644); err != nil {
		return err
	}
	return os.Rename(file+".new", file)
}

// record adds a process to the state, replaces an earlier one of the same name, and writes the state.
func (l *Lab) record(p Process) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.state.Processes = slices.DeleteFunc(l.state.Processes, func(q Process) bool { return q.Name == p.Name })
	l.state.Processes = append(l.state.Processes, p)
	return writeState(l.stateFile(), l.state)
}

// update changes the state and writes it.
func (l *Lab) update(change func(*state)) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	change(&l.state)
	return writeState(l.stateFile(), l.state)
}

// processes returns a copy of the lab's process list.
func (l *Lab) processes() []Process {
	l.mu.Lock()
	defer l.mu.Unlock()
	return slices.Clone(l.state.Processes)
}

func (l *Lab) process(name string) (Process, bool) {
	for _, p := range l.processes() {
		if p.Name == name {
			return p, true
		}
	}
	return Process{}, false
}

// errLocked means that another program is changing the same lab.
var errLocked = errors.New("another 'lab' command is at work on this lab")

// lock keeps every other program from changing the lab until the returned function is called. The kernel releases the
// lock when the process ends. The lock file is removed with the lab, and the directory of labs with the last lab.
func (l *Lab) lock() (unlock func(), err error) {
	file := filepath.Join(l.config.Dir, l.config.Name+".lock")
	for {
		// Another lab may remove the directory at any time until the file is in it, if it was the last lab.
		if err := os.MkdirAll(l.config.Dir, 0o755); errors.Is(err, os.ErrExist) {
			continue
		} else if err != nil {
			return nil, err
		}
		f, err := os.OpenFile(file, os.O_CREATE|os.O_RDWR, 0o600)
		if errors.Is(err, os.ErrNotExist) {
			continue
		}
		if err != nil {
			return nil, err
		}
		if err := unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB); err != nil {
			f.Close()
			if err == unix.EWOULDBLOCK {
				return nil, fmt.Errorf("%s: %w", l.config.Name, errLocked)
			}
			return nil, fmt.Errorf("locking %s: %w", file, err)
		}
		// The previous owner may have removed the file. The lock then excludes no other program.
		var held, named unix.Stat_t
		if unix.Fstat(int(f.Fd()), &held) == nil && unix.Stat(file, &named) == nil && held.Ino == named.Ino {
			return func() {
				if _, err := os.Stat(l.dir()); errors.Is(err, os.ErrNotExist) {
					removeIfEmpty(file) // a file: removed
					removeIfEmpty(l.config.Dir)
				}
				// Close alone would leave the lock to a program that starts just now, which has a copy of f until its
				// exec.
				_ = unix.Flock(int(f.Fd()), unix.LOCK_UN)
				f.Close()
			}, nil
		}
		f.Close()
	}
}

func (l *Lab) dir() string                { return filepath.Join(l.config.Dir, l.config.Name) }
func (l *Lab) stateFile() string          { return filepath.Join(l.dir(), "state.json") }
func (l *Lab) logFile(name string) string { return filepath.Join(l.dir(), "log", name+".log") }
func (l *Lab) pki(name string) string     { return filepath.Join(l.dir(), "pki", name) }
func (l *Lab) nodeDir(n int) string       { return filepath.Join(l.dir(), fmt.Sprintf("node%d", n)) }

// tail returns the end of a component's log, for an error message.
func (l *Lab) tail(name string) string {
	b, err := os.ReadFile(l.logFile(name))
	if err != nil {
		return err.Error()
	}
	lines := strings.Split(strings.TrimSpace(string(b)), "\n")
	if len(lines) > 20 {
		lines = lines[len(lines)-20:]
	}
	return strings.Join(lines, "\n")
}
