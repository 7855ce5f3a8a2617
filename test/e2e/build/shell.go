package build

import (
	"archive/tar"
	"bytes"
	"context"
	"fmt"
	"os/exec"
	"path/filepath"

	v1 "github.com/google/go-containerregistry/pkg/v1"
)

// shellPrograms are the programs that a user needs to inspect a container.
var shellPrograms = []string{"sh", "cat", "chmod", "curl", "env", "gzip", "id", "ls", "rm", "sleep", "stat", "stty",
	"touch", "tty", "uname"}

// Shell writes an image to dir/shell.tar. It contains the application of App, which dir must contain, as its
// entrypoint, and shellPrograms of this machine. Its environment has IMAGE=shell and COLOR=image.
func Shell(ctx context.Context, dir, ref string) error {
	var layer bytes.Buffer
	w := tar.NewWriter(&layer)
	seen := map[string]bool{}
	add := func(from, to string) error {
		if seen[to] {
			return nil
		}
		seen[to] = true
		return addFileAs(w, from, to)
	}
	if err := add(filepath.Join(dir, "app"), "/app"); err != nil {
		return err
	}
	for _, name := range shellPrograms {
		program, err := exec.LookPath(name)
		if err != nil {
			return fmt.Errorf("%s goes into the image: %w", name, err)
		}
		libraries, err := librariesOf(ctx, program)
		if err != nil {
			return err
		}
		if err := add(program, "/bin/"+name); err != nil {
			return err
		}
		for _, file := range libraries {
			if err := add(file, file); err != nil {
				return err
			}
		}
	}
	if err := w.Close(); err != nil {
		return err
	}
	return writeImage(layer.Bytes(), v1.Config{
		Entrypoint: []string{"/app"}, Cmd: []string{"-name", "image"}, User: "65532:65532", WorkingDir: "/bin",
		Env: []string{"PATH=/bin", "IMAGE=shell", "COLOR=image"},
	}, ref, filepath.Join(dir, "shell.tar"))
}
