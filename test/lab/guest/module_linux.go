package guest

import (
	"bufio"
	"errors"
	"fmt"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strings"

	"golang.org/x/sys/unix"
)

// Modprobe loads a module of the running kernel, by its name or by an alias, after the modules that it needs. A module
// that is already loaded or built in is no error.
func Modprobe(name string) error {
	release, err := kernelRelease()
	if err != nil {
		return err
	}
	return loadModule(filepath.Join(Modules, release), name, insertModule)
}

func kernelRelease() (string, error) {
	var u unix.Utsname
	if err := unix.Uname(&u); err != nil {
		return "", fmt.Errorf("asking for the kernel's version: %w", err)
	}
	return unix.ByteSliceToString(u.Release[:]), nil
}

// loadModule finds the modules that a name stands for in dir. It inserts each module by its file, after the modules
// that it needs.
func loadModule(dir, name string, insert func(file string) error) error {
	needs, err := readNeeds(dir)
	if err != nil {
		return err
	}
	names := []string{plain(name)}
	if _, found := needs[names[0]]; !found {
		if names, err = readAliases(dir, name); err != nil {
			return err
		}
	}
	var errs []error
	known := false
	for _, n := range names {
		files, found := needs[n]
		known = known || found
		// A module's line lists the most distant dependency last.
		for _, file := range slices.Backward(files) {
			if err := insert(filepath.Join(dir, file)); err != nil {
				errs = append(errs, fmt.Errorf("loading %s: %w", file, err))
			}
		}
	}
	if !known {
		built, err := builtIn(dir, plain(name))
		if err != nil || built {
			return err
		}
		return fmt.Errorf("the kernel has no module %s", name)
	}
	return errors.Join(errs...)
}

// plain returns a module's name as the kernel spells it.
func plain(name string) string { return strings.ReplaceAll(name, "-", "_") }

// readNeeds reads modules.dep. It returns a module's files by the module's name, with its own file first.
func readNeeds(dir string) (map[string][]string, error) {
	needs := map[string][]string{}
	err := eachLine(filepath.Join(dir, "modules.dep"), func(line string) {
		file, others, found := strings.Cut(line, ":")
		if found {
			needs[moduleName(file)] = append([]string{file}, strings.Fields(others)...)
		}
	})
	return needs, err
}

func moduleName(file string) string {
	name, _, _ := strings.Cut(path.Base(file), ".ko")
	return plain(name)
}

// readAliases reads modules.alias. It returns the modules that have a pattern that matches the name.
func readAliases(dir, name string) ([]string, error) {
	var names []string
	err := eachLine(filepath.Join(dir, "modules.alias"), func(line string) {
		f := strings.Fields(line)
		if len(f) != 3 || f[0] != "alias" {
			return
		}
		if ok, err := path.Match(plain(f[1]), plain(name)); err == nil && ok && !slices.Contains(names, f[2]) {
			names = append(names, plain(f[2]))
		}
	})
	return names, err
}

func builtIn(dir, name string) (bool, error) {
	found := false
	err := eachLine(filepath.Join(dir, "modules.builtin"), func(line string) {
		found = found || moduleName(line) == name
	})
	if errors.Is(err, os.ErrNotExist) {
		return false, nil
	}
	return found, err
}

func eachLine(file string, f func(line string)) error {
	r, err := os.Open(file)
	if err != nil {
		return err
	}
	defer r.Close()
	lines := bufio.NewScanner(r)
	for lines.Scan() {
		f(lines.Text())
	}
	if err := lines.Err(); err != nil {
		return fmt.Errorf("reading %s: %w", file, err)
	}
	return nil
}

func insertModule(file string) error {
	f, err := os.Open(file)
	if err != nil {
		return err
	}
	defer f.Close()
	if err := unix.FinitModule(int(f.Fd()), "", 0); err != nil && err != unix.EEXIST {
		return err
	}
	return nil
}
