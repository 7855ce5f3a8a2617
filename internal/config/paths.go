package config

import (
	"crypto/rand"
	"encoding/hex"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	"kubevpn/internal/api"
)

// Paths is where this user's kubevpn keeps its files. Locate finds them and creates nothing.
type Paths struct {
	ConfigFile string // settings; need not exist
	RuntimeDir string // the daemon's sockets and its lock; mode 0700, ours alone
	StateDir   string // the log and the client's identity
}

// Socket is the unix socket of the daemon's HTTP interface.
func (p Paths) Socket() string { return filepath.Join(p.RuntimeDir, "daemon.sock") }

// HelperSocket is the unix socket over which the CLI hands the helper's socket to the daemon.
func (p Paths) HelperSocket() string { return filepath.Join(p.RuntimeDir, "helper.sock") }

// Lock is the file whose lock the one daemon holds.
func (p Paths) Lock() string { return filepath.Join(p.RuntimeDir, "daemon.lock") }

// LogFile is the daemon's log.
func (p Paths) LogFile() string { return filepath.Join(p.StateDir, "daemon.log") }

// maxSocketPath is what sockaddr_un holds on Linux, less the terminating zero (macOS: 103).
const maxSocketPath = 103

// Locate says where the files of this process's user are, by the XDG base directory specification:
//
//	settings  $XDG_CONFIG_HOME/kubevpn/config.yaml, else ~/.config/kubevpn/config.yaml
//	runtime   $XDG_RUNTIME_DIR/kubevpn, else /run/kubevpn for root, else /tmp/kubevpn-UID
//	state     $XDG_STATE_HOME/kubevpn, else /var/lib/kubevpn for root, else ~/.local/state/kubevpn
//
// A directory from the environment counts only if it is this user's: after `sudo -E` the variables still
// name the directories of whoever ran sudo. For the same reason root does not keep state in a home.
func Locate(getenv func(string) string) (Paths, error) {
	return locate(getenv, systemDirs())
}

// dirs are where files go that no variable places.
type dirs struct {
	home    string // "" where there is none
	runtime string
	state   string // "": below home
}

func locate(getenv func(string) string, d dirs) (Paths, error) {
	var p Paths
	if base := owned(getenv("XDG_RUNTIME_DIR")); base != "" {
		p.RuntimeDir = filepath.Join(base, "kubevpn")
	} else {
		p.RuntimeDir = d.runtime
	}
	if n := len(p.HelperSocket()); n > maxSocketPath {
		return Paths{}, api.Errorf(api.ExitDaemon, "the path %s is %d bytes too long for a socket", p.HelperSocket(), n-maxSocketPath).
			WithHint("set XDG_RUNTIME_DIR to a shorter directory")
	}
	var err error
	if p.ConfigFile, err = place(getenv("XDG_CONFIG_HOME"), "", d.home, ".config"); err != nil {
		return Paths{}, err
	}
	p.ConfigFile = filepath.Join(p.ConfigFile, "config.yaml")
	p.StateDir, err = place(owned(getenv("XDG_STATE_HOME")), d.state, d.home, ".local/state")
	return p, err
}

// place chooses the first directory that there is: kubevpn below xdg, fixed, kubevpn below a directory of home.
func place(xdg, fixed, home, below string) (string, error) {
	switch {
	case filepath.IsAbs(xdg): // the specification: relative paths are to be ignored
		return filepath.Join(xdg, "kubevpn"), nil
	case fixed != "":
		return fixed, nil
	case home == "":
		return "", api.Errorf(api.ExitUsage, "the home directory is not known").WithHint("set HOME")
	}
	return filepath.Join(home, filepath.FromSlash(below), "kubevpn"), nil
}

// owned returns path if it is absolute and not, where it exists, another user's; else "".
func owned(path string) string {
	if !filepath.IsAbs(path) {
		return ""
	}
	info, err := os.Stat(path)
	if errors.Is(err, fs.ErrNotExist) {
		return path
	}
	if err != nil || checkOwner(path, info) != nil {
		return ""
	}
	return path
}

// MakeRuntimeDir creates the runtime directory, or checks that the one there is a directory, not a symlink,
// ours, and closed to everybody else: who could write to it could put their own socket in the daemon's place.
func (p Paths) MakeRuntimeDir() error {
	if err := os.MkdirAll(filepath.Dir(p.RuntimeDir), 0o755); err != nil {
		return runtimeDirError(err)
	}
	if err := os.Mkdir(p.RuntimeDir, 0o700); err != nil && !errors.Is(err, fs.ErrExist) {
		return runtimeDirError(err)
	}
	return p.CheckRuntimeDir()
}

// CheckRuntimeDir is the second half of MakeRuntimeDir. A directory that does not exist is an error that
// matches fs.ErrNotExist.
func (p Paths) CheckRuntimeDir() error {
	info, err := os.Lstat(p.RuntimeDir)
	if err != nil {
		return runtimeDirError(err)
	}
	if !info.IsDir() {
		return runtimeDirError(fmt.Errorf("%s is not a directory", p.RuntimeDir))
	}
	if err := checkOwner(p.RuntimeDir, info); err != nil {
		return runtimeDirError(err)
	}
	if err := checkMode(p.RuntimeDir, info); err != nil {
		return runtimeDirError(err)
	}
	return nil
}

func runtimeDirError(err error) error {
	return api.Errorf(api.ExitDaemon, "the directory for the daemon's sockets cannot be used: %w", err).
		WithHint("remove it, or set XDG_RUNTIME_DIR to a directory of yours")
}

// MakeStateDir creates the state directory.
func (p Paths) MakeStateDir() error {
	if err := os.MkdirAll(p.StateDir, 0o700); err != nil {
		return api.Errorf(api.ExitDaemon, "the directory for the daemon's log cannot be created: %w", err).
			WithHint("set XDG_STATE_HOME to a directory that you may write to")
	}
	return nil
}

// ClientID is this user's identity on this machine towards traffic managers: 32 random hex digits, made
// once and kept in the state directory, which must exist. Concurrent callers get the same one.
func (p Paths) ClientID() (string, error) {
	path := filepath.Join(p.StateDir, "client-id")
	id, err := readClientID(path)
	if !errors.Is(err, fs.ErrNotExist) {
		return id, err
	}
	var random [16]byte
	rand.Read(random[:]) // never fails (crypto/rand)
	temp, err := os.CreateTemp(p.StateDir, ".client-id-*")
	if err != nil {
		return "", fmt.Errorf("creating the client's identity: %w", err)
	}
	defer os.Remove(temp.Name())
	_, err = temp.WriteString(hex.EncodeToString(random[:]) + "\n")
	if err = errors.Join(err, temp.Close()); err != nil {
		return "", fmt.Errorf("creating the client's identity: %w", err)
	}
	// A link appears whole and never replaces: whoever comes first settles it.
	if err := os.Link(temp.Name(), path); err != nil && !errors.Is(err, fs.ErrExist) {
		return "", fmt.Errorf("creating the client's identity: %w", err)
	}
	return readClientID(path)
}

func readClientID(path string) (string, error) {
	text, err := os.ReadFile(path)
	if err != nil {
		return "", fmt.Errorf("reading the client's identity: %w", err)
	}
	id := strings.TrimSpace(string(text))
	if b, err := hex.DecodeString(id); err != nil || len(b) != 16 {
		return "", fmt.Errorf("%s does not hold 32 hex digits: remove it and a new one is made", path)
	}
	return id, nil
}
