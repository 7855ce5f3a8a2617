// Package image makes container images from static binaries, and writes or pushes them, without Docker. The product's
// image (/traffic, and iptables for its gateway) and the lab's images (pause, echo, coredns) come from here.
//
// An image made twice from the same files is the same image, byte for byte: times are zero, entries are sorted, and
// nothing of the machine goes in.
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

// Build makes a one-layer Linux image. The files are read now and again whenever the image is written or pushed, so
// they must stay as they are until then. A binary among Files that is not static is refused: only a Tree brings a C
// library.
func Build(o Options) (v1.Image, error) {
	if len(o.Files) == 0 {
		return nil, errors.New("an image needs at least one file")
	}
	entries, err := o.entries()
	if err != nil {
		return nil, err
	}
	arch, err := architecture(o.Files, o.Tree.Files)
	if err != nil {
		return nil, err
	}
	entrypoint := o.Entrypoint
	if len(entrypoint) == 0 {
		entrypoint = []string{o.Files[0].Path}
	}
	layer, err := tarball.LayerFromOpener(func() (io.ReadCloser, error) { return layerTar(entries) })
	if err != nil {
		return nil, fmt.Errorf("building the image's layer: %w", err)
	}
	img, err := mutate.Append(empty.Image, mutate.Addendum{
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
		Entrypoint: entrypoint,
		User:       o.User,
		Labels:     o.Labels,
		Env:        []string{"PATH=/"},
	}
	return mutate.ConfigFile(img, config)
}

// entry is a file of the layer, or a link.
type entry struct {
	path   string
	source string // of a file
	target string // of a link
}

// entries returns the sorted content of the layer.
func (o Options) entries() ([]entry, error) {
	var all []entry
	for _, f := range slices.Concat(o.Files, o.Tree.Files) {
		all = append(all, entry{path: f.Path, source: f.Source})
	}
	for _, l := range o.Tree.Links {
		all = append(all, entry{path: l.Path, target: l.Target})
	}
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

// architecture returns the common architecture of all files, as Go and OCI name it.
func architecture(static, dynamic []File) (string, error) {
	found := ""
	for i, f := range slices.Concat(static, dynamic) {
		arch, err := fileArchitecture(f.Source, i < len(static))
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

func fileArchitecture(name string, static bool) (string, error) {
	f, err := elf.Open(name)
	if err != nil {
		return "", fmt.Errorf("not a Linux binary: %w", err)
	}
	defer f.Close()
	if static && slices.ContainsFunc(f.Progs, func(p *elf.Prog) bool { return p.Type == elf.PT_INTERP }) {
		return "", errors.New("not a static binary; build it with CGO_ENABLED=0")
	}
	switch f.Machine {
	case elf.EM_X86_64:
		return "amd64", nil
	case elf.EM_AARCH64:
		return "arm64", nil
	default:
		return "", fmt.Errorf("unsupported machine %v", f.Machine)
	}
}

// layerTar is the layer, uncompressed: the entries (sorted) and their parent directories, owned by root, of time zero.
func layerTar(entries []entry) (io.ReadCloser, error) {
	var parts []io.Reader
	var opened multiCloser
	seen := map[string]bool{}
	for _, e := range entries {
		var header bytes.Buffer
		w := tar.NewWriter(&header)
		for _, dir := range parents(e.path) {
			if seen[dir] {
				continue
			}
			seen[dir] = true
			if err := w.WriteHeader(&tar.Header{Typeflag: tar.TypeDir, Name: dir + "/", Mode: 0o755,
				Format: tar.FormatUSTAR}); err != nil {
				return nil, errors.Join(err, opened.Close())
			}
		}
		name := strings.TrimPrefix(e.path, "/")
		if e.target != "" {
			if err := w.WriteHeader(&tar.Header{Typeflag: tar.TypeSymlink, Name: name, Linkname: e.target, Mode: 0o777,
				Format: tar.FormatUSTAR}); err != nil {
				return nil, errors.Join(err, opened.Close())
			}
			parts = append(parts, &header)
			continue
		}
		source, err := os.Open(e.source)
		if err != nil {
			return nil, errors.Join(err, opened.Close())
		}
		opened = append(opened, source)
		info, err := source.Stat()
		if err != nil {
			return nil, errors.Join(err, opened.Close())
		}
		err = w.WriteHeader(&tar.Header{Typeflag: tar.TypeReg, Name: name, Mode: 0o755, Size: info.Size(),
			Format: tar.FormatUSTAR})
		if err != nil {
			return nil, errors.Join(err, opened.Close())
		}
		padding := (512 - info.Size()%512) % 512
		parts = append(parts, &header, exactly(source, info.Size()), bytes.NewReader(make([]byte, padding)))
	}
	parts = append(parts, bytes.NewReader(make([]byte, 1024))) // the archive's end
	return struct {
		io.Reader
		io.Closer
	}{io.MultiReader(parts...), opened}, nil
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

// exactly reads n bytes and fails if there are fewer, so that a shrinking file does not produce a broken archive.
func exactly(r io.Reader, n int64) io.Reader { return &exactReader{r, n} }

type exactReader struct {
	r    io.Reader
	left int64
}

func (e *exactReader) Read(p []byte) (int, error) {
	if e.left == 0 {
		return 0, io.EOF
	}
	if int64(len(p)) > e.left {
		p = p[:e.left]
	}
	n, err := e.r.Read(p)
	e.left -= int64(n)
	if err == io.EOF && e.left > 0 {
		return n, io.ErrUnexpectedEOF
	}
	return n, err
}

type multiCloser []io.Closer

func (m multiCloser) Close() error {
	var errs []error
	for _, c := range m {
		errs = append(errs, c.Close())
	}
	return errors.Join(errs...)
}
