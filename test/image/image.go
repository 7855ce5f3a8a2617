// Package image makes container images without Docker, and writes or pushes them. It makes the product's image
// (/traffic, and iptables for its gateway) and the lab's images (pause, echo, coredns).
//
// An image contains static binaries, which the caller built, and files of Debian's packages, pinned in
// debian.lock.json. It contains nothing of the machine that makes it: the same binaries give the same image, byte for
// byte.
package image

import (
	"archive/tar"
	"bytes"
	"cmp"
	"debug/elf"
	"errors"
	"fmt"
	"io"
	"os"
	"path"
	"slices"
	"strings"
	"time"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/empty"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/google/go-containerregistry/pkg/v1/tarball"
	"github.com/google/go-containerregistry/pkg/v1/types"
)

// File is a file of the image.
type File struct {
	Source string // its path on this machine
	Path   string // its absolute path in the image
}

// Options configures an image.
type Options struct {
	Files      []File            // static ELF binaries, at least one, all of one architecture
	Tree       Tree              // dynamic programs and their dependencies, such as IPTables
	Entrypoint []string          // default: the first file's Path
	User       string            // "65532" or "65532:65532"; empty means root
	Labels     map[string]string // such as org.opencontainers.image.version
}

// Build makes a one-layer Linux image. It reads the files into memory. It rejects a binary among Files that is not
// static: only a Tree brings a C library.
func Build(o Options) (v1.Image, error) {
	if len(o.Files) == 0 {
		return nil, errors.New("an image needs at least one file")
	}
	entries, err := o.entries()
	if err != nil {
		return nil, err
	}
	arch, err := commonArchitecture(o.Files)
	if err != nil {
		return nil, err
	}
	if o.Tree.Architecture != "" && o.Tree.Architecture != arch {
		return nil, fmt.Errorf("%s is built for %s, the packages for %s", o.Files[0].Source, arch, o.Tree.Architecture)
	}
	layer, err := newLayer(entries)
	if err != nil {
		return nil, fmt.Errorf("building the image's layer: %w", err)
	}
	base := mutate.ConfigMediaType(mutate.MediaType(empty.Image, types.OCIManifestSchema1), types.OCIConfigJSON)
	img, err := mutate.Append(base, mutate.Addendum{
		Layer:   layer,
		History: v1.History{CreatedBy: "kubevpn image build", Created: v1.Time{Time: time.Unix(0, 0).UTC()}},
	})
	if err != nil {
		return nil, fmt.Errorf("adding the image's layer: %w", err)
	}
	config, err := img.ConfigFile()
	if err != nil {
		return nil, fmt.Errorf("reading the image's configuration: %w", err)
	}
	config = config.DeepCopy()
	config.OS, config.Architecture = "linux", arch
	config.Created = v1.Time{Time: time.Unix(0, 0).UTC()}
	config.Config = v1.Config{
		Entrypoint: o.Entrypoint,
		User:       o.User,
		Labels:     o.Labels,
		Env:        []string{"PATH=/"},
	}
	if len(o.Entrypoint) == 0 {
		config.Config.Entrypoint = []string{o.Files[0].Path}
	}
	return mutate.ConfigFile(img, config)
}

// Index makes one image of several images, each for a different architecture.
func Index(images []v1.Image) (v1.ImageIndex, error) {
	index := mutate.IndexMediaType(empty.Index, types.OCIImageIndex)
	seen := map[string]bool{}
	for _, img := range images {
		config, err := img.ConfigFile()
		if err != nil {
			return nil, fmt.Errorf("reading the image's configuration: %w", err)
		}
		if seen[config.Architecture] {
			return nil, fmt.Errorf("two images for %s", config.Architecture)
		}
		seen[config.Architecture] = true
		index = mutate.AppendManifests(index, mutate.IndexAddendum{Add: img, Descriptor: v1.Descriptor{
			Platform: &v1.Platform{OS: config.OS, Architecture: config.Architecture},
		}})
	}
	return index, nil
}

// entry is a file of the layer, or a link.
type entry struct {
	path    string // absolute
	mode    int64
	content []byte // of a file
	target  string // of a link
}

// entries returns the sorted content of the layer.
func (o Options) entries() ([]entry, error) {
	var all []entry
	for _, f := range o.Files {
		content, err := os.ReadFile(f.Source)
		if err != nil {
			return nil, err
		}
		all = append(all, entry{path: f.Path, mode: 0o755, content: content})
	}
	all = append(all, o.Tree.entries...)
	for i, e := range all {
		if !path.IsAbs(e.path) || path.Clean(e.path) != e.path || e.path == "/" {
			return nil, fmt.Errorf("%q is not a clean absolute path in the image", e.path)
		}
		if slices.ContainsFunc(all[:i], func(g entry) bool { return g.path == e.path }) {
			return nil, fmt.Errorf("%s is given twice", e.path)
		}
	}
	slices.SortFunc(all, func(a, b entry) int { return cmp.Compare(a.path, b.path) })
	return all, nil
}

// commonArchitecture returns the architecture of all static binaries, as Go and OCI name it.
func commonArchitecture(files []File) (string, error) {
	found := ""
	for _, f := range files {
		arch, err := Architecture(f.Source)
		if err != nil {
			return "", fmt.Errorf("%s: %w", f.Source, err)
		}
		if found != "" && found != arch {
			return "", fmt.Errorf("%s is built for %s, the files before it for %s", f.Source, arch, found)
		}
		found = arch
	}
	return found, nil
}

// machines are the supported architectures, by their names in ELF files.
var machines = map[elf.Machine]string{elf.EM_X86_64: "amd64", elf.EM_AARCH64: "arm64"}

// Architecture returns the architecture of a static binary, as Go and OCI name it.
func Architecture(name string) (string, error) {
	f, err := elf.Open(name)
	if err != nil {
		return "", fmt.Errorf("not a Linux binary: %w", err)
	}
	defer f.Close()
	if slices.ContainsFunc(f.Progs, func(p *elf.Prog) bool { return p.Type == elf.PT_INTERP }) {
		return "", errors.New("not a static binary; build it with CGO_ENABLED=0")
	}
	arch, ok := machines[f.Machine]
	if !ok {
		return "", fmt.Errorf("unsupported machine %v", f.Machine)
	}
	return arch, nil
}

// newLayer returns the layer of the entries (sorted) and their parent directories, owned by root, of time zero.
func newLayer(entries []entry) (v1.Layer, error) {
	var archive bytes.Buffer
	w := tar.NewWriter(&archive)
	seen := map[string]bool{}
	for _, e := range entries {
		for _, dir := range parents(e.path) {
			if seen[dir] {
				continue
			}
			seen[dir] = true
			err := w.WriteHeader(&tar.Header{Typeflag: tar.TypeDir, Name: dir + "/", Mode: 0o755,
				Format: tar.FormatUSTAR})
			if err != nil {
				return nil, err
			}
		}
		h := &tar.Header{Typeflag: tar.TypeReg, Name: strings.TrimPrefix(e.path, "/"), Mode: e.mode,
			Size: int64(len(e.content)), Format: tar.FormatUSTAR}
		if e.target != "" {
			h.Typeflag, h.Linkname, h.Mode = tar.TypeSymlink, e.target, 0o777
		}
		if err := w.WriteHeader(h); err != nil {
			return nil, err
		}
		if _, err := w.Write(e.content); err != nil {
			return nil, err
		}
	}
	if err := w.Close(); err != nil {
		return nil, err
	}
	return tarball.LayerFromOpener(func() (io.ReadCloser, error) {
		return io.NopCloser(bytes.NewReader(archive.Bytes())), nil
	}, tarball.WithMediaType(types.OCILayer))
}

// parents returns the directories above an absolute path, outermost first, without the leading slash.
func parents(name string) []string {
	var dirs []string
	for dir := path.Dir(name); dir != "/"; dir = path.Dir(dir) {
		dirs = append(dirs, strings.TrimPrefix(dir, "/"))
	}
	slices.Reverse(dirs)
	return dirs
}
