package config

import (
	"io/fs"
	"os"
	"path/filepath"
)

// systemDirs are below the user's local application data, which Windows closes to other users.
func systemDirs() dirs {
	home, err := os.UserHomeDir()
	if err != nil {
		home = "" // place returns an error if it needs the directory
	}
	data, err := os.UserCacheDir()
	if err != nil {
		data = home
	}
	return dirs{
		home:    home,
		runtime: filepath.Join(data, "kubevpn", "run"),
		state:   filepath.Join(data, "kubevpn", "state"),
	}
}

// checkOwner and checkMode have nothing to look at: a FileInfo on Windows has neither.
func checkOwner(string, fs.FileInfo) error { return nil }

func checkMode(string, fs.FileInfo, fs.FileMode) error { return nil }
