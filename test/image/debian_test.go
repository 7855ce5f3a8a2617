package image

import (
	"bytes"
	"encoding/json"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/ulikunitz/xz"
)

func TestFetchKeepsPackages(t *testing.T) {
	requests := 0
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		requests++
		w.Write([]byte("content"))
	}))
	defer server.Close()
	cache := t.TempDir()
	p := Package{Name: "iptables", URL: server.URL, SHA256: checksum([]byte("content"))}
	for range 2 {
		if content, err := p.fetch(t.Context(), cache); err != nil || string(content) != "content" {
			t.Fatalf("%q, %v", content, err)
		}
	}
	if requests != 1 {
		t.Errorf("%d requests, want one", requests)
	}
	file := filepath.Join(cache, p.SHA256+".deb")
	if err := os.WriteFile(file, []byte("damaged"), 0o600); err != nil {
		t.Fatal(err)
	}
	if content, err := p.fetch(t.Context(), cache); err != nil || string(content) != "content" || requests != 2 {
		t.Errorf("with a damaged file: %q, %v, %d requests", content, err, requests)
	}
}

func TestFetchRejectsWrongPackages(t *testing.T) {
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path == "/gone" {
			http.NotFound(w, r)
			return
		}
		w.Write([]byte("something else"))
	}))
	defer server.Close()
	for path, want := range map[string]string{"/gone": "404 Not Found", "/changed": "has the SHA-256 checksum"} {
		t.Run(path, func(t *testing.T) {
			cache := t.TempDir()
			p := Package{Name: "iptables", URL: server.URL + path, SHA256: checksum([]byte("content"))}
			_, err := p.fetch(t.Context(), cache)
			if err == nil || !strings.Contains(err.Error(), want) || !strings.Contains(err.Error(), "make image-lock") {
				t.Errorf("%v, want %q", err, want)
			}
			if files, err := os.ReadDir(cache); err != nil || len(files) > 0 {
				t.Errorf("kept %v, %v", files, err)
			}
		})
	}
}

func TestUnpackRejectsBrokenPackages(t *testing.T) {
	for name, content := range map[string]string{
		"nothing": "", "no archive": strings.Repeat("x", 100),
		"empty archive": "!<arch>\n",
	} {
		t.Run(name, func(t *testing.T) {
			if d, err := unpack([]byte(content)); err == nil {
				t.Errorf("got %v", d)
			}
		})
	}
}

func TestReadIndexTakesTheLatestVersion(t *testing.T) {
	newest := map[string]Package{}
	for _, index := range []string{
		"Package: libc6\nVersion: 2.41-12\nArchitecture: amd64\nFilename: pool/a.deb\nSHA256: aa\nDescription: C\n library\n\n" +
			"Package: bash\nVersion: 5\n\n",
		"Package: libc6\nVersion: 2.41-12+deb13u10\nArchitecture: amd64\nFilename: pool/b.deb\nSHA256: bb\n",
		"Package: libc6\nVersion: 2.41-12+deb13u9\nArchitecture: amd64\nFilename: pool/c.deb\nSHA256: cc\n\n",
	} {
		var b bytes.Buffer
		w, err := xz.NewWriter(&b)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := w.Write([]byte(index)); err != nil {
			t.Fatal(err)
		}
		if err := w.Close(); err != nil {
			t.Fatal(err)
		}
		if err := readIndex(b.Bytes(), "https://mirror.test/", newest); err != nil {
			t.Fatal(err)
		}
	}
	want := map[string]Package{"libc6": {Name: "libc6", Version: "2.41-12+deb13u10", Architecture: "amd64",
		URL: "https://mirror.test/pool/b.deb", SHA256: "bb"}}
	if diff := cmp.Diff(want, newest); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
}

func TestLockIsWrittenAsItIsKept(t *testing.T) {
	lock, err := ReadLock()
	if err != nil {
		t.Fatal(err)
	}
	file := filepath.Join(t.TempDir(), "lock.json")
	if err := lock.Write(file); err != nil {
		t.Fatal(err)
	}
	if content, err := os.ReadFile(file); err != nil || !bytes.Equal(content, lockFile) || !json.Valid(content) {
		t.Errorf("%v\n%s", err, content)
	}
}
