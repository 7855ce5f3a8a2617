//go:build release && linux

package release

import (
	"archive/tar"
	"archive/zip"
	"bufio"
	"bytes"
	"compress/gzip"
	"crypto/sha256"
	"debug/buildinfo"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"sigs.k8s.io/yaml"
)

// dist is the directory that `make release-snapshot` writes.
const dist = "../../bin/dist"

var systems = []string{"linux_amd64", "linux_arm64", "darwin_amd64", "darwin_arm64", "windows_amd64", "windows_arm64"}

// version returns the version in goreleaser's metadata of the release.
func version(t *testing.T) string {
	t.Helper()
	var m struct{ Version string }
	if err := json.Unmarshal(read(t, "metadata.json"), &m); err != nil {
		t.Fatal(err)
	}
	return m.Version
}

func read(t *testing.T, file string) []byte {
	t.Helper()
	content, err := os.ReadFile(filepath.Join(dist, file))
	if err != nil {
		t.Fatalf("%v: run `make release-snapshot`", err)
	}
	return content
}

// archiveOf returns the name and the bytes of a system's archive.
func archiveOf(t *testing.T, system string) (string, []byte) {
	t.Helper()
	suffix := ".tar.gz"
	if strings.HasPrefix(system, "windows") {
		suffix = ".zip"
	}
	name := "kubevpn_" + version(t) + "_" + system + suffix
	return name, read(t, name)
}

// unpack returns the files of an archive.
func unpack(t *testing.T, name string, content []byte) map[string][]byte {
	t.Helper()
	files := map[string][]byte{}
	if strings.HasSuffix(name, ".zip") {
		z, err := zip.NewReader(bytes.NewReader(content), int64(len(content)))
		if err != nil {
			t.Fatal(err)
		}
		for _, f := range z.File {
			r, err := f.Open()
			if err != nil {
				t.Fatal(err)
			}
			if files[f.Name], err = io.ReadAll(r); err != nil {
				t.Fatal(err)
			}
		}
		return files
	}
	plain, err := gzip.NewReader(bytes.NewReader(content))
	if err != nil {
		t.Fatal(err)
	}
	for r := tar.NewReader(plain); ; {
		h, err := r.Next()
		if errors.Is(err, io.EOF) {
			return files
		}
		if err != nil {
			t.Fatal(err)
		}
		if files[h.Name], err = io.ReadAll(r); err != nil {
			t.Fatal(err)
		}
	}
}

func TestArchivesAreComplete(t *testing.T) {
	for _, system := range systems {
		t.Run(system, func(t *testing.T) {
			name, content := archiveOf(t, system)
			files := unpack(t, name, content)
			binary := "kubevpn"
			if strings.HasPrefix(system, "windows") {
				binary += ".exe"
			}
			for _, want := range []string{
				binary, "LICENSE", "README.md", "man/kubevpn.1.gz", "man/kubevpn-connect.1.gz", "completions/kubevpn.bash",
				"completions/_kubevpn", "completions/kubevpn.fish", "completions/kubevpn.ps1",
			} {
				if len(files[want]) == 0 {
					t.Errorf("%s is missing", want)
				}
			}
			info, err := buildinfo.Read(bytes.NewReader(files[binary]))
			if err != nil {
				t.Fatal(err)
			}
			settings := map[string]string{}
			for _, s := range info.Settings {
				settings[s.Key] = s.Value
			}
			if got := settings["GOOS"] + "_" + settings["GOARCH"]; got != system || settings["CGO_ENABLED"] != "0" {
				t.Errorf("the program is for %s, with CGO_ENABLED=%s", got, settings["CGO_ENABLED"])
			}
			if !bytes.Contains(files[binary], []byte(version(t))) {
				t.Errorf("the program does not contain its version %s", version(t))
			}
		})
	}
}

// checksums returns the checksums of the published files.
func checksums(t *testing.T) map[string]string {
	t.Helper()
	sums := map[string]string{}
	lines := bufio.NewScanner(bytes.NewReader(read(t, "checksums.txt")))
	for lines.Scan() {
		sum, name, ok := strings.Cut(lines.Text(), "  ")
		if !ok {
			t.Fatalf("checksums.txt: %q", lines.Text())
		}
		sums[name] = sum
	}
	return sums
}

func TestChecksumsCoverAllFiles(t *testing.T) {
	sums := checksums(t)
	for name, sum := range sums {
		if got := fmt.Sprintf("%x", sha256.Sum256(read(t, name))); got != sum {
			t.Errorf("%s has the checksum %s, and checksums.txt says %s", name, got, sum)
		}
	}
	for _, pattern := range []string{"*.tar.gz", "*.zip", "*.deb", "*.rpm", "*.spdx.json", "kubevpn-*.tgz", "install.sh"} {
		files, err := filepath.Glob(filepath.Join(dist, pattern))
		if err != nil || len(files) == 0 {
			t.Errorf("there is no %s: %v", pattern, err)
		}
		for _, file := range files {
			if sums[filepath.Base(file)] == "" {
				t.Errorf("checksums.txt lacks %s", filepath.Base(file))
			}
		}
	}
}

func TestChartHasVersionOfRelease(t *testing.T) {
	name := "kubevpn-" + version(t) + ".tgz"
	files := unpack(t, name, read(t, name))
	var chart struct{ Name, Version, AppVersion string }
	if err := yaml.Unmarshal(files["kubevpn/Chart.yaml"], &chart); err != nil {
		t.Fatal(err)
	}
	if chart.Name != "kubevpn" || chart.Version != version(t) || chart.AppVersion != version(t) {
		t.Errorf("got %+v, want the version %s", chart, version(t))
	}
	for _, want := range []string{"values.yaml", "values.schema.json", "README.md", "templates/deployment.yaml"} {
		if len(files["kubevpn/"+want]) == 0 {
			t.Errorf("the chart lacks %s", want)
		}
	}
}

func TestEachArchiveHasSBOM(t *testing.T) {
	for _, system := range systems {
		name, _ := archiveOf(t, system)
		var document struct {
			SPDXVersion string
			Packages    []struct{ Name string }
		}
		if err := json.Unmarshal(read(t, name+".spdx.json"), &document); err != nil {
			t.Errorf("%s: %v", name, err)
			continue
		}
		found := slices.ContainsFunc(document.Packages, func(p struct{ Name string }) bool { return p.Name == "k8s.io/client-go" })
		if document.SPDXVersion != "SPDX-2.3" || !found {
			t.Errorf("%s: version %s with %d packages", name, document.SPDXVersion, len(document.Packages))
		}
	}
}

// TestKrewManifestFollowsRules checks the rules of krew's validator and index:
// https://krew.sigs.k8s.io/docs/developer-guide.
func TestKrewManifestFollowsRules(t *testing.T) {
	var m struct {
		APIVersion, Kind string
		Metadata         struct{ Name string }
		Spec             struct {
			Version, Homepage, ShortDescription, Description, Caveats string
			Platforms                                                 []struct {
				URI, Sha256, Bin string
				Selector         struct{ MatchLabels map[string]string }
			}
		}
	}
	if err := yaml.UnmarshalStrict(read(t, "krew/kubevpn.yaml"), &m); err != nil {
		t.Fatal(err)
	}
	for what, ok := range map[string]bool{
		"apiVersion": m.APIVersion == "krew.googlecontainertools.github.com/v1alpha2",
		"kind":       m.Kind == "Plugin",
		// the name of the file, of the plugin and of the program that `kubectl kubevpn` calls
		"name":    m.Metadata.Name == "kubevpn" && regexp.MustCompile(`^[a-z][a-z-]*$`).MatchString(m.Metadata.Name),
		"version": regexp.MustCompile(`^v\d+\.\d+\.\d+(-[0-9A-Za-z.-]+)?$`).MatchString(m.Spec.Version),
		"shortDescription": m.Spec.ShortDescription != "" && len(m.Spec.ShortDescription) <= 50 &&
			!strings.ContainsAny(m.Spec.ShortDescription, "\r\n") && !strings.HasSuffix(m.Spec.ShortDescription, "."),
		"description": m.Spec.Description != "",
		"homepage":    strings.HasPrefix(m.Spec.Homepage, "https://"),
		"platforms":   len(m.Spec.Platforms) == len(systems),
	} {
		if !ok {
			t.Errorf("%s does not follow the rules: %+v", what, m)
		}
	}
	seen := map[string]bool{}
	for _, p := range m.Spec.Platforms {
		system := p.Selector.MatchLabels["os"] + "_" + p.Selector.MatchLabels["arch"]
		if len(p.Selector.MatchLabels) != 2 || !slices.Contains(systems, system) || seen[system] {
			t.Errorf("the selector %v is unknown or repeated", p.Selector.MatchLabels)
			continue
		}
		seen[system] = true
		name, content := archiveOf(t, system)
		if !strings.HasPrefix(p.URI, "https://") || path.Base(p.URI) != name {
			t.Errorf("%s: the URI is %s, the archive %s", system, p.URI, name)
		}
		if got := fmt.Sprintf("%x", sha256.Sum256(content)); p.Sha256 != got {
			t.Errorf("%s: sha256 is %s, that of the archive %s", system, p.Sha256, got)
		}
		if len(unpack(t, name, content)[p.Bin]) == 0 {
			t.Errorf("%s: the archive has no %s", system, p.Bin)
		}
	}
}

func TestCaskNamesFilesOfArchives(t *testing.T) {
	text := string(read(t, "homebrew/Casks/kubevpn.rb"))
	for _, system := range systems[:4] {
		name, content := archiveOf(t, system)
		if !strings.Contains(text, fmt.Sprintf("%x", sha256.Sum256(content))) {
			t.Errorf("the cask lacks the checksum of %s", name)
		}
		files := unpack(t, name, content)
		for _, m := range regexp.MustCompile(`(?m)^\s*(?:binary|manpage|\w+_completion) "(.+)"$`).FindAllStringSubmatch(text, -1) {
			if len(files[m[1]]) == 0 {
				t.Errorf("the cask installs %s, which %s lacks", m[1], name)
			}
		}
	}
}

func TestREADMEInstallsFilesOfRelease(t *testing.T) {
	text, err := os.ReadFile("../../README.md")
	if err != nil {
		t.Fatal(err)
	}
	names := regexp.MustCompile(`(?:latest/download/|install \./)(\S+)`).FindAllStringSubmatch(string(text), -1)
	if len(names) < 4 {
		t.Errorf("the README names the files %q: this test reads it wrongly", names)
	}
	for _, m := range names {
		name := strings.ReplaceAll(m[1], "VERSION", version(t))
		if name == "kubevpn.yaml" {
			name = filepath.Join("krew", name)
		}
		read(t, name)
	}
}

func TestReleaseNotesSayWhatIsTested(t *testing.T) {
	notes, err := os.ReadFile("../../bin/release/notes.md")
	if err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{"## Tested systems", "| Linux, amd64 |", "| macOS |", "| Windows |", "### "} {
		if !strings.Contains(string(notes), want) {
			t.Errorf("the release notes lack %q", want)
		}
	}
}

// TestInstallScriptInstallsSnapshot installs the files that goreleaser made.
func TestInstallScriptInstallsSnapshot(t *testing.T) {
	prefix := t.TempDir()
	if out, err := install(t, prefix, "--from", dist); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	checkVersion(t, filepath.Join(prefix, "bin", "kubevpn"))
}
