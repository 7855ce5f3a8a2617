package image

import (
	"bytes"
	"context"
	"debug/elf"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"path"
	"slices"
	"strings"
)

// Tree contains dynamic programs of Debian and their dependencies.
type Tree struct {
	Architecture string
	Packages     []Package // the packages that the files come from
	entries      []entry
}

// The programs that `traffic gateway` runs. Their names select what they do.
var (
	iptablesPrograms   = []string{"iptables-nft", "ip6tables-nft", "iptables-legacy", "ip6tables-legacy"}
	iptablesExtensions = []string{"MASQUERADE", "TCPMSS", "comment", "conntrack", "standard", "tcp"}
)

// iptablesPackages are the packages of iptables and its libraries. Scanners recognize Debian by files of base-files.
var iptablesPackages = []string{"base-files", "iptables", "libc6", "libip4tc2", "libip6tc2", "libmnl0", "libnftnl11",
	"libxtables12"}

// libraries are the folders of shared objects.
var libraries = map[string]string{"amd64": "/usr/lib/x86_64-linux-gnu", "arm64": "/usr/lib/aarch64-linux-gnu"}

// IPTables gathers iptables for an architecture, with both of its backends, from Debian's packages:
// /usr/sbin/iptables-nft, iptables-legacy and the same for IPv6, with the extensions for masquerading, its exceptions
// and MSS clamping, and with their libraries. Scanners find the packages in /var/lib/dpkg/status.d. A package that the
// user's cache folder does not have is fetched from Debian.
func IPTables(ctx context.Context, arch string) (Tree, error) {
	lock, err := ReadLock()
	if err != nil {
		return Tree{}, err
	}
	cache, err := cacheDir()
	if err != nil {
		return Tree{}, err
	}
	p := picker{arch: arch, root: map[string]entry{}, picked: map[string]entry{}}
	packages := lock.of(arch)
	for _, pkg := range packages {
		content, err := pkg.fetch(ctx, cache)
		if err != nil {
			return Tree{}, err
		}
		unpacked, err := unpack(content)
		if err != nil {
			return Tree{}, fmt.Errorf("unpacking %s: %w", pkg.Name, err)
		}
		if err := p.install(pkg, unpacked); err != nil {
			return Tree{}, err
		}
	}
	if err := p.iptables(); err != nil {
		return Tree{}, fmt.Errorf("picking iptables for %s from Debian's packages: %w", arch, err)
	}
	return Tree{Architecture: arch, Packages: packages, entries: slices.Collect(maps.Values(p.picked))}, nil
}

// picker picks files from unpacked packages.
type picker struct {
	arch   string
	root   map[string]entry // all packages, by absolute path
	picked map[string]entry
}

// install unpacks a package into root, and picks its metadata.
func (p picker) install(pkg Package, d deb) error {
	for name, e := range d.files {
		if _, ok := p.root[name]; ok {
			return fmt.Errorf("%s: %s is in another package too", pkg.Name, name)
		}
		p.root[name] = e
	}
	if name, arch := d.field("Package"), d.field("Architecture"); name != pkg.Name || arch != p.arch {
		return fmt.Errorf("%s is the package %s for %s, not %s for %s", pkg.URL, name, arch, pkg.Name, p.arch)
	}
	status := "/var/lib/dpkg/status.d/" + pkg.Name
	p.picked[status] = entry{path: status, mode: 0o644, content: d.control}
	return p.add("/usr/share/doc/" + pkg.Name + "/copyright")
}

func (p picker) iptables() error {
	wanted := []string{"/etc/os-release", "/etc/debian_version"}
	for _, name := range iptablesPrograms {
		wanted = append(wanted, "/usr/sbin/"+name)
	}
	for _, extension := range iptablesExtensions {
		found := false
		for _, prefix := range []string{"libxt_", "libipt_", "libip6t_"} { // for both families, or for one
			file := libraries[p.arch] + "/xtables/" + prefix + extension + ".so"
			if _, ok := p.root[file]; ok {
				wanted = append(wanted, file)
				found = true
			}
		}
		if !found {
			return fmt.Errorf("extension %s: %w", extension, fs.ErrNotExist)
		}
	}
	for _, name := range wanted {
		if err := p.add(name); err != nil {
			return err
		}
	}
	return nil
}

// add picks a file, the links that lead to it, the libraries that it needs, and so on.
func (p picker) add(name string) error {
	if _, ok := p.picked[name]; ok {
		return nil
	}
	for _, at := range append(parents(name), name[1:]) { // where /lib is a link to /usr/lib
		link, ok := p.root["/"+at]
		if !ok || link.target == "" {
			continue
		}
		p.picked[link.path] = link
		target := link.target
		if !path.IsAbs(target) {
			target = path.Join(path.Dir(link.path), target)
		}
		return p.add(path.Join(target, strings.TrimPrefix(name, link.path)))
	}
	file, ok := p.root[name]
	if !ok {
		return fmt.Errorf("%s: %w", name, fs.ErrNotExist)
	}
	p.picked[name] = file
	if !bytes.HasPrefix(file.content, []byte(elf.ELFMAG)) {
		return nil
	}
	needed, err := p.neededBy(file.content)
	if err != nil {
		return fmt.Errorf("%s: %w", name, err)
	}
	for _, library := range needed {
		if err := p.add(library); err != nil {
			return fmt.Errorf("%s needs a library: %w", name, err)
		}
	}
	return nil
}

// neededBy returns the paths of the interpreter and the libraries of a program or a library. The dynamic linker looks
// for libraries in the same folder, because the image does not have its cache.
func (p picker) neededBy(content []byte) ([]string, error) {
	f, err := elf.NewFile(bytes.NewReader(content))
	if err != nil {
		return nil, err
	}
	if machines[f.Machine] != p.arch {
		return nil, fmt.Errorf("it is for %v, not %s", f.Machine, p.arch)
	}
	var needed []string
	for _, prog := range f.Progs {
		if prog.Type != elf.PT_INTERP {
			continue
		}
		text := make([]byte, prog.Filesz)
		if _, err := prog.ReadAt(text, 0); err != nil {
			return nil, fmt.Errorf("reading the name of its interpreter: %w", err)
		}
		needed = append(needed, strings.TrimRight(string(text), "\x00"))
	}
	imported, err := f.ImportedLibraries()
	if err != nil && !errors.Is(err, elf.ErrNoSymbols) {
		return nil, fmt.Errorf("reading what it needs: %w", err)
	}
	for _, library := range imported {
		needed = append(needed, libraries[p.arch]+"/"+library)
	}
	return needed, nil
}
