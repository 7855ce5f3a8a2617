// Show prints as JSON what a program finds where it runs: its environment, and the files below the paths in its
// arguments. Suites compare its output in a pod with its output on a laptop. With -wait it waits for SIGTERM instead,
// as a pod's program does. Under the name cat it copies files as cat does.
package main

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"os/signal"
	"path/filepath"
	"strings"
	"syscall"
)

// world is the output.
type world struct {
	Env      map[string]string `json:"env"`
	Files    map[string]file   `json:"files"`
	Writable map[string]bool   `json:"writable"` // of the arguments, those in which files can be made
}

type file struct {
	Mode string `json:"mode"`
	Data []byte `json:"data"`
}

func main() {
	if err := run(os.Args); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

func run(args []string) error {
	switch {
	case filepath.Base(args[0]) == "cat":
		return cat(args[1:])
	case len(args) > 1 && args[1] == "-wait":
		ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM)
		defer stop()
		<-ctx.Done()
		return nil
	}
	w := world{Env: map[string]string{}, Files: map[string]file{}, Writable: map[string]bool{}}
	for _, entry := range os.Environ() {
		name, value, _ := strings.Cut(entry, "=")
		w.Env[name] = value
	}
	for _, path := range args[1:] {
		if err := w.add(path); err != nil {
			return err
		}
		if f, err := os.CreateTemp(path, ".try"); err == nil {
			w.Writable[path] = true
			if err := os.Remove(f.Name()); err != nil {
				return err
			}
		}
	}
	return json.NewEncoder(os.Stdout).Encode(w)
}

// add adds the files at path. It follows links, and skips the entries by which the kubelet updates files atomically.
func (w *world) add(path string) error {
	info, err := os.Stat(path)
	if err != nil {
		return err
	}
	f := file{Mode: info.Mode().Perm().String()}
	if !info.IsDir() {
		f.Data, err = os.ReadFile(path)
		w.Files[path] = f
		return err
	}
	entries, err := os.ReadDir(path)
	if err != nil {
		return err
	}
	for _, e := range entries {
		if strings.HasPrefix(e.Name(), "..") {
			continue
		}
		if err := w.add(filepath.Join(path, e.Name())); err != nil {
			return err
		}
	}
	return nil
}

func cat(paths []string) error {
	for _, path := range paths {
		if err := copyOut(path); err != nil {
			return err
		}
	}
	return nil
}

func copyOut(path string) error {
	f, err := os.Open(path)
	if err != nil {
		return err
	}
	defer f.Close()
	_, err = io.Copy(os.Stdout, f)
	return err
}
