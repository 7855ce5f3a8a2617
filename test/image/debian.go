package image

import (
	"archive/tar"
	"bytes"
	"context"
	"crypto/sha256"
	_ "embed"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"path"
	"path/filepath"
	"strings"

	"github.com/blakesmith/ar"
	"github.com/ulikunitz/xz"
)

// Lock names Debian's packages whose files go into the image, for all architectures. debian.lock.json contains it;
// `make image-lock` writes that file.
type Lock struct {
	Release  string    `json:"release"` // Debian's major version
	Packages []Package `json:"packages"`
}

// Package is a Debian package of one version and architecture.
type Package struct {
	Name         string `json:"name"`
	Version      string `json:"version"`
	Architecture string `json:"architecture"`
	URL          string `json:"url"`
	SHA256       string `json:"sha256"`
	// SHA1 is the file's name at snapshot.debian.org, which keeps deleted files. It is not used for verification.
	SHA1 string `json:"sha1"`
}

//go:embed debian.lock.json
var lockFile []byte

// snapshot is the URL of all files that Debian has ever published, by their SHA1.
const snapshot = "https://snapshot.debian.org/file/"

// maxPackage limits a package's size, packed and unpacked.
const maxPackage = 64 << 20

// ReadLock returns the lock that this program was built with.
func ReadLock() (Lock, error) {
	var l Lock
	if err := json.Unmarshal(lockFile, &l); err != nil {
		return Lock{}, fmt.Errorf("reading debian.lock.json: %w", err)
	}
	return l, nil
}

// of returns the packages of an architecture.
func (l Lock) of(arch string) []Package {
	var found []Package
	for _, p := range l.Packages {
		if p.Architecture == arch {
			found = append(found, p)
		}
	}
	return found
}

// cacheDir returns the folder that keeps packages, each under its checksum.
func cacheDir() (string, error) {
	dir, err := os.UserCacheDir()
	if err != nil {
		return "", fmt.Errorf("finding the cache folder for Debian's packages: %w", err)
	}
	return filepath.Join(dir, "kubevpn", "debian"), nil
}

// fetch returns the package's file: from the cache folder, or from Debian into it.
func (p Package) fetch(ctx context.Context, cache string) ([]byte, error) {
	file := filepath.Join(cache, p.SHA256+".deb")
	if content, err := os.ReadFile(file); err == nil && checksum(content) == p.SHA256 {
		return content, nil
	}
	var errs []error
	sources := []string{p.URL}
	if p.SHA1 != "" {
		sources = append(sources, snapshot+p.SHA1)
	}
	for _, url := range sources {
		content, err := get(ctx, url)
		if err == nil && checksum(content) != p.SHA256 {
			err = fmt.Errorf("%s has the SHA-256 checksum %s, the lock file has %s", url, checksum(content), p.SHA256)
		}
		if err == nil {
			return content, WriteFile(file, content)
		}
		errs = append(errs, err)
	}
	return nil, fmt.Errorf("fetching Debian's package %s %s for %s: %w; `make image-lock` locks the current version",
		p.Name, p.Version, p.Architecture, errors.Join(errs...))
}

func checksum(content []byte) string { return fmt.Sprintf("%x", sha256.Sum256(content)) }

// get fetches a file of at most maxPackage bytes.
func get(ctx context.Context, url string) ([]byte, error) {
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
	if err != nil {
		return nil, err
	}
	response, err := http.DefaultClient.Do(request)
	if err != nil {
		return nil, err
	}
	defer response.Body.Close()
	if response.StatusCode != http.StatusOK {
		return nil, fmt.Errorf("%s: %s", url, response.Status)
	}
	content, err := readAll(response.Body)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", url, err)
	}
	return content, nil
}

// readAll reads at most maxPackage bytes, and fails if there are more.
func readAll(r io.Reader) ([]byte, error) {
	content, err := io.ReadAll(io.LimitReader(r, maxPackage+1))
	if err == nil && len(content) > maxPackage {
		err = fmt.Errorf("larger than %d bytes", maxPackage)
	}
	return content, err
}

// deb is an unpacked package.
type deb struct {
	control []byte           // its metadata, as dpkg stores it
	files   map[string]entry // files and links, by absolute path
}

// unpack reads a .deb: an ar archive of two tar archives, control.tar.xz and data.tar.xz.
func unpack(content []byte) (deb, error) {
	var d deb
	for archive := ar.NewReader(bytes.NewReader(content)); ; {
		h, err := archive.Next()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			return deb{}, err
		}
		switch h.Name {
		case "control.tar.xz":
			var control map[string]entry
			control, err = untar(archive)
			d.control = control["/control"].content
		case "data.tar.xz":
			d.files, err = untar(archive)
		}
		if err != nil {
			return deb{}, fmt.Errorf("%s: %w", h.Name, err)
		}
	}
	if d.control == nil || d.files == nil {
		return deb{}, errors.New("no control.tar.xz or no data.tar.xz")
	}
	return d, nil
}

// untar returns the files and links of a compressed tar archive, by absolute path.
func untar(compressed io.Reader) (map[string]entry, error) {
	plain, err := xz.NewReader(compressed)
	if err != nil {
		return nil, err
	}
	content, err := readAll(plain)
	if err != nil {
		return nil, err
	}
	files := map[string]entry{}
	for archive := tar.NewReader(bytes.NewReader(content)); ; {
		h, err := archive.Next()
		if errors.Is(err, io.EOF) {
			return files, nil
		}
		if err != nil {
			return nil, err
		}
		e := entry{path: path.Join("/", h.Name), mode: h.Mode & 0o777}
		switch h.Typeflag {
		case tar.TypeReg:
			if e.content, err = io.ReadAll(archive); err != nil {
				return nil, err
			}
		case tar.TypeSymlink:
			e.target = h.Linkname
		default: // the layer has the directories above its files, and no program needs a hard link
			continue
		}
		files[e.path] = e
	}
}

// field returns a field of the package's metadata, empty if it has none.
func (d deb) field(name string) string {
	for line := range strings.Lines(string(d.control)) {
		if value, ok := strings.CutPrefix(line, name+":"); ok {
			return strings.TrimSpace(value)
		}
	}
	return ""
}
