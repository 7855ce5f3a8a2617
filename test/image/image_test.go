package image

import (
	"archive/tar"
	"bytes"
	"debug/elf"
	binaryencoding "encoding/binary"
	"io"
	"log"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-containerregistry/pkg/name"
	"github.com/google/go-containerregistry/pkg/registry"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/remote"
	"github.com/google/go-containerregistry/pkg/v1/tarball"
)

// binary writes the smallest file that Build accepts as a 64-bit ELF program: a header and, if dynamic, one program
// header that names an interpreter.
func binary(t *testing.T, machine elf.Machine, dynamic bool) string {
	t.Helper()
	header := elf.Header64{
		Type: uint16(elf.ET_EXEC), Machine: uint16(machine), Version: 1,
		Phoff: 64, Ehsize: 64, Phentsize: 56, Shentsize: 64,
	}
	copy(header.Ident[:], elf.ELFMAG)
	header.Ident[elf.EI_CLASS], header.Ident[elf.EI_DATA], header.Ident[elf.EI_VERSION] = byte(elf.ELFCLASS64), byte(elf.ELFDATA2LSB), 1
	segment := elf.Prog64{Type: uint32(elf.PT_LOAD)}
	if dynamic {
		segment.Type = uint32(elf.PT_INTERP)
	}
	header.Phnum = 1
	var b bytes.Buffer
	for _, part := range []any{header, segment} {
		if err := binaryencoding.Write(&b, binaryencoding.LittleEndian, part); err != nil {
			t.Fatal(err)
		}
	}
	return writeFile(t, b.Bytes())
}

func writeFile(t *testing.T, content []byte) string {
	t.Helper()
	file := filepath.Join(t.TempDir(), "program")
	if err := os.WriteFile(file, content, 0o755); err != nil {
		t.Fatal(err)
	}
	return file
}

// firstLayer returns the first layer of the image as a tar archive that is closed after the test.
func firstLayer(t *testing.T, img v1.Image) io.Reader {
	t.Helper()
	layers, err := img.Layers()
	if err != nil {
		t.Fatal(err)
	}
	reader, err := layers[0].Uncompressed()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { reader.Close() })
	return reader
}

func TestBuildMakesTheConfiguredImage(t *testing.T) {
	program := binary(t, elf.EM_X86_64, false)
	img, err := Build(Options{
		Files:  []File{{program, "/usr/bin/traffic"}, {program, "/traffic"}},
		User:   "65532",
		Labels: map[string]string{"version": "1.2"},
	})
	if err != nil {
		t.Fatal(err)
	}
	config, err := img.ConfigFile()
	if err != nil {
		t.Fatal(err)
	}
	want := v1.Config{
		Entrypoint: []string{"/usr/bin/traffic"},
		User:       "65532",
		Labels:     map[string]string{"version": "1.2"},
		Env:        []string{"PATH=/"},
	}
	if diff := cmp.Diff(want, config.Config); diff != "" {
		t.Errorf("configuration (-want +got):\n%s", diff)
	}
	if config.OS != "linux" || config.Architecture != "amd64" || config.Created.Unix() != 0 {
		t.Errorf("for %s/%s with the time %v, want linux/amd64 of time 0", config.OS, config.Architecture, config.Created)
	}
	content, err := os.ReadFile(program)
	if err != nil {
		t.Fatal(err)
	}
	type entry struct {
		Name string
		Mode int64
		Size int64
	}
	size := int64(len(content))
	wantEntries := []entry{{"traffic", 0o755, size}, {"usr/", 0o755, 0}, {"usr/bin/", 0o755, 0}, {"usr/bin/traffic", 0o755, size}}
	var entries []entry
	reader := firstLayer(t, img)
	archive := tar.NewReader(reader)
	for {
		h, err := archive.Next()
		if err == io.EOF {
			break
		}
		if err != nil {
			t.Fatal(err)
		}
		if h.Uid != 0 || h.Gid != 0 || h.ModTime.Unix() != 0 {
			t.Errorf("%s belongs to %d:%d and has the time %v", h.Name, h.Uid, h.Gid, h.ModTime)
		}
		body, err := io.ReadAll(archive)
		if err != nil {
			t.Fatal(err)
		}
		if len(body) > 0 && string(body) != string(content) {
			t.Errorf("%s has another content", h.Name)
		}
		entries = append(entries, entry{h.Name, h.Mode, h.Size})
	}
	if diff := cmp.Diff(wantEntries, entries); diff != "" {
		t.Errorf("entries (-want +got):\n%s", diff)
	}
}

func TestBuildRejectsWrongFiles(t *testing.T) {
	amd64, arm64 := binary(t, elf.EM_X86_64, false), binary(t, elf.EM_AARCH64, false)
	for _, test := range []struct {
		name  string
		files []File
		want  string
	}{
		{"nothing", nil, "at least one file"},
		{"relative", []File{{amd64, "traffic"}}, "not a clean absolute path"},
		{"dots", []File{{amd64, "/../traffic"}}, "not a clean absolute path"},
		{"twice", []File{{amd64, "/traffic"}, {amd64, "/traffic"}}, "given twice"},
		{"missing", []File{{"/no/such", "/traffic"}}, "no such file"},
		{"script", []File{{writeFile(t, []byte("#!/bin/sh\n")), "/traffic"}}, "not a Linux binary"},
		{"RISC-V", []File{{binary(t, elf.EM_RISCV, false), "/traffic"}}, "unsupported machine EM_RISCV"},
		{"mixed", []File{{amd64, "/a"}, {arm64, "/b"}}, "built for arm64, the files before it for amd64"},
		{"dynamic", []File{{binary(t, elf.EM_X86_64, true), "/sh"}}, "not a static binary; build it with CGO_ENABLED=0"},
	} {
		t.Run(test.name, func(t *testing.T) {
			if _, err := Build(Options{Files: test.files}); err == nil || !strings.Contains(err.Error(), test.want) {
				t.Errorf("got %v, want an error with %q", err, test.want)
			}
		})
	}
}

func TestWriteTarIsReproducible(t *testing.T) {
	program, dir := binary(t, elf.EM_X86_64, false), t.TempDir()
	var archives []string
	for _, file := range []string{"a.tar", "sub/b.tar"} {
		img, err := Build(Options{Files: []File{{program, "/traffic"}}})
		if err != nil {
			t.Fatal(err)
		}
		if err := WriteTar(img, "example.test/kubevpn:1", filepath.Join(dir, file)); err != nil {
			t.Fatal(err)
		}
		b, err := os.ReadFile(filepath.Join(dir, file))
		if err != nil {
			t.Fatal(err)
		}
		archives = append(archives, string(b))
	}
	if archives[0] != archives[1] {
		t.Error("two archives of the same image differ")
	}
	tag, err := name.NewTag("example.test/kubevpn:1")
	if err != nil {
		t.Fatal(err)
	}
	img, err := tarball.ImageFromPath(filepath.Join(dir, "a.tar"), &tag)
	if err != nil {
		t.Fatal(err)
	}
	if config, err := img.ConfigFile(); err != nil || config.Config.Entrypoint[0] != "/traffic" {
		t.Errorf("read back: %v, %v", config, err)
	}
	if left, err := filepath.Glob(filepath.Join(dir, ".image-*")); err != nil || len(left) > 0 {
		t.Errorf("left over: %v, %v", left, err)
	}
	if err := WriteTar(img, "Not A Name", filepath.Join(dir, "c.tar")); err == nil {
		t.Error("WriteTar accepted an invalid name")
	}
}

// newRegistry returns the address of a registry that lives as long as the test.
func newRegistry(t *testing.T) string {
	t.Helper()
	server := httptest.NewServer(registry.New(registry.Logger(log.New(io.Discard, "", 0))))
	t.Cleanup(server.Close)
	return strings.TrimPrefix(server.URL, "http://")
}

func TestPushMakesOneImageOfAllArchitecturesWithSBOMs(t *testing.T) {
	var images []v1.Image
	var sboms [][]byte
	for _, machine := range []elf.Machine{elf.EM_X86_64, elf.EM_AARCH64} {
		img, err := Build(Options{Files: []File{{binary(t, machine, false), "/traffic"}}})
		if err != nil {
			t.Fatal(err)
		}
		images, sboms = append(images, img), append(sboms, []byte(`{"machine":"`+machine.String()+`"}`))
	}
	ref := newRegistry(t) + "/kubevpn:1"
	pushed, err := Push(t.Context(), ref, images, sboms)
	if err != nil {
		t.Fatal(err)
	}
	parsed, err := name.NewDigest(pushed)
	if err != nil {
		t.Fatal(err)
	}
	for i, arch := range []string{"amd64", "arm64"} {
		got, err := remote.Image(parsed, remote.WithPlatform(v1.Platform{OS: "linux", Architecture: arch}))
		if err != nil {
			t.Fatal(err)
		}
		if config, err := got.ConfigFile(); err != nil || config.Architecture != arch {
			t.Errorf("pulled back for %s: %v, %v", arch, config, err)
		}
		digest, err := got.Digest()
		if err != nil {
			t.Fatal(err)
		}
		referrers, err := remote.Referrers(parsed.Context().Digest(digest.String()))
		if err != nil {
			t.Fatal(err)
		}
		manifest, err := referrers.IndexManifest()
		if err != nil {
			t.Fatal(err)
		}
		if len(manifest.Manifests) != 1 || manifest.Manifests[0].ArtifactType != mediaType {
			t.Fatalf("%s has the referrers %+v, want one of type %s", arch, manifest.Manifests, mediaType)
		}
		artifact, err := remote.Image(parsed.Context().Digest(manifest.Manifests[0].Digest.String()))
		if err != nil {
			t.Fatal(err)
		}
		content, err := io.ReadAll(firstLayer(t, artifact))
		if err != nil || string(content) != string(sboms[i]) {
			t.Errorf("the SBOM of %s is %q, %v", arch, content, err)
		}
	}
}

func TestPushFailsWithoutRegistry(t *testing.T) {
	img, err := Build(Options{Files: []File{{binary(t, elf.EM_AARCH64, false), "/traffic"}}})
	if err != nil {
		t.Fatal(err)
	}
	server := httptest.NewServer(nil)
	server.Close()
	ref := strings.TrimPrefix(server.URL, "http://") + "/kubevpn:1"
	if _, err := Push(t.Context(), ref, []v1.Image{img}, nil); err == nil || !strings.Contains(err.Error(), "pushing "+ref) {
		t.Errorf("%v", err)
	}
}

func TestIndexRejectsTwoImagesOfOneArchitecture(t *testing.T) {
	img, err := Build(Options{Files: []File{{binary(t, elf.EM_AARCH64, false), "/traffic"}}})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := Index([]v1.Image{img, img}); err == nil || !strings.Contains(err.Error(), "two images for arm64") {
		t.Errorf("%v", err)
	}
}
