package config

import (
	"errors"
	"os"
	"path/filepath"
)

// WriteFile creates or replaces a file with one that only the user can read. It replaces the file atomically, and
// returns when the content is on disk.
func WriteFile(path string, content []byte) error {
	return viaTemp(path, content, os.Rename)
}

// viaTemp writes a file with mode 0600 in the directory of path to disk, and calls place to give it this path. place
// may leave the file: viaTemp removes it.
func viaTemp(path string, content []byte, place func(temp, path string) error) error {
	temp, err := os.CreateTemp(filepath.Dir(path), ".kubevpn-*") // mode 0600
	if err != nil {
		return err
	}
	defer os.Remove(temp.Name())
	_, err = temp.Write(content)
	if err = errors.Join(err, temp.Sync(), temp.Close()); err != nil {
		return err
	}
	return place(temp.Name(), path)
}
