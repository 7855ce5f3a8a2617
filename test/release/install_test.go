//go:build unix

package release

import (
	"archive/tar"
	"compress/gzip"
	"crypto/sha256"
	"encoding/pem"
	"fmt"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"testing"
)

// host is this system, in the names of archives.
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
		content := archive(t, version)
		sums += fmt.Sprintf("%x  %s\n%x  %s.spdx.json\n", sha256.Sum256(content), name, sha256.Sum256(nil), name)
		write(t, filepath.Join(dir, name), content)
	}
	write(t, filepath.Join(dir, "checksums.txt"), []byte(sums))
	return dir
}

func archive(t *testing.T, version string) []byte {
	t.Helper()
	var b strings.Builder
	plain := gzip.NewWriter(&b)
	files := tar.NewWriter(plain)
	for _, f := range []struct{ name, content string }{
		{"kubevpn", program}, {"man/kubevpn.1.gz", "page of " + version}, {"man/kubevpn-connect.1.gz", "page"},
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

const script = "../../install.sh"

// install runs install.sh with the strictest shell of this machine.
func install(t *testing.T, prefix string, args ...string) (string, error) {
	t.Helper()
	return installBy(t, script, prefix, args...)
}

func installBy(t *testing.T, script, prefix string, args ...string) (string, error) {
	t.Helper()
	shell := "sh"
	if dash, err := exec.LookPath("dash"); err == nil {
		shell = dash
	}
	cmd := exec.CommandContext(t.Context(), shell, append([]string{script, "--prefix", prefix}, args...)...)
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

// TestInstallScriptFollowsOnlyHTTPS checks that the script fails on a redirect from https to http, and on http itself,
// because a program could then be changed on the network.
func TestInstallScriptFollowsOnlyHTTPS(t *testing.T) {
	dir := published(t, "1.2.0")
	plain := httptest.NewServer(http.FileServer(http.Dir(dir)))
	defer plain.Close()
	secure := httptest.NewTLSServer(http.FileServer(http.Dir(dir)))
	defer secure.Close()
	redirecting := func(to *httptest.Server) *httptest.Server {
		s := httptest.NewTLSServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			http.Redirect(w, r, to.URL+r.URL.Path, http.StatusFound)
		}))
		t.Cleanup(s.Close)
		return s
	}
	authority := filepath.Join(t.TempDir(), "ca.pem") // of all servers of httptest
	write(t, authority, pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: secure.Certificate().Raw}))
	t.Setenv("CURL_CA_BUNDLE", authority)

	prefix := t.TempDir()
	if out, err := install(t, prefix, "--from", redirecting(secure).URL); err != nil {
		t.Errorf("a redirect from https to https, as GitHub's: %v\n%s", err, out)
	}
	_, port, err := net.SplitHostPort(plain.Listener.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	for _, tt := range []struct{ name, from, want string }{
		{"a redirect to http", redirecting(plain).URL, "cannot download"},
		{"http", "http://192.0.2.1", "use https"},
		{"http to a name like localhost", "http://localhost.example.invalid:" + port, "use https"},
		{"http to a name like 127.0.0.1", "http://127.0.0.1.example.invalid", "use https"},
		{"http with a user", "http://127.0.0.1:" + port + "@192.0.2.1", "use https"},
		{"http with a user and a path", "http://localhost\\@192.0.2.1/", "use https"},
		{"another scheme", "ftp://127.0.0.1:" + port, "cannot download"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			rejects(t, tt.want, "--from", tt.from)
		})
	}
}

// fakeCosign puts a cosign into PATH that accepts a bundle if it says good, and appends its arguments to the file.
func fakeCosign(t *testing.T) (arguments string) {
	t.Helper()
	dir := t.TempDir()
	arguments = filepath.Join(dir, "arguments")
	script := "#!/bin/sh\nfor a; do printf '%s\\n' \"$a\"; done >>'" + arguments + "'\n" + `
while [ $# -gt 0 ]; do
	[ "$1" != --bundle ] || bundle=$2
	shift
done
grep -q good "$bundle" || { echo 'invalid signature' >&2; exit 1; }
`
	if err := os.WriteFile(filepath.Join(dir, "cosign"), []byte(script), 0o755); err != nil {
		t.Fatal(err)
	}
	t.Setenv("PATH", dir+":"+os.Getenv("PATH"))
	return arguments
}

// checkArguments checks how the script called cosign for the signature and for the provenance, and empties the file.
func checkArguments(t *testing.T, file, signer string) {
	t.Helper()
	got, err := os.ReadFile(file)
	for _, want := range []string{"verify-blob\n" + signer, "verify-blob-attestation\n--type\nslsaprovenance1\n" + signer} {
		if err != nil || !strings.Contains(string(got), want) {
			t.Errorf("cosign was called with %s, %v; want\n%s", got, err, want)
		}
	}
	write(t, file, nil)
}

// pathWithoutCosign returns a directory with the programs that the script needs.
func pathWithoutCosign(t *testing.T) string {
	t.Helper()
	dir := t.TempDir()
	for _, name := range []string{
		"sh", "dash", "id", "uname", "mktemp", "rm", "cp", "grep", "wc", "sha256sum", "shasum", "cut", "mkdir", "tar", "gzip", "chmod", "mv", "sed",
	} {
		if path, err := exec.LookPath(name); err == nil {
			if err := os.Symlink(path, filepath.Join(dir, name)); err != nil {
				t.Fatal(err)
			}
		}
	}
	return dir
}

func TestInstallScriptVerifiesSignature(t *testing.T) {
	dir := published(t, "1.2.0")
	key := filepath.Join(t.TempDir(), "cosign.pub")
	write(t, key, nil)
	t.Run("without cosign it says what is not verified", func(t *testing.T) {
		t.Setenv("PATH", pathWithoutCosign(t))
		out, err := install(t, t.TempDir(), "--from", dir)
		if err != nil || !strings.Contains(out, "cosign is missing") || !strings.Contains(out, "verified: checksum\n") {
			t.Errorf("%v\n%s", err, out)
		}
		rejects(t, "requires cosign", "--from", dir, "--key", key)
	})
	arguments := fakeCosign(t)
	t.Run("a release without a signature", func(t *testing.T) {
		rejects(t, "cannot download", "--from", dir, "--key", key)
	})
	bundle := filepath.Join(dir, "checksums.txt.sigstore.json")
	t.Run("a wrong signature", func(t *testing.T) {
		write(t, bundle, []byte("bad"))
		rejects(t, "invalid signature", "--from", dir, "--key", key)
	})
	t.Run("a key that is missing", func(t *testing.T) { rejects(t, "no file", "--from", dir, "--key", key+"x") })
	write(t, bundle, []byte("good"))
	t.Run("a release without provenance", func(t *testing.T) {
		rejects(t, "cannot download "+dir+"/provenance.intoto.jsonl", "--from", dir, "--key", key)
	})
	provenance := filepath.Join(dir, "provenance.intoto.jsonl")
	t.Run("a wrong provenance", func(t *testing.T) {
		write(t, provenance, []byte("bad"))
		rejects(t, "the provenance of kubevpn_1.2.0_"+host+".tar.gz is wrong", "--from", dir, "--key", key)
	})
	write(t, provenance, []byte("good"))
	t.Run("the signature of a key", func(t *testing.T) {
		out, err := install(t, t.TempDir(), "--from", dir, "--key", key)
		if err != nil || !strings.Contains(out, "verified: signature, checksum and provenance\n") {
			t.Fatalf("%v\n%s", err, out)
		}
		checkArguments(t, arguments, "--key\n"+key+"\n")
	})
	t.Run("the signature of the workflow", func(t *testing.T) {
		script := releasedScript(t, "some.one/kubevpn")
		for version, tag := range map[string]string{"": `[^/]+`, "1.2.0": `1\.2\.0`} {
			args := []string{"--from", dir}
			if version != "" {
				args = append(args, "--version", version)
			}
			if out, err := installBy(t, script, t.TempDir(), args...); err != nil {
				t.Fatalf("%v\n%s", err, out)
			}
			want := `--certificate-oidc-issuer
https://token.actions.githubusercontent.com
--certificate-identity-regexp
^https://github\.com/some\.one/kubevpn/\.github/workflows/release\.yaml@refs/tags/v` + tag + "$\n"
			checkArguments(t, arguments, want)
		}
	})
}

// releasedScript returns the path of the script as a release of a repository on GitHub has it.
func releasedScript(t *testing.T, repository string) string {
	t.Helper()
	text, err := os.ReadFile(script)
	if err != nil {
		t.Fatal(err)
	}
	file := filepath.Join(t.TempDir(), "install.sh")
	write(t, file, []byte(strings.Replace(string(text), "\nrepository=\n", "\nrepository="+repository+"\n", 1)))
	return file
}

// TestTruncatedInstallScriptInstallsNothing cuts the script at each line, because `curl | sh` runs what arrives before
// the connection breaks.
func TestTruncatedInstallScriptInstallsNothing(t *testing.T) {
	text, err := os.ReadFile(script)
	if err != nil {
		t.Fatal(err)
	}
	dir, prefix := published(t, "1.2.0"), t.TempDir()
	var ends []int
	for i, c := range text {
		if c == '\n' || len(text)-i < 20 {
			ends = append(ends, i)
		}
	}
	for _, end := range ends[:len(ends)-1] { // the last is the end of the script without its newline
		file := filepath.Join(t.TempDir(), "install.sh")
		write(t, file, text[:end])
		out, _ := installBy(t, file, prefix, "--from", dir)
		if left, _ := filepath.Glob(filepath.Join(prefix, "*")); len(left) > 0 {
			t.Fatalf("the first %d bytes install %v\n%s", end, left, out)
		}
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
		t.Run(tt.name, func(t *testing.T) { rejects(t, tt.want, tt.args...) })
	}
}

// rejects checks that the script fails with an error about want, and installs nothing.
func rejects(t *testing.T, want string, args ...string) {
	t.Helper()
	prefix := t.TempDir()
	out, err := install(t, prefix, args...)
	if err == nil || !strings.Contains(out, want) {
		t.Errorf("got %v, want an error about %q\n%s", err, want, out)
	}
	if left, _ := filepath.Glob(filepath.Join(prefix, "*")); len(left) > 0 {
		t.Errorf("installed: %v", left)
	}
}
