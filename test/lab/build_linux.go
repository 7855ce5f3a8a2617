package lab

import (
	"bytes"
	"cmp"
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"runtime"
	"slices"
	"strings"

	"golang.org/x/sys/unix"

	"kubevpn/test/image"
)

// programs contains the paths of a lab's programs and images in the cache.
type programs struct {
	Kube    string   `json:"kube"` // all components of Kubernetes, and kubectl
	Etcd    string   `json:"etcd"`
	Pause   string   `json:"pause"`
	Outside string   `json:"outside"`
	Guest   string   `json:"guest"`  // a guest's first process, and the stand-in for its programs
	Shim    string   `json:"shim"`   // for the guests' kernel; empty without guests
	Images  []string `json:"images"` // archives: pause, coredns, echo
}

// program is a program that the lab builds itself.
type program struct {
	name  string
	dir   string   // in the repository
	extra []string // more source files and package directories in the repository, besides dir
	hint  string   // the progress message of a long build
	image string   // the image to make of it, if any
	// module is the module file in dir; empty: go.mod. Its checksums are beside it, as in 1.31.mod and 1.31.sum.
	module string

	ldflags func(source string) (string, error) // beyond the common ones; nil for none
}

// buildList returns the programs in the order in which they are built. Kubernetes is the first, and etcd and CoreDNS
// use the versions of its go.mod, so that Go compiles each package that they share once.
func buildList(kubernetes string) []program {
	module := ""
	if kubernetes != "" {
		module = kubernetes + ".mod"
	}
	return []program{
		{name: "kube", dir: "test/lab/cluster/kube", hint: "Kubernetes' components (about 8 minutes on 2 cores, once)",
			module: module, ldflags: func(source string) (string, error) { return kubernetesVersion(source, module) }},
		{name: "etcd", dir: "test/lab/cluster/etcd", hint: "etcd (about a quarter of a minute, once)"},
		{name: "coredns", dir: "test/lab/cluster/coredns", hint: "CoreDNS (about a quarter of a minute, once)",
			image: corednsImage},
		{name: "outside", dir: "test/lab/outside", extra: []string{"test/go.mod", "test/go.sum"},
			hint: "the router's services"},
		{name: "guest", dir: "test/lab/guest/init", extra: []string{"test/go.mod", "test/go.sum", "test/lab/guest"},
			hint: "the guests' first process"},
		{name: "pause", dir: "test/lab/pause", hint: "the pause image", image: pauseImage},
		{name: "echo", dir: "test/lab/echo", hint: "the echo image", image: EchoImage},
	}
}

// helmProgram returns helm, which no lab itself needs.
func helmProgram() program {
	return program{name: "helm", dir: "test/lab/cluster/helm", hint: "Helm (about a minute, once)"}
}

// flags returns the flags of go build, which are part of the name of a build. They disable cgo: images have no C
// library, and the machine may have no C compiler.
func (p program) flags(source string) ([]string, error) {
	ldflags := "-s -w"
	if p.ldflags != nil {
		more, err := p.ldflags(source)
		if err != nil {
			return nil, err
		}
		ldflags += " " + more
	}
	flags := []string{"-mod=readonly", "-trimpath", "-buildvcs=false", "-ldflags=" + ldflags}
	if p.module != "" {
		flags = append(flags, "-modfile="+p.module)
	}
	return flags, nil
}

// kubernetesVersion returns the linker's flags that set the version of Kubernetes' programs. Built as a module, they do
// not know it, but clients and kubeconfig plugins ask for it.
func kubernetesVersion(source, module string) (string, error) {
	file := filepath.Join(source, "test/lab/cluster/kube", cmp.Or(module, "go.mod"))
	b, err := os.ReadFile(file)
	if err != nil {
		return "", err
	}
	found := regexp.MustCompile(`(?m)^\s*k8s\.io/kubernetes v(\d+)\.(\d+)\.(\d+)$`).FindStringSubmatch(string(b))
	if found == nil {
		return "", fmt.Errorf("%s names no version of k8s.io/kubernetes", file)
	}
	var flags []string
	for _, pkg := range []string{"k8s.io/component-base/version", "k8s.io/client-go/pkg/version"} {
		for name, value := range map[string]string{
			"gitMajor": found[1], "gitMinor": found[2],
			"gitVersion": fmt.Sprintf("v%s.%s.%s", found[1], found[2], found[3]),
			"gitCommit":  "lab", "gitTreeState": "clean", "buildDate": "1970-01-01T00:00:00Z",
		} {
			flags = append(flags, fmt.Sprintf("-X %s.%s=%s", pkg, name, value))
		}
	}
	slices.Sort(flags)
	return strings.Join(flags, " "), nil
}

// Build builds Kubernetes' components, etcd, CoreDNS and the lab's own programs and images, unless the cache has them.
// The name of each contains the hash of its sources, go.mod, go.sum and the version of Go:
//
//	CACHE/kubevpn-lab/NAME-HASH/
//
// A changed version is thus built again, and users can delete an old one.
func (l *Lab) Build(ctx context.Context) error {
	source, err := findSource(l.config.Source)
	if err != nil {
		return err
	}
	cache, err := cacheDir(l.config.Cache)
	if err != nil {
		return err
	}
	var built programs
	for _, p := range buildList(l.config.Kubernetes) {
		dir, err := l.cached(ctx, p, source, cache)
		if err != nil {
			return err
		}
		binary, archive := filepath.Join(dir, p.name), filepath.Join(dir, p.name+".tar")
		switch p.name {
		case "kube":
			built.Kube = binary
		case "etcd":
			built.Etcd = binary
		case "outside":
			built.Outside = binary
		case "guest":
			built.Guest = binary
		case "pause":
			built.Pause = binary
		}
		if p.image != "" {
			built.Images = append(built.Images, archive)
		}
	}
	if l.config.guests {
		if built.Shim, err = buildShim(ctx, cache); err != nil {
			return err
		}
	}
	l.programs = built
	return nil
}

// Helm returns the path of the helm command. It builds helm unless the cache has it. The lab need not be up.
func (l *Lab) Helm(ctx context.Context) (string, error) {
	source, err := findSource(l.config.Source)
	if err != nil {
		return "", err
	}
	cache, err := cacheDir(l.config.Cache)
	if err != nil {
		return "", err
	}
	p := helmProgram()
	dir, err := l.cached(ctx, p, source, cache)
	return filepath.Join(dir, p.name), err
}

// cached returns the directory of the program in the cache. It builds the program unless the directory exists.
func (l *Lab) cached(ctx context.Context, p program, source, cache string) (string, error) {
	hash, err := p.hash(source)
	if err != nil {
		return "", err
	}
	dir := filepath.Join(cache, p.name+"-"+hash)
	return dir, l.buildProgram(ctx, p, source, dir)
}

// buildProgram creates dir with the program and its image. Concurrent builds of the same program wait for each other.
func (l *Lab) buildProgram(ctx context.Context, p program, source, dir string) error {
	if _, err := os.Stat(dir); err == nil {
		return nil // it appears whole or not at all
	}
	parent := filepath.Dir(dir)
	if err := os.MkdirAll(parent, 0o755); err != nil {
		return err
	}
	unlock, err := l.lockBuild(filepath.Join(parent, ".lock"))
	if err != nil {
		return err
	}
	defer unlock()
	if _, err := os.Stat(dir); err == nil {
		return nil // another process has built it
	}
	temp, err := os.MkdirTemp(parent, "."+p.name+"-")
	if err != nil {
		return err
	}
	defer os.RemoveAll(temp) // after the rename there is nothing to remove
	if err := os.Chmod(temp, 0o755); err != nil {
		return err
	}
	goTool, err := exec.LookPath("go")
	if err != nil {
		return fmt.Errorf("building %s needs Go, which is not in PATH: %w", p.name, err)
	}
	binary := filepath.Join(temp, p.name)
	flags, err := p.flags(source)
	if err != nil {
		return err
	}
	if err := l.compile(ctx, p, goTool, flags, filepath.Join(source, p.dir), binary); err != nil {
		return fmt.Errorf("building %s: %w", p.name, err)
	}
	if p.image != "" {
		img, err := image.Build(image.Options{Files: []image.File{{Source: binary, Path: "/" + p.name}}})
		if err != nil {
			return err
		}
		if err := image.WriteTar(img, p.image, filepath.Join(temp, p.name+".tar")); err != nil {
			return err
		}
	}
	return os.Rename(temp, dir)
}

// compile runs go build in dir. It shows how many of the packages go build has begun to compile.
func (l *Lab) compile(ctx context.Context, p program, goTool string, flags []string, dir, binary string) error {
	var built compiled
	done := l.progress.counted(built.status, "building %s", p.hint)
	command := func(args ...string) *exec.Cmd {
		c := exec.CommandContext(ctx, goTool, args...)
		c.Dir = dir
		c.Env = append(os.Environ(), "CGO_ENABLED=0", "GOOS=linux", "GOFLAGS=", "GOWORK=off")
		return c
	}
	list := command(slices.Concat([]string{"list", "-deps", "-f", "{{if .Stale}}{{.ImportPath}}{{end}}"}, flags,
		[]string{"."})...)
	list.Stderr = &built
	if out, err := list.Output(); err == nil { // go build reports an error
		built.begin(bytes.Count(out, []byte("\n")))
	}
	build := command(slices.Concat([]string{"build", "-v"}, flags, []string{"-o", binary, "."})...)
	build.Stdout, build.Stderr = &built, &built
	err := build.Run()
	done(err)
	if err != nil {
		return fmt.Errorf("%w\n%s", err, built.rest())
	}
	return nil
}

func (l *Lab) lockBuild(file string) (unlock func(), err error) {
	f, err := os.OpenFile(file, os.O_CREATE|os.O_RDWR, 0o600)
	if err != nil {
		return nil, err
	}
	if unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB) != nil {
		done := l.progress.step("waiting for another build to finish")
		err := unix.Flock(int(f.Fd()), unix.LOCK_EX)
		done(err)
		if err != nil {
			f.Close()
			return nil, fmt.Errorf("locking %s: %w", file, err)
		}
	}
	return func() { f.Close() }, nil
}

// hash returns a hash of the sources of p.
func (p program) hash(source string) (string, error) {
	var files []string
	module := cmp.Or(p.module, "go.mod")
	for _, name := range append([]string{p.dir}, p.extra...) {
		info, err := os.Stat(filepath.Join(source, name))
		if err != nil {
			return "", err
		}
		if !info.IsDir() {
			files = append(files, name)
			continue
		}
		entries, err := os.ReadDir(filepath.Join(source, name))
		if err != nil {
			return "", err
		}
		for _, e := range entries {
			if f := e.Name(); strings.HasSuffix(f, ".go") && !strings.HasSuffix(f, "_test.go") || f == module ||
				f == strings.TrimSuffix(module, ".mod")+".sum" {
				files = append(files, filepath.Join(name, f))
			}
		}
	}
	flags, err := p.flags(source)
	if err != nil {
		return "", err
	}
	h := sha256.New()
	fmt.Fprintln(h, runtime.Version(), runtime.GOARCH, flags, p.image)
	for _, file := range files {
		content, err := os.ReadFile(filepath.Join(source, file))
		if err != nil {
			return "", err
		}
		fmt.Fprintln(h, file, len(content))
		h.Write(content)
	}
	return fmt.Sprintf("%x", h.Sum(nil))[:12], nil
}

// cacheDir returns the directory of built programs.
func cacheDir(configured string) (string, error) {
	for _, dir := range []string{configured, os.Getenv("KUBEVPN_CACHE"), os.Getenv("XDG_CACHE_HOME")} {
		if dir != "" {
			return filepath.Join(dir, "kubevpn-lab"), nil
		}
	}
	home, err := os.UserHomeDir()
	if err != nil {
		return "", fmt.Errorf("finding a cache directory (set KUBEVPN_CACHE): %w", err)
	}
	return filepath.Join(home, ".cache", "kubevpn-lab"), nil
}

// findSource returns the repository above the working directory or above this program.
func findSource(configured string) (string, error) {
	var starts []string
	if configured != "" {
		starts = []string{configured}
	} else {
		if dir, err := os.Getwd(); err == nil {
			starts = append(starts, dir)
		}
		if program, err := os.Executable(); err == nil {
			starts = append(starts, filepath.Dir(program))
		}
	}
	for _, start := range starts {
		for dir := start; ; dir = filepath.Dir(dir) {
			b, err := os.ReadFile(filepath.Join(dir, "go.mod"))
			if err == nil && bytes.HasPrefix(b, []byte("module kubevpn\n")) {
				return dir, nil
			}
			if dir == filepath.Dir(dir) {
				break
			}
		}
	}
	return "", errors.New("the repository is neither above the working directory nor above this program: run it from " +
		"the repository")
}
