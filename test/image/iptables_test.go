package image

import (
	"archive/tar"
	"bufio"
	"bytes"
	"debug/elf"
	"errors"
	"io"
	"io/fs"
	"net/textproto"
	"os"
	"os/exec"
	"path"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"testing"

	"kubevpn/internal/testenv"
)

// machineOf is the inverse of machines.
var machineOf = map[string]elf.Machine{"amd64": elf.EM_X86_64, "arm64": elf.EM_AARCH64}

// unpackImage builds an image with iptables and returns the directory that contains its files.
func unpackImage(t *testing.T, arch string) string {
	t.Helper()
	tree, err := IPTables(t.Context(), arch)
	if err != nil {
		t.Fatal(err)
	}
	img, err := Build(Options{Files: []File{{binary(t, machineOf[arch], false), "/traffic"}}, Tree: tree})
	if err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	extract(t, firstLayer(t, img), dir)
	return dir
}

// TestIPTablesRuns runs the programs in a root directory that contains only the image's files.
func TestIPTablesRuns(t *testing.T) {
	testenv.NeedRoot(t)
	testenv.NeedPrograms(t, "unshare", "chroot")
	dir := unpackImage(t, runtime.GOARCH)
	for _, backend := range []string{"nft", "legacy"} {
		for _, family := range []struct{ program, network string }{{"iptables-", "192.0.2.0/24"}, {"ip6tables-", "2001:db8::/32"}} {
			program := "/usr/sbin/" + family.program + backend
			t.Run(family.program+backend, func(t *testing.T) {
				run := func(commands ...string) (string, error) {
					for i, c := range commands {
						commands[i] = "chroot " + dir + " " + program + " -w " + c
					}
					cmd := exec.Command("unshare", "--net", "sh", "-ec", strings.Join(commands, "\n"))
					cmd.Env = append(os.Environ(), "XTABLES_LOCKFILE=/lock")
					out, err := cmd.CombinedOutput()
					return string(out), err
				}
				out, err := run(
					"-t nat -A POSTROUTING -s "+family.network+" ! -o eth0 -m comment --comment why -j MASQUERADE",
					"-t mangle -A FORWARD -i eth0 -p tcp -m tcp --tcp-flags SYN,RST SYN -j TCPMSS --clamp-mss-to-pmtu",
					"-t mangle -A FORWARD -o eth0 -m conntrack --ctstate RELATED,ESTABLISHED -j RETURN",
					"-t nat -S", "-t mangle -S")
				if err != nil || !strings.Contains(out, "-s "+family.network+" ! -o eth0 -m comment --comment why -j MASQUERADE") ||
					!strings.Contains(out, "-o eth0 -m conntrack --ctstate RELATED,ESTABLISHED -j RETURN") ||
					!strings.Contains(out, "--tcp-flags SYN,RST SYN -j TCPMSS --clamp-mss-to-pmtu") {
					t.Errorf("%v\n%s", err, out)
				}
			})
		}
	}
}

// TestImageContainsWhatItsProgramsNeed checks all programs and libraries of both architectures, of which this machine
// can run only one.
func TestImageContainsWhatItsProgramsNeed(t *testing.T) {
	for arch, libraries := range map[string]string{
		"amd64": "usr/lib/x86_64-linux-gnu", "arm64": "usr/lib/aarch64-linux-gnu",
	} {
		t.Run(arch, func(t *testing.T) {
			dir := unpackImage(t, arch)
			programs := 0
			err := filepath.WalkDir(dir, func(name string, d fs.DirEntry, err error) error {
				if err != nil || d.IsDir() {
					return err
				}
				if target, err := os.Readlink(name); err == nil {
					if _, err := os.Stat(name); err != nil {
						t.Errorf("%s leads to %s: %v", name, target, err)
					}
					return nil
				}
				f, err := elf.Open(name)
				if err != nil {
					return nil // not a program: the packages' metadata and licenses
				}
				defer f.Close()
				programs++
				if f.Machine != machineOf[arch] {
					t.Errorf("%s is for %v", name, f.Machine)
				}
				needed, err := f.ImportedLibraries()
				if err != nil {
					t.Errorf("%s: %v", name, err)
				}
				for _, library := range needed {
					if _, err := os.Stat(filepath.Join(dir, libraries, library)); err != nil {
						t.Errorf("%s needs %s: %v", name, library, err)
					}
				}
				for _, p := range f.Progs {
					if p.Type != elf.PT_INTERP {
						continue
					}
					interpreter, err := io.ReadAll(p.Open())
					if err != nil {
						t.Fatal(err)
					}
					if _, err := os.Stat(filepath.Join(dir, strings.TrimRight(string(interpreter), "\x00"))); err != nil {
						t.Errorf("%s: %v", name, err)
					}
				}
				return nil
			})
			if err != nil {
				t.Fatal(err)
			}
			if programs < 15 { // iptables' two, six extensions and their libraries
				t.Errorf("found only %d programs and libraries", programs)
			}
			for _, name := range []string{"iptables-nft", "ip6tables-nft", "iptables-legacy", "ip6tables-legacy"} {
				if _, err := os.Stat(filepath.Join(dir, "usr/sbin", name)); err != nil {
					t.Error(err)
				}
			}
		})
	}
}

func TestScannersSeeDebianPackages(t *testing.T) {
	dir := unpackImage(t, "arm64")
	release, err := os.ReadFile(filepath.Join(dir, "etc/os-release"))
	if err != nil || !strings.Contains(string(release), "\nID=debian\n") || !strings.Contains(string(release), `VERSION_ID="13"`) {
		t.Errorf("/etc/os-release: %v\n%s", err, release)
	}
	lock, err := ReadLock()
	if err != nil {
		t.Fatal(err)
	}
	packages := lock.of("arm64")
	if len(packages) != len(iptablesPackages) {
		t.Errorf("the lock has %d packages, want %d; run `make image-lock`", len(packages), len(iptablesPackages))
	}
	for _, p := range packages {
		status, err := os.ReadFile(filepath.Join(dir, "var/lib/dpkg/status.d", p.Name))
		if err != nil {
			t.Error(err)
			continue
		}
		fields, err := textproto.NewReader(bufio.NewReader(bytes.NewReader(status))).ReadMIMEHeader()
		if err != nil && !errors.Is(err, io.EOF) {
			t.Errorf("%s: %v", p.Name, err)
		}
		if fields.Get("Package") != p.Name || fields.Get("Version") != p.Version || fields.Get("Architecture") != "arm64" {
			t.Errorf("%s %s has the metadata %v", p.Name, p.Version, fields)
		}
		if _, err := os.Stat(filepath.Join(dir, "usr/share/doc", p.Name, "copyright")); err != nil {
			t.Error(err)
		}
	}
}

func extract(t *testing.T, r io.Reader, dir string) {
	t.Helper()
	for archive := tar.NewReader(r); ; {
		h, err := archive.Next()
		if errors.Is(err, io.EOF) {
			return
		}
		if err != nil {
			t.Fatal(err)
		}
		name := filepath.Join(dir, h.Name)
		switch h.Typeflag {
		case tar.TypeDir:
			err = os.Mkdir(name, 0o755)
		case tar.TypeSymlink:
			err = os.Symlink(h.Linkname, name)
		default:
			var content []byte
			if content, err = io.ReadAll(archive); err == nil {
				err = os.WriteFile(name, content, h.FileInfo().Mode())
			}
		}
		if err != nil {
			t.Fatal(err)
		}
	}
}

// TestIPTablesRejectsIncompletePackages checks that missing programs, extensions and libraries are an error.
func TestIPTablesRejectsIncompletePackages(t *testing.T) {
	whole, err := IPTables(t.Context(), "arm64")
	if err != nil {
		t.Fatal(err)
	}
	for _, tt := range []struct{ name, without, want string }{
		{"no_extension", "libxt_TCPMSS", "extension TCPMSS"},
		{"no_library", "libxtables.so", "needs a library: /usr/lib/aarch64-linux-gnu/libxtables.so.12"},
		{"no_interpreter", "ld-linux", "/lib/ld-linux-aarch64.so.1"},
		{"no_program", "xtables-legacy-multi", "/usr/sbin/xtables-legacy-multi"},
		{"other_machine", "", "not amd64"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			p := picker{arch: "arm64", root: map[string]entry{}, picked: map[string]entry{}}
			for _, e := range whole.entries {
				if tt.without == "" || !strings.Contains(path.Base(e.path), tt.without) {
					p.root[e.path] = e
				}
			}
			if tt.name == "other_machine" {
				p.arch = "amd64"
				if err := p.add("/usr/sbin/iptables-nft"); err == nil || !strings.Contains(err.Error(), tt.want) {
					t.Errorf("%v, want %q", err, tt.want)
				}
				return
			}
			err := p.iptables()
			if err == nil || !strings.Contains(err.Error(), tt.want) || !errors.Is(err, fs.ErrNotExist) {
				t.Errorf("%v, want %q", err, tt.want)
			}
		})
	}
}

func TestBuildRejectsPackagesOfAnotherArchitecture(t *testing.T) {
	tree, err := IPTables(t.Context(), "arm64")
	if err != nil {
		t.Fatal(err)
	}
	_, err = Build(Options{Files: []File{{binary(t, elf.EM_X86_64, false), "/traffic"}}, Tree: tree})
	if err == nil || !strings.Contains(err.Error(), "the packages for arm64") {
		t.Error(err)
	}
	if !slices.ContainsFunc(tree.Packages, func(p Package) bool { return p.Name == "libc6" }) {
		t.Errorf("packages: %v", tree.Packages)
	}
}
