package build

import (
	"archive/tar"
	"bytes"
	"context"
	"fmt"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/empty"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/google/go-containerregistry/pkg/v1/tarball"

	"kubevpn/test/image"
)

// PythonProgram is the path of Python, both in Debian and in the image that Python makes.
const PythonProgram = "/usr/bin/python3"

// Python writes an image with this machine's Python to dir/python.tar: the interpreter of Debian's package python3, the
// libraries that it is linked to, and the standard library's modules that are Python, or need nothing else.
func Python(ctx context.Context, dir, ref string) error {
	out, err := exec.CommandContext(ctx, PythonProgram, "-I", "-c",
		"import sysconfig; print(sysconfig.get_paths()['stdlib'])").Output()
	if err != nil {
		return fmt.Errorf("asking %s for its modules; install Debian's package python3 (scripts/packages does): %w",
			PythonProgram, err)
	}
	modules := strings.TrimSpace(string(out))
	var layer bytes.Buffer
	w := tar.NewWriter(&layer)
	if err := addFile(w, PythonProgram); err != nil {
		return err
	}
	libraries, err := librariesOf(ctx, PythonProgram)
	if err != nil {
		return err
	}
	for _, file := range libraries {
		if err := addFile(w, file); err != nil {
			return err
		}
	}
	err = filepath.WalkDir(modules, func(p string, d fs.DirEntry, err error) error {
		switch {
		case err != nil:
			return err
		case d.IsDir() && (d.Name() == "__pycache__" || d.Name() == "test" || d.Name() == "idlelib" ||
			d.Name() == "lib2to3" || strings.HasPrefix(d.Name(), "config-")):
			return fs.SkipDir
		case d.IsDir():
			return nil
		}
		return addFile(w, p)
	})
	if err != nil {
		return fmt.Errorf("collecting Python's modules: %w", err)
	}
	if err := w.Close(); err != nil {
		return err
	}
	return writeImage(layer.Bytes(),
		v1.Config{Entrypoint: []string{PythonProgram}, User: "65532:65532", Env: []string{"PATH=/usr/bin"}}, ref,
		filepath.Join(dir, "python.tar"))
}

// writeImage writes an image of one layer, a tar, to a file.
func writeImage(layer []byte, config v1.Config, ref, file string) error {
	content, err := tarball.LayerFromOpener(func() (io.ReadCloser, error) {
		return io.NopCloser(bytes.NewReader(layer)), nil
	})
	if err != nil {
		return err
	}
	img, err := mutate.AppendLayers(empty.Image, content)
	if err != nil {
		return err
	}
	whole, err := img.ConfigFile()
	if err != nil {
		return err
	}
	whole = whole.DeepCopy()
	whole.OS, whole.Architecture, whole.Config = "linux", runtime.GOARCH, config
	if img, err = mutate.ConfigFile(img, whole); err != nil {
		return err
	}
	return image.WriteTar(img, ref, file)
}

// addFile adds a file under its own path. It follows links.
func addFile(w *tar.Writer, name string) error { return addFileAs(w, name, name) }

func addFileAs(w *tar.Writer, name, as string) error {
	text, err := os.ReadFile(name)
	if err != nil {
		return err
	}
	info, err := os.Stat(name)
	if err != nil {
		return err
	}
	header := &tar.Header{Typeflag: tar.TypeReg, Name: strings.TrimPrefix(as, "/"), Mode: int64(info.Mode().Perm()),
		Size: int64(len(text))}
	if err := w.WriteHeader(header); err != nil {
		return err
	}
	_, err = w.Write(text)
	return err
}

// librariesOf returns the files that a program is linked to, including the dynamic linker.
func librariesOf(ctx context.Context, program string) ([]string, error) {
	out, err := exec.CommandContext(ctx, "ldd", program).Output()
	if err != nil {
		return nil, fmt.Errorf("asking what %s is linked to: %w", program, err)
	}
	var files []string
	for line := range strings.Lines(string(out)) {
		for field := range strings.FieldsSeq(line) { // "libz.so.1 => /lib/x/libz.so.1 (0x...)", or the linker alone
			if strings.HasPrefix(field, "/") {
				files = append(files, field)
			}
		}
	}
	return files, nil
}
