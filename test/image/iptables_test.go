package image

import (
	"archive/tar"
	"errors"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"kubevpn/internal/testenv"
)

// TestIPTables runs the programs in a root directory that contains only the gathered files.
func TestIPTables(t *testing.T) {
	testenv.NeedRoot(t)
	testenv.NeedPrograms(t, "iptables-nft", "iptables-legacy", "unshare", "chroot")
	tree, err := IPTables()
	if err != nil {
		t.Fatal(err)
	}
	native, err := read(tree.Files[0].Source)
	if err != nil {
		t.Fatal(err)
	}
	o := Options{Files: []File{{binary(t, native.machine, false), "/traffic"}}, Tree: tree}
	img, err := Build(o)
	if err != nil {
		t.Fatal(err)
	}
	again, err := IPTables()
	if err != nil {
		t.Fatal(err)
	}
	o.Tree = again
	img2, err := Build(o)
	if err != nil {
		t.Fatal(err)
	}
	if a, err := img.Digest(); err != nil {
		t.Error(err)
	} else if b, err := img2.Digest(); a != b || err != nil {
		t.Errorf("gathered twice, it is another image: %v, %v, %v", a, b, err)
	}
	reader := firstLayer(t, img)
	dir := t.TempDir()
	extract(t, reader, dir)

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

func TestIPTablesMissing(t *testing.T) {
	_, err := gatherer{root: t.TempDir()}.iptables()
	if !errors.Is(err, fs.ErrNotExist) || !strings.Contains(err.Error(), "Debian's package iptables") {
		t.Errorf("%v", err)
	}
}

// TestIPTablesIncomplete checks that missing extensions or libraries are an error.
func TestIPTablesIncomplete(t *testing.T) {
	testenv.NeedRoot(t)
	testenv.NeedPrograms(t, "iptables-nft", "iptables-legacy")
	whole, err := IPTables()
	if err != nil {
		t.Fatal(err)
	}
	for _, tt := range []struct{ name, without, want string }{
		{"no_extension", "libxt_TCPMSS", "extension TCPMSS"},
		{"no_library", "libxtables.so", "needs a library: libxtables.so"},
		{"no_program", "xtables-legacy-multi", "package iptables"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			dir := t.TempDir()
			put := func(path string, how func(name string) error) {
				if strings.Contains(path, tt.without) {
					return
				}
				name := filepath.Join(dir, path)
				err := os.MkdirAll(filepath.Dir(name), 0o755)
				if err == nil {
					err = how(name)
				}
				if err != nil {
					t.Fatal(err)
				}
			}
			for _, f := range whole.Files {
				put(f.Path, func(name string) error { return os.Symlink(f.Source, name) })
			}
			for _, l := range whole.Links {
				put(l.Path, func(name string) error { return os.Symlink(l.Target, name) })
			}
			if _, err := (gatherer{root: dir}).iptables(); err == nil || !strings.Contains(err.Error(), tt.want) {
				t.Errorf("%v, want %q", err, tt.want)
			}
		})
	}
}
