package build

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"kubevpn/internal/api"
)

// repository makes a git repository with three commits, the second of which is tagged.
func repository(t *testing.T, tags ...string) string {
	t.Helper()
	root := t.TempDir()
	run := func(args ...string) {
		t.Helper()
		set := []string{"-c", "user.name=test", "-c", "user.email=test@example.com", "-c", "commit.gpgsign=false",
			"-c", "tag.gpgsign=false"}
		if _, err := git(t.Context(), root, append(set, args...)...); err != nil {
			t.Fatal(err)
		}
	}
	run("init", "--quiet")
	for _, name := range []string{"first", "second", "third"} {
		if err := os.WriteFile(filepath.Join(root, name), []byte(name), 0o644); err != nil {
			t.Fatal(err)
		}
		run("add", "--all")
		run("commit", "--quiet", "--message", name)
		if name == "second" {
			for _, tag := range tags {
				run("tag", tag)
			}
		}
	}
	return root
}

func TestPreviousRevisionPrefersReleaseTag(t *testing.T) {
	for _, tt := range []struct {
		name string
		tags []string
		want string // "": the second commit
	}{
		{"without a release", nil, ""},
		{"with a release", []string{"v1.2.3"}, "v1.2.3"},
		{"with a tag that is not a release", []string{"vacation"}, ""},
	} {
		t.Run(tt.name, func(t *testing.T) {
			root := repository(t, tt.tags...)
			got, err := previousRevision(t.Context(), root)
			if err != nil {
				t.Fatal(err)
			}
			if tt.want != "" && got != tt.want || tt.want == "" && len(got) != 40 {
				t.Errorf("got %s, want %s", got, tt.want)
			}
			dir := filepath.Join(t.TempDir(), "source")
			if err := export(t.Context(), root, got, dir); err != nil {
				t.Fatal(err)
			}
			files, err := filepath.Glob(filepath.Join(dir, "*"))
			if err != nil || len(files) != 2 {
				t.Errorf("exported %q, %v", files, err)
			}
		})
	}
	t.Run("the release of HEAD is not the previous one", func(t *testing.T) {
		root := repository(t, "v1.2.3")
		if _, err := git(t.Context(), root, "tag", "v1.3.0"); err != nil {
			t.Fatal(err)
		}
		if got, err := previousRevision(t.Context(), root); err != nil || got != "v1.2.3" {
			t.Errorf("got %s, %v", got, err)
		}
	})
}

func TestPreviousRevisionFailsInShallowClone(t *testing.T) {
	shallow := t.TempDir()
	origin := "file://" + filepath.ToSlash(repository(t))
	if _, err := git(t.Context(), shallow, "clone", "--quiet", "--depth=1", origin, "."); err != nil {
		t.Fatal(err)
	}
	_, err := previousRevision(t.Context(), shallow)
	if err == nil || !strings.Contains(err.Error(), "git fetch --unshallow --tags") {
		t.Errorf("got %v", err)
	}
}

func TestProtocolOfReadsTheSource(t *testing.T) {
	root, err := moduleRoot(t.Context(), productModule)
	if err != nil {
		t.Fatal(err)
	}
	if got, err := protocolOf(root); err != nil || got != api.Protocol {
		t.Errorf("the current source: got %d, %v, want %d", got, err, api.Protocol)
	}
	if got, err := protocolOf(t.TempDir()); err != nil || got != 0 {
		t.Errorf("no source: got %d, %v", got, err)
	}
}
