package docker

import (
	"errors"
	"fmt"
	"runtime"
	"slices"
	"strings"
	"syscall"
	"testing"
	"testing/iotest"

	"github.com/google/go-cmp/cmp"

	"kubevpn/internal/api"
	"kubevpn/internal/kube/podenv"
)

func TestNotStartedNamesTheArchitectureOfAForeignImage(t *testing.T) {
	c := container{name: "web", image: "app:1"}
	failed := fmt.Errorf("starting /app: %w", syscall.ENOEXEC)
	for architecture, want := range map[string]bool{"s390x": true, runtime.GOARCH: false} {
		c.imageInfo.Architecture = architecture
		e := api.AsError(c.notStarted(failed, false))
		if strings.Contains(e.Hint, architecture) != want || !strings.Contains(e.Message, "exec format error") {
			t.Errorf("%s: %s\n%s", architecture, e.Message, e.Hint)
		}
	}
}

func TestIsProxyMatchesAllProxyVariables(t *testing.T) {
	got := slices.DeleteFunc([]string{"HTTP_PROXY=x", "https_proxy=x", "NO_PROXY=", "PROXY=1", "MY_HTTP_PROXY=2", "all_proxy=x", "HOME=/"}, isProxy)
	if diff := cmp.Diff([]string{"PROXY=1", "MY_HTTP_PROXY=2", "HOME=/"}, got); diff != "" {
		t.Errorf("-want +got:\n%s", diff)
	}
}

func TestPrefixWritesWholeLines(t *testing.T) {
	var out strings.Builder
	r := &run{plan: testPlan(t, Config{TTY: true})}
	r.prefix("log", iotest.OneByteReader(strings.NewReader("one\ntwo\r\nthree")), &out)
	if want := "[log] one\r\n[log] two\r\n[log] three\r\n"; out.String() != want {
		t.Errorf("%q, want %q", out.String(), want)
	}
}

func TestPrefixSplitsLongLines(t *testing.T) {
	var out strings.Builder
	r := &run{plan: testPlan(t, Config{})}
	r.prefix("log", strings.NewReader(strings.Repeat("x", lineMost+1)), &out)
	if want := "[log] " + strings.Repeat("x", lineMost) + "\n[log] x\n"; out.String() != want {
		t.Errorf("%d bytes, want %d", out.Len(), len(want))
	}
}

type brokenWriter struct{}

func (brokenWriter) Write([]byte) (int, error) { return 0, errors.New("the terminal is gone") }

func TestPrefixReadsAllAlsoIfNothingCanBeWritten(t *testing.T) {
	r := &run{plan: testPlan(t, Config{})}
	text := strings.NewReader(strings.Repeat("line\n", lineMost))
	r.prefix("log", text, brokenWriter{})
	if text.Len() > 0 {
		t.Errorf("%d bytes were not read", text.Len())
	}
}

// A container of the pod must not move the cursor or set the title of the user's terminal.
func TestPrefixRemovesWhatATerminalInterprets(t *testing.T) {
	r := &run{plan: testPlan(t, Config{})}
	var out strings.Builder
	r.prefix("log", strings.NewReader("a\x1b]0;owned\x07\rb\u202ec\n"), &out)
	if got, want := out.String(), "[log] a]0;ownedbc\n"; got != want {
		t.Errorf("%q, want %q", got, want)
	}
}

func TestMergeKeepsTheLastEntryOfAName(t *testing.T) {
	got := strings.Join(merge([]string{"PATH=/bin", "A=image"}, []string{"A=pod", "B=pod", "B=mine"}), " ")
	if want := "A=pod B=mine PATH=/bin"; got != want {
		t.Errorf("%s, want %s", got, want)
	}
}

// Such a container could create a link there, and the engine follows it as root.
func TestResolveOmitsWhatAnotherContainerCanReplace(t *testing.T) {
	for _, tt := range []struct {
		name     string
		web, log podenv.Mount
		omitted  bool
	}{
		{"all of the volume", podenv.Mount{SubPath: "a/b"}, podenv.Mount{}, true},
		{"a directory above", podenv.Mount{SubPath: "a/b"}, podenv.Mount{SubPath: "a"}, true},
		{"a directory above on this machine", podenv.Mount{Source: "/srv/data/a", SubPath: "a"}, podenv.Mount{Source: "/srv/data"}, true},
		{"all of another volume that is a directory above", podenv.Mount{Source: "/srv/data/a"}, podenv.Mount{Volume: "other", Source: "/srv/data"}, true},
		{"all of this machine", podenv.Mount{Source: "/srv/data/a"}, podenv.Mount{Volume: "other", Source: "/"}, true},
		{"all of it, read-only", podenv.Mount{Source: "/srv/data/a"}, podenv.Mount{Source: "/srv/data", ReadOnly: true}, false},
		{"the same directory", podenv.Mount{Source: "/srv/data/a"}, podenv.Mount{Source: "/srv/data/a"}, false},
		{"a directory beside", podenv.Mount{Source: "/srv/data/ab"}, podenv.Mount{Source: "/srv/data/a"}, false},
		{"a directory below", podenv.Mount{Source: "/srv/data/a"}, podenv.Mount{Source: "/srv/data/a/b"}, false},
		{"both all of the volume", podenv.Mount{}, podenv.Mount{}, false},
	} {
		t.Run(tt.name, func(t *testing.T) {
			tt.web.Path, tt.log.Path = "/cache", "/scratch"
			tt.web.Volume = "scratch"
			if tt.log.Volume == "" {
				tt.log.Volume = "scratch"
			}
			var warned []string
			r := &run{Config: Config{Warn: func(s string) { warned = append(warned, s) }}, network: &network{},
				content: content{mounts: map[string][]podenv.Mount{"web": {tt.web}, "log": {tt.log}}}}
			mounts := r.resolve(t.Context(), container{name: "web"})
			if tt.omitted != (len(mounts) == 0) || tt.omitted != (len(warned) == 1) {
				t.Fatalf("mounted %+v, warned %q; want it omitted: %v", mounts, warned, tt.omitted)
			}
			if tt.omitted && !(strings.Contains(warned[0], "CVE-2017-1002101") && strings.Contains(warned[0], "container log can write")) {
				t.Errorf("warned %q", warned)
			}
		})
	}
}

func TestWriterFindsContainersThatWriteAboveASubPath(t *testing.T) {
	for _, tt := range []struct {
		name string
		log  podenv.Mount
		want string
	}{
		{"all of the volume", podenv.Mount{Volume: "scratch"}, "log"},
		{"a directory above", podenv.Mount{Volume: "scratch", SubPath: "a"}, "log"},
		{"all of it, read-only", podenv.Mount{Volume: "scratch", ReadOnly: true}, ""},
		{"another volume", podenv.Mount{Volume: "other"}, ""},
		{"the same directory", podenv.Mount{Volume: "scratch", SubPath: "a/b"}, ""},
		{"a directory beside", podenv.Mount{Volume: "scratch", SubPath: "a/bc"}, ""},
		{"a directory below", podenv.Mount{Volume: "scratch", SubPath: "a/b/c"}, ""},
	} {
		t.Run(tt.name, func(t *testing.T) {
			web := podenv.Mount{Volume: "scratch", SubPath: "a/b"}
			r := &run{content: content{mounts: map[string][]podenv.Mount{"web": {web}, "log": {tt.log}}}}
			if got := r.writer("web", "scratch/a/b"); got != tt.want {
				t.Errorf("%q, want %q", got, tt.want)
			}
		})
	}
	r := &run{content: content{mounts: map[string][]podenv.Mount{"web": {{Volume: "scratch"}}}}}
	if got := r.writer("log", "scratch"); got != "" {
		t.Errorf("a mount without a subPath has the writer %s", got)
	}
	if got := r.writer("web", "scratch/a"); got != "" {
		t.Errorf("a container is its own writer: %s", got)
	}
}
