package image

import (
	"bufio"
	"bytes"
	"context"
	"crypto/sha1"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"net/textproto"
	"slices"

	debversion "github.com/knqyf263/go-deb-version"
	"github.com/ulikunitz/xz"
)

// The sources of a new lock.
const (
	debianRelease  = "13"
	debianCodename = "trixie"
	debianMirror   = "https://deb.debian.org/"
)

// archive is a part of Debian with a separate index.
type archive struct{ root, suite string }

var archives = []archive{
	{"debian/", debianCodename},
	{"debian/", debianCodename + "-updates"},
	{"debian-security/", debianCodename + "-security"},
}

// NewLock returns a lock of the current versions of iptables' packages, from Debian's indexes, and fetches the packages
// into the user's cache folder. It trusts the mirror by its TLS certificate.
func NewLock(ctx context.Context) (Lock, error) {
	cache, err := cacheDir()
	if err != nil {
		return Lock{}, err
	}
	lock := Lock{Release: debianRelease}
	for _, arch := range slices.Sorted(maps.Keys(libraries)) {
		newest := map[string]Package{}
		for _, a := range archives {
			index, err := get(ctx, debianMirror+a.root+"dists/"+a.suite+"/main/binary-"+arch+"/Packages.xz")
			if err != nil {
				return Lock{}, err
			}
			if err := readIndex(index, debianMirror+a.root, newest); err != nil {
				return Lock{}, fmt.Errorf("reading the index of %s for %s: %w", a.suite, arch, err)
			}
		}
		for _, name := range iptablesPackages {
			p, ok := newest[name]
			if !ok {
				return Lock{}, fmt.Errorf("%s has no package %s for %s", debianCodename, name, arch)
			}
			content, err := p.fetch(ctx, cache)
			if err != nil {
				return Lock{}, err
			}
			p.SHA1 = fmt.Sprintf("%x", sha1.Sum(content))
			lock.Packages = append(lock.Packages, p)
		}
	}
	return lock, nil
}

// readIndex adds iptables' packages of an index to newest, unless newest has a later version.
func readIndex(index []byte, root string, newest map[string]Package) error {
	plain, err := xz.NewReader(bytes.NewReader(index))
	if err != nil {
		return err
	}
	r := textproto.NewReader(bufio.NewReader(plain))
	for err == nil {
		var fields textproto.MIMEHeader
		if fields, err = r.ReadMIMEHeader(); err != nil && !errors.Is(err, io.EOF) {
			return err
		}
		p := Package{
			Name: fields.Get("Package"), Version: fields.Get("Version"), Architecture: fields.Get("Architecture"),
			URL: root + fields.Get("Filename"), SHA256: fields.Get("Sha256"),
		}
		if !slices.Contains(iptablesPackages, p.Name) {
			continue
		}
		later, err := laterThan(p.Version, newest[p.Name].Version)
		if err != nil {
			return fmt.Errorf("%s: %w", p.Name, err)
		}
		if later {
			newest[p.Name] = p
		}
	}
	return nil
}

// laterThan compares versions by Debian's rules. Every version is later than none.
func laterThan(version, other string) (bool, error) {
	v, err := debversion.NewVersion(version)
	if err != nil || other == "" {
		return err == nil, err
	}
	o, err := debversion.NewVersion(other)
	return err == nil && v.GreaterThan(o), err
}

// Write writes the lock to a file.
func (l Lock) Write(file string) error {
	return writeWhole(file, func(w io.Writer) error {
		e := json.NewEncoder(w)
		e.SetIndent("", "  ")
		e.SetEscapeHTML(false)
		return e.Encode(l)
	})
}
