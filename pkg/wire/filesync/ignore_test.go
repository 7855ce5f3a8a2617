package filesync

import (
	"bytes"
	"errors"
	"fmt"
	"math/rand/v2"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/bmatcuk/doublestar/v4"
)

func TestIgnoreFollowsGitignore(t *testing.T) {
	tests := []struct {
		patterns string
		ignored  []string // directories end with a slash
		kept     []string
	}{
		{"", nil, []string{"a", "a/b"}},
		{"# a\n\n  \n!", nil, []string{"# a", "a", "!"}},
		{"a", []string{"a", "a/", "x/a", "a/b"}, []string{"ab", "x/ab"}},
		{"/a", []string{"a", "a/b"}, []string{"x/a"}},
		{"a/", []string{"a/", "x/a/", "a/b"}, []string{"a", "x/a"}},
		{"a/b", []string{"a/b", "a/b/c"}, []string{"x/a/b", "a"}},
		{"**/a/b", []string{"a/b", "x/a/b", "x/y/a/b"}, []string{"a/x/b"}},
		{"a/**", []string{"a/b", "a/b/c"}, []string{"a/", "a", "x/a/b"}},
		{"a/**/b", []string{"a/b", "a/x/b", "a/x/y/b"}, []string{"ab", "a/xb"}},
		{"*.log", []string{"a.log", "x/a.log", ".log"}, []string{"a.log2"}},
		{"a*b", []string{"ab", "axb"}, []string{"a/b"}},
		{"a**b", []string{"ab", "axb"}, []string{"a/b"}},
		{"a?b", []string{"axb"}, []string{"a/b", "ab"}},
		{"[ab]c", []string{"ac", "bc"}, []string{"cc"}},
		{"[!ab]c", []string{"cc"}, []string{"ac"}},
		{"{a,b}", []string{"{a,b}"}, []string{"a", "b"}},
		{"{a,*}", []string{"{a,b}"}, []string{"a", "b"}},
		{`\#a`, []string{"#a"}, nil},
		{`\!a`, []string{"!a"}, nil},
		{"a ", []string{"a"}, []string{"a "}},
		{`a\ `, []string{"a "}, []string{"a"}},
		{"*\n!a", []string{"b"}, []string{"a", "a/"}},
		{"a\n!a/b", []string{"a/b"}, nil},
		{"a/*\n!a/b", []string{"a/x"}, []string{"a/b", "a/b/c"}},
		{"a/*\n*.log\n!a/b", []string{"a/b/x.log"}, []string{"a/b/x"}},
		{"a\r\nb", []string{"a", "b"}, nil},
		{defaultIgnore, []string{".git/", "main.go~", ".main.go.swp", "x/.main.go.swo", ".#x", "#x#"}, []string{".gitignore", "main.go", "#x"}},
	}
	for _, tt := range tests {
		ig, err := parseIgnore(tt.patterns)
		if err != nil {
			t.Errorf("%q: %v", tt.patterns, err)
		}
		for _, p := range tt.ignored {
			if !ig.above(strings.TrimSuffix(p, "/"), strings.HasSuffix(p, "/")) {
				t.Errorf("%q keeps %s", tt.patterns, p)
			}
		}
		for _, p := range tt.kept {
			if ig.above(strings.TrimSuffix(p, "/"), strings.HasSuffix(p, "/")) {
				t.Errorf("%q ignores %s", tt.patterns, p)
			}
		}
	}
	ig, err := parseIgnore("a\n[b\nc")
	if !errors.Is(err, doublestar.ErrBadPattern) || !strings.Contains(err.Error(), `"[b"`) || len(ig) != 2 {
		t.Errorf("%v, %d rules", err, len(ig))
	}
}

// TestIgnoreMatchesGit compares the result with that of Git for random patterns and paths. It leaves out "**" beside
// other characters, which gitignore(5) defines as "*": Git lets it match slashes if no special character precedes it.
func TestIgnoreMatchesGit(t *testing.T) {
	if _, err := exec.LookPath("git"); err != nil {
		t.Skip(err)
	}
	seed := rand.Uint64()
	t.Log("seed", seed)
	random := rand.New(rand.NewPCG(seed, 1))
	pick := func(from []string) string { return from[random.IntN(len(from))] }
	segments := []string{"a", "b", "ab", "c.x", "*", "a*", "*.x", "?", "**", "[ab]", "[!a]", "\\a", "{a}"}
	names := []string{"a", "b", "ab", "c.x", "ax", "{a}"}
	pattern := func() string {
		var parts []string
		for range 1 + random.IntN(3) {
			parts = append(parts, pick(segments))
		}
		return pick([]string{"", "", "!"}) + pick([]string{"", "", "/"}) + strings.Join(parts, "/") + pick([]string{"", "", "/"})
	}
	var paths []string
	src := t.TempDir()
	for _, a := range names {
		for _, b := range names {
			for _, c := range names[:3] {
				paths = append(paths, a+"1/"+b+"/"+c, a+"/"+b+"/"+c)
			}
		}
	}
	for _, p := range paths {
		write(t, src, p, "")
	}
	if out, err := exec.Command("git", "-C", src, "init").CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	for range 60 {
		var lines []string
		for range 1 + random.IntN(4) {
			lines = append(lines, pattern())
		}
		text := strings.Join(lines, "\n")
		write(t, src, ".gitignore", text)
		cmd := exec.Command("git", "-C", src, "-c", "core.excludesFile=/dev/null", "check-ignore", "--no-index", "--stdin", "-z")
		cmd.Stdin = strings.NewReader(strings.Join(paths, "\x00"))
		out, err := cmd.Output()
		if exit, ok := errors.AsType[*exec.ExitError](err); err != nil && (!ok || exit.ExitCode() != 1) {
			t.Fatal(err)
		}
		git := strings.Split(string(bytes.TrimSuffix(out, []byte{0})), "\x00")
		ig, err := parseIgnore(text)
		if err != nil {
			t.Fatal(err)
		}
		for _, p := range paths {
			if ours, theirs := ig.above(p, false), slices.Contains(git, p); ours != theirs {
				t.Errorf("%q: %s is ignored: %v, by Git: %v", text, filepath.FromSlash(p), ours, theirs)
			}
		}
	}
}

func BenchmarkIgnore(b *testing.B) {
	ig, err := parseIgnore(defaultIgnore + "node_modules/\n/dist\n*.log\n*.pyc\n__pycache__/\n.venv\nbuild/**/out\n!keep.log\n")
	if err != nil {
		b.Fatal(err)
	}
	paths := make([]string, 1000)
	for i := range paths {
		paths[i] = fmt.Sprintf("src/package%d/file%d.go", i%40, i)
	}
	b.ReportAllocs()
	for i := 0; b.Loop(); i++ {
		if ig.ignores(paths[i%len(paths)], false) {
			b.Fatal("ignored")
		}
	}
}
