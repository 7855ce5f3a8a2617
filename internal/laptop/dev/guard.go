package dev

import (
	"cmp"
	"fmt"
	"os"
	"os/user"
	"path"
	"path/filepath"
	"slices"
	"strings"

	"kubevpn/internal/api"
	"kubevpn/internal/kube/podenv"
	"kubevpn/pkg/host/sandbox"
)

// guard keeps volumes, whose paths and content come from the cluster, out of directories that decide what programs of
// this machine execute, and out of the user's own directories.
type guard struct {
	own  []guardedDir
	over []string // --mount-over: paths of the pod at and below which the user allows volumes
}

// guardedDir is a directory, without symbolic links, in or over which no volume may be mounted, and why.
type guardedDir struct{ dir, why string }

const whySystem = "this machine keeps programs and their configuration there"

// system are directories that contain programs and what they load, or search by themselves. Nothing in them may come
// from a volume. /gnu and /nix are the stores of Guix and Nix, which make the directories in /run.
var system = []string{"/bin", "/boot", "/dev", "/etc", "/gnu", "/lib", "/lib32", "/lib64", "/libx32", "/nix",
	"/run/current-system", "/run/opengl-driver", "/sbin", "/snap", "/sys", "/usr"}

// newGuard returns a guard for the environment local of this machine. over are the paths that the user allows.
func newGuard(local, over []string) (*guard, error) {
	g := &guard{over: over}
	const home = "it is your home directory"
	if u, err := user.Current(); err == nil { // ssh does not use HOME; a user without an entry has only HOME
		g.own = append(g.own, guardedDir{u.HomeDir, home})
	}
	for _, e := range local {
		switch name, value, _ := strings.Cut(e, "="); name {
		case "HOME":
			g.own = append(g.own, guardedDir{value, home})
		case "PATH":
			for _, dir := range filepath.SplitList(value) {
				g.own = append(g.own, guardedDir{dir, "this machine finds programs there (PATH)"})
			}
		}
	}
	here, err := os.Getwd()
	if err != nil {
		return nil, err
	}
	g.own = append(g.own, guardedDir{here, "it is the working directory"})
	g.own = slices.DeleteFunc(g.own, func(p guardedDir) bool { return !path.IsAbs(p.dir) || path.Clean(p.dir) == "/" })
	for n, p := range g.own {
		if g.own[n].dir, _, err = sandbox.Locate(path.Clean(p.dir)); err != nil {
			return nil, err
		}
	}
	moved, err := elsewhere(append([]string{"/opt", "/usr/local"}, system...))
	g.own = append(g.own, moved...)
	return g, err
}

// elsewhere returns the directories that links of this machine lead to, such as /var/usrlocal where /usr is read-only
// (Fedora Silverblue).
func elsewhere(dirs []string) (all []guardedDir, err error) {
	for _, dir := range dirs {
		real, _, err := sandbox.Locate(dir)
		if err != nil {
			return nil, err
		}
		if real != dir {
			all = append(all, guardedDir{real, whySystem})
		}
	}
	return all, nil
}

// shown returns the mounts for the sandbox. It omits those that the guard refuses, with a warning.
func (g *guard) shown(mounts []podenv.Mount, volumes []podenv.Volume, warn func(string)) []sandbox.Mount {
	var all []sandbox.Mount
	for _, m := range mounts {
		if slices.ContainsFunc(all, func(o sandbox.Mount) bool { return o.Remote && api.Within(m.Path, o.Path) }) {
			continue // the pod has mounted it there
		}
		if m.Path == "/" || api.Within(m.Path, "/proc") {
			warn(fmt.Sprintf("volume %s at %s: nothing can be mounted there", m.Volume, m.Path))
			continue
		}
		if why := g.refuses(m, isFile(m, volumes), all); why != "" {
			warn(fmt.Sprintf("omitting volume %s at %s: %s; --mount-over %s mounts it", m.Volume, m.Path, why, m.Path))
			continue
		}
		one := sandbox.Mount{Path: m.Path, Source: m.Source, ReadOnly: m.ReadOnly, Remote: m.Remote}
		if m.Source == "" && !m.Remote {
			one.Volume, one.SubPath = m.Volume, m.SubPath
		}
		all = append(all, one)
	}
	return all
}

// isFile reports whether a mount shows one file.
func isFile(m podenv.Mount, volumes []podenv.Volume) bool {
	if m.Source != "" {
		info, err := os.Stat(m.Source)
		return err == nil && !info.IsDir() // the mount of a missing source fails anyway
	}
	return slices.ContainsFunc(volumes, func(v podenv.Volume) bool {
		return v.Name == m.Volume && slices.ContainsFunc(v.Files, func(f podenv.File) bool {
			return f.Path == m.SubPath
		})
	})
}

// refuses returns the reason to omit a mount, or "". before are the mounts that the sandbox makes earlier.
func (g *guard) refuses(m podenv.Mount, file bool, before []sandbox.Mount) string {
	if slices.ContainsFunc(g.over, func(o string) bool { return api.Within(m.Path, o) }) {
		return ""
	}
	at, inside := m.Path, ""
	for _, outer := range before {
		if outer.Source != "" && api.Within(m.Path, outer.Path) { // a link in that directory may lead anywhere
			at, inside = path.Join(outer.Source, strings.TrimPrefix(m.Path, outer.Path)), outer.Source
		}
	}
	real, missing, err := sandbox.Locate(at)
	if err != nil {
		return err.Error()
	}
	if inside != "" {
		if source, _, err := sandbox.Locate(inside); err == nil && api.Within(real, source) {
			return ""
		}
	}
	for _, own := range g.own {
		if api.Within(real, own.dir) || api.Within(own.dir, real) {
			return own.why
		}
	}
	return cmp.Or(refusesSystem(at, missing, file), refusesSystem(real, missing, file))
}

// refusesSystem is refuses for the directories of every machine. name is the path as it is written, or as the links of
// this machine lead. It allows new directories in /opt, which belong to applications that this machine does not have.
func refusesSystem(name string, missing int, file bool) string {
	within := func(dir string) bool { return api.Within(name, dir) }
	if slices.ContainsFunc(system, within) && !within("/dev/shm") {
		return whySystem
	}
	elements := strings.Split(strings.TrimPrefix(name, "/"), "/")
	switch {
	case elements[0] != "opt":
	case len(elements) == 1, missing < len(elements)-1, missing == 0:
		return "it exists on this machine, or its directory does"
	case missing == 1 && file:
		return "this machine's programs may read it as their own"
	}
	return ""
}
