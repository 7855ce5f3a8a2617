package image

import (
	"archive/tar"
	"archive/zip"
	"bytes"
	"compress/gzip"
	"debug/buildinfo"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	spdxjson "github.com/spdx/tools-golang/json"
	"github.com/spdx/tools-golang/spdx"
	"github.com/spdx/tools-golang/spdxlib"
)

// readSBOM checks a document and returns it.
func readSBOM(t *testing.T, content []byte) *spdx.Document {
	t.Helper()
	doc, err := spdxjson.Read(bytes.NewReader(content))
	if err != nil {
		t.Fatal(err)
	}
	if err := spdxlib.ValidateDocument(doc); err != nil {
		t.Error(err)
	}
	if doc.SPDXVersion != "SPDX-2.3" {
		t.Errorf("version %s", doc.SPDXVersion)
	}
	seen := map[string]bool{}
	for _, p := range doc.Packages {
		if id := string(p.PackageSPDXIdentifier); seen[id] {
			t.Errorf("two packages are %s", id)
		} else {
			seen[id] = true
		}
	}
	return doc
}

// purls returns the package URLs of a document.
func purls(doc *spdx.Document) []string {
	var all []string
	for _, p := range doc.Packages {
		for _, r := range p.PackageExternalReferences {
			all = append(all, r.Locator)
		}
	}
	return all
}

// goProgram builds a Go program and returns it and the package URL of a module in it.
func goProgram(t *testing.T) (file, module string) {
	t.Helper()
	file = filepath.Join(t.TempDir(), "program")
	cmd := exec.CommandContext(t.Context(), "go", "build", "-o", file, "kubevpn/test/cmd/image")
	cmd.Env = append(os.Environ(), "CGO_ENABLED=0", "GOOS=linux")
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	info, err := buildinfo.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	for _, m := range info.Deps {
		if m.Path == "github.com/google/go-containerregistry" {
			return file, "pkg:golang/" + m.Path + "@" + m.Version
		}
	}
	t.Fatalf("no go-containerregistry among %v", info.Deps)
	return "", ""
}

func TestImageSBOMNamesPackagesAndModules(t *testing.T) {
	program, module := goProgram(t)
	arch, err := Architecture(program)
	if err != nil {
		t.Fatal(err)
	}
	tree, err := IPTables(t.Context(), arch)
	if err != nil {
		t.Fatal(err)
	}
	o := Options{Files: []File{{program, "/traffic"}}, Tree: tree,
		Labels: map[string]string{"org.opencontainers.image.version": "1.2"}}
	img, err := Build(o)
	if err != nil {
		t.Fatal(err)
	}
	content, err := ImageSBOM(img, "example.test/team/kubevpn:1", o)
	if err != nil {
		t.Fatal(err)
	}
	doc := readSBOM(t, content)
	digest, err := img.Digest()
	if err != nil {
		t.Fatal(err)
	}
	want := []string{module, "pkg:oci/kubevpn@sha256:" + digest.Hex + "?arch=" + arch + "&repository_url=example.test%2Fteam%2Fkubevpn"}
	for _, p := range tree.Packages {
		want = append(want, "pkg:deb/debian/"+p.Name+"@"+strings.ReplaceAll(p.Version, "+", "%2B")+"?arch="+arch+"&distro=debian-13")
	}
	got := purls(doc)
	for _, w := range want {
		if !slices.Contains(got, w) {
			t.Errorf("%s is not among %v", w, got)
		}
	}
	if root := doc.Packages[0]; root.PackageName != "example.test/team/kubevpn" || root.PackageVersion != "1.2" {
		t.Errorf("the document describes %s %s", root.PackageName, root.PackageVersion)
	}
}

func TestArchiveSBOMNamesModules(t *testing.T) {
	program, module := goProgram(t)
	content, err := os.ReadFile(program)
	if err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	write := func(name string, pack func(b *bytes.Buffer) error) string {
		var b bytes.Buffer
		if err := pack(&b); err != nil {
			t.Fatal(err)
		}
		file := filepath.Join(dir, name)
		if err := os.WriteFile(file, b.Bytes(), 0o600); err != nil {
			t.Fatal(err)
		}
		return file
	}
	files := []string{
		write("a.tar.gz", func(b *bytes.Buffer) error {
			z := gzip.NewWriter(b)
			w := tar.NewWriter(z)
			for name, content := range map[string][]byte{"kubevpn": content, "README.md": []byte("text")} {
				if err := w.WriteHeader(&tar.Header{Name: name, Mode: 0o755, Size: int64(len(content))}); err != nil {
					return err
				}
				if _, err := w.Write(content); err != nil {
					return err
				}
			}
			if err := w.Close(); err != nil {
				return err
			}
			return z.Close()
		}),
		write("a.zip", func(b *bytes.Buffer) error {
			w := zip.NewWriter(b)
			f, err := w.Create("kubevpn.exe")
			if err != nil {
				return err
			}
			if _, err := f.Write(content); err != nil {
				return err
			}
			return w.Close()
		}),
		program,
	}
	for _, file := range files {
		t.Run(filepath.Base(file), func(t *testing.T) {
			document, err := ArchiveSBOM(file, "1.2")
			if err != nil {
				t.Fatal(err)
			}
			if got := purls(readSBOM(t, document)); !slices.Contains(got, module) {
				t.Errorf("%s is not among %v", module, got)
			}
			again, err := ArchiveSBOM(file, "1.2")
			if err != nil || !bytes.Equal(document, again) {
				t.Errorf("made twice, it differs: %v", err)
			}
		})
	}
	empty := write("b.zip", func(b *bytes.Buffer) error { return zip.NewWriter(b).Close() })
	if _, err := ArchiveSBOM(empty, ""); err == nil || !strings.Contains(err.Error(), "contains no Go program") {
		t.Errorf("of an empty archive: %v", err)
	}
}
