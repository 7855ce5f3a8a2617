package config

import (
	"cmp"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"

	"kubevpn/internal/api"
)

// Paths are the files and directories of kubevpn for one user. Locate returns them and creates nothing.
type Paths struct {
	ConfigFile string // settings; need not exist
	RuntimeDir string // sockets and lock of the daemon; mode 0700, owned by the user
	StateDir   string // log, client key and trusted clusters
}

// Socket returns the path of the unix socket on which the daemon serves HTTP.
func (p Paths) Socket() string { return filepath.Join(p.RuntimeDir, "daemon.sock") }

// HelperSocket returns the path of the unix socket over which the CLI sends the socket of the helper to the daemon.
func (p Paths) HelperSocket() string { return filepath.Join(p.RuntimeDir, "helper.sock") }

// Lock returns the path of the file that the running daemon locks. It contains the PID of the daemon.
func (p Paths) Lock() string { return filepath.Join(p.RuntimeDir, "daemon.lock") }

// PageFile returns the path of the file that leads a browser to the page of `kubevpn ui`.
func (p Paths) PageFile() string { return filepath.Join(p.RuntimeDir, "page.html") }

// LogFile returns the path of the daemon's log.
func (p Paths) LogFile() string { return filepath.Join(p.StateDir, "daemon.log") }

// KeyFile returns the path of the key that ClientKey returns.
func (p Paths) KeyFile() string { return filepath.Join(p.StateDir, "client.key") }

// TrustFile returns the path of the file of the trusted clusters.
func (p Paths) TrustFile() string { return filepath.Join(p.StateDir, "trust.json") }

// maxSocketPath is the length in bytes that fits into sockaddr_un on macOS, without the terminating zero. Linux allows
// 107.
const maxSocketPath = 103

// Locate returns the paths for the user of this process, according to the XDG base directory specification:
//
//	settings  $XDG_CONFIG_HOME/kubevpn/config.yaml, else ~/.config/kubevpn/config.yaml
//	runtime   $XDG_RUNTIME_DIR/kubevpn, else /run/kubevpn for root, else /tmp/kubevpn-UID
//	state     $XDG_STATE_HOME/kubevpn, else /var/lib/kubevpn for root, else ~/.local/state/kubevpn
//
// It ignores a directory from the environment that another user owns: after `sudo -E` the variables name the
// directories of the user who ran sudo. For the same reason root stores its state outside of the home directory.
func Locate(getenv func(string) string) (Paths, error) {
	return locate(getenv, systemDirs())
}

// dirs are the default directories.
type dirs struct {
	home    string // "": unknown
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
		return Paths{}, api.Errorf(api.ExitDaemon, "the path %s is %d bytes too long for a socket", p.HelperSocket(),
			n-maxSocketPath).
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

// place returns the first of: kubevpn below xdg; fixed; kubevpn below a directory of home. It skips empty arguments.
func place(xdg, fixed, home, below string) (string, error) {
	switch {
	case filepath.IsAbs(xdg): // the specification says to ignore relative paths
		return filepath.Join(xdg, "kubevpn"), nil
	case fixed != "":
		return fixed, nil
	case home == "":
		return "", api.Errorf(api.ExitUsage, "cannot determine the home directory").WithHint("set HOME")
	}
	return filepath.Join(home, filepath.FromSlash(below), "kubevpn"), nil
}

// owned returns path if it is absolute and no other user owns it, else "". The path need not exist.
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

// MakeRuntimeDir creates the runtime directory if it does not exist, and checks it like CheckRuntimeDir.
func (p Paths) MakeRuntimeDir() error {
	err := os.MkdirAll(filepath.Dir(p.RuntimeDir), 0o755)
	if err == nil {
		err = os.Mkdir(p.RuntimeDir, 0o700)
	}
	if err != nil && !errors.Is(err, fs.ErrExist) {
		return runtimeDirError(err)
	}
	return p.CheckRuntimeDir()
}

// CheckRuntimeDir returns nil if the runtime directory is a directory, not a symlink, that belongs to this user and
// that no other user can access. Another user who could write to it could replace the socket of the daemon. If the
// directory does not exist, the error matches fs.ErrNotExist.
func (p Paths) CheckRuntimeDir() error {
	info, err := os.Lstat(p.RuntimeDir)
	switch {
	case err != nil:
	case !info.IsDir():
		err = fmt.Errorf("%s is not a directory", p.RuntimeDir)
	default:
		err = cmp.Or(checkOwner(p.RuntimeDir, info), checkMode(p.RuntimeDir, info, 0o700))
	}
	return runtimeDirError(err)
}

// runtimeDirError explains an error, or returns nil.
func runtimeDirError(err error) error {
	if err == nil {
		return nil
	}
	return api.Errorf(api.ExitDaemon, "cannot use the directory for the daemon's sockets: %w", err).
		WithHint("remove it, or set XDG_RUNTIME_DIR to a directory that you own; if another user owns it, ask an " +
			"admin to remove it")
}

// MakeStateDir creates the state directory if it does not exist.
func (p Paths) MakeStateDir() error {
	if err := os.MkdirAll(p.StateDir, 0o700); err != nil {
		return api.Errorf(api.ExitDaemon, "cannot create the directory for the daemon's log: %w", err).
			WithHint("set XDG_STATE_HOME to a directory that you may write to")
	}
	return nil
}
