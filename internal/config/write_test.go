package config

import (
	"errors"
	"os"
	"path/filepath"
	"testing"
)

func TestWrittenFileIsPrivate(t *testing.T) {
	path := filepath.Join(t.TempDir(), ".env")
	if err := os.WriteFile(path, []byte("old and longer"), 0o644); err != nil {
		t.Fatal(err)
	}
	if err := WriteFile(path, []byte("A=b\n")); err != nil {
		t.Fatal(err)
	}
	info, err := os.Stat(path)
	text, readErr := os.ReadFile(path)
	if err := errors.Join(err, readErr); err != nil || info.Mode().Perm() != 0o600 || string(text) != "A=b\n" {
		t.Errorf("mode %v, %q, %v", info.Mode(), text, err)
	}
	if err := WriteFile(filepath.Join(path, "below"), nil); err == nil {
		t.Error("a file below a file was written")
	}
	if err := WriteFile(filepath.Dir(path), nil); err == nil {
		t.Error("a file replaced a directory")
	}
	if left, err := os.ReadDir(filepath.Dir(path)); err != nil || len(left) != 1 {
		t.Errorf("beside it: %v, %v", left, err)
	}
}
