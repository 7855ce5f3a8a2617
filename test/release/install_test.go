//go:build unix

package release

import (
	"archive/tar"
	"compress/gzip"
	"crypto/sha256"
	"fmt"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"testing"
)

// host is this system, as archives name it.
var host = runtime.GOOS + "_" + runtime.GOARCH

// program is the content of the archive's program.
const program = "#!/bin/sh\necho it runs\n"

// published writes a release of the versions into a directory: archives for this system, and checksums.txt.
func published(t *testing.T, versions ...string) string {
	t.Helper()
	dir := t.TempDir()
	sums := "0000000000000000000000000000000000000000000000000000000000000000  kubevpn_1.2.0_plan9_amd64.tar.gz\n"
	for _, version := range versions {
		name := fmt.Sprintf("kubevpn_%s_%s.tar.gz", version, host)
		content := archive(t)
		sums += fmt.Sprintf("%x  %s\n%x  %s.spdx.json\n", sha256.Sum256(content), name, sha256.Sum256(nil), name)
		write(t, filepath.Join(dir, name), content)
	}
	write(t, filepath.Join(dir, "checksums.txt"), []byte(sums))
	return dir
}

func archive(t *testing.T) []byte {
	t.Helper()
	var b strings.Builder
	plain := gzip.NewWriter(&b)
	files := tar.NewWriter(plain)
	for _, f := range []struct{ name, content string }{
		{"kubevpn", program}, {"man/kubevpn.1.gz", "page"}, {"man/kubevpn-connect.1.gz", "page"},
		{"completions/kubevpn.bash", "bash"}, {"completions/_kubevpn", "zsh"}, {"completions/kubevpn.fish", "fish"},
	} {
		h := &tar.Header{Name: f.name, Mode: 0o755, Size: int64(len(f.content))}
		if err := files.WriteHeader(h); err != nil {
			t.Fatal(err)
		}
		if _, err := files.Write([]byte(f.content)); err != nil {
			t.Fatal(err)
		}
	}
	if err := files.Close(); err != nil {
		t.Fatal(err)
	}
	if err := plain.Close(); err != nil {
		t.Fatal(err)
	}
	return []byte(b.String())
}

func write(t *testing.T, file string, content []byte) {
	t.Helper()
	if err := os.WriteFile(file, content, 0o644); err != nil {
		t.Fatal(err)
	}
}

// install runs install.sh with each shell of this machine that it must work with.
func install(t *testing.T, prefix string, args ...string) (string, error) {
	t.Helper()
	shell := "sh"
	if dash, err := exec.LookPath("dash"); err == nil {
		shell = dash
	}
	cmd := exec.CommandContext(t.Context(), shell, append([]string{"../../install.sh", "--prefix", prefix}, args...)...)
	cmd.Env = append(os.Environ(), "TMPDIR="+t.TempDir())
	out, err := cmd.CombinedOutput()
	return string(out), err
}

func TestInstallScriptInstallsVerifiedArchive(t *testing.T) {
	dir := published(t, "1.2.0")
	server := httptest.NewServer(http.FileServer(http.Dir(dir)))
	defer server.Close()
	for name, from := range map[string]string{"directory": dir, "HTTP": server.URL + "/"} {
		t.Run(name, func(t *testing.T) {
			prefix := filepath.Join(t.TempDir(), "a prefix")
			for range 2 { // the second one replaces the first
				if out, err := install(t, prefix, "--from", from); err != nil {
					t.Fatalf("%v\n%s", err, out)
				}
			}
			out, err := exec.CommandContext(t.Context(), filepath.Join(prefix, "bin", "kubevpn")).Output()
			if err != nil || string(out) != "it runs\n" {
				t.Errorf("the program says %q, %v", out, err)
			}
			for _, file := range []string{
				"share/man/man1/kubevpn-connect.1.gz", "share/bash-completion/completions/kubevpn",
				"share/zsh/site-functions/_kubevpn", "share/fish/vendor_completions.d/kubevpn.fish",
			} {
				if _, err := os.Stat(filepath.Join(prefix, file)); err != nil {
					t.Error(err)
				}
			}
			if left, _ := filepath.Glob(filepath.Join(prefix, "bin", ".*")); len(left) > 0 {
				t.Errorf("left: %v", left)
			}
		})
	}
}

func TestInstallScriptChoosesVersion(t *testing.T) {
	dir := published(t, "1.2.0", "1.20.0")
	if out, err := install(t, t.TempDir(), "--from", dir, "--version", "v1.2.0"); err != nil {
		t.Errorf("%v\n%s", err, out)
	}
}

func TestInstallScriptRejects(t *testing.T) {
	wrong := published(t, "1.2.0")
	write(t, filepath.Join(wrong, "kubevpn_1.2.0_"+host+".tar.gz"), []byte("not what was published"))
	without := published(t, "1.2.0")
	if err := os.Remove(filepath.Join(without, "checksums.txt")); err != nil {
		t.Fatal(err)
	}
	server := httptest.NewServer(http.FileServer(http.Dir(without)))
	defer server.Close()
	for _, tt := range []struct {
		name string
		args []string
		want string
	}{
		{"a wrong checksum", []string{"--from", wrong}, "instead of"},
		{"a release without checksums", []string{"--from", without}, "cannot download"},
		{"a server without checksums", []string{"--from", server.URL}, "cannot download"},
		{"another version", []string{"--from", published(t, "1.2.0"), "--version", "1.3.0"}, "no archive of version 1.3.0"},
		{"several versions", []string{"--from", published(t, "1.2.0", "1.3.0")}, "several archives"},
		{"a release without this system", []string{"--from", published(t)}, "no archive for"},
		{"a copy that belongs to no release", nil, "use --from"},
		{"an unknown option", []string{"--force", "yes"}, "unknown option --force"},
		{"an option without a value", []string{"--version"}, "requires a value"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			prefix := t.TempDir()
			out, err := install(t, prefix, tt.args...)
			if err == nil || !strings.Contains(out, tt.want) {
				t.Errorf("got %v, want an error about %q\n%s", err, tt.want, out)
			}
			if left, _ := filepath.Glob(filepath.Join(prefix, "*")); len(left) > 0 {
				t.Errorf("installed: %v", left)
			}
		})
	}
}
