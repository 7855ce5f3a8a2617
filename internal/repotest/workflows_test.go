package repotest

import (
	"maps"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"sigs.k8s.io/yaml"
)

// The workflows run targets of the Makefile, so that everybody can repeat what they do. Exceptions prepare a runner.
func TestWorkflowsOnlyCallMake(t *testing.T) {
	makefile, err := os.ReadFile(filepath.Join(root(t), "Makefile"))
	if err != nil {
		t.Fatal(err)
	}
	files, err := filepath.Glob(filepath.Join(root(t), ".github/workflows/*.y*ml"))
	if err != nil || len(files) < 4 {
		t.Fatalf("got the workflows %v, %v", files, err)
	}
	for _, file := range files {
		text, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		for _, m := range regexp.MustCompile(`(?m)^\s*(?:- )?run: (.*)$`).FindAllStringSubmatch(string(text), -1) {
			words := strings.Fields(m[1])
			switch {
			case strings.HasPrefix(m[1], "git config --global --add safe.directory "):
			case len(words) < 2 || words[0] != "make":
				t.Errorf("%s runs %q and not make", filepath.Base(file), m[1])
			case !regexp.MustCompile(`(?m)^(?:[\w-]+ )*` + words[1] + `(?: [\w-]+)*:`).Match(makefile):
				t.Errorf("%s: the Makefile has no target %s", filepath.Base(file), words[1])
			}
		}
	}
}

// A job that may write runs only actions of a known commit: whoever can move a tag of an action must not get its rights.
func TestWorkflowsThatMayWritePinActions(t *testing.T) {
	files, err := filepath.Glob(filepath.Join(root(t), ".github/workflows/*.y*ml"))
	if err != nil {
		t.Fatal(err)
	}
	type permissions = map[string]string
	pinned := 0
	for _, file := range files {
		text, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		var workflow struct {
			Permissions permissions
			Jobs        map[string]struct {
				Permissions permissions
				Steps       []struct{ Uses string }
			}
		}
		if err := yaml.Unmarshal(text, &workflow); err != nil {
			t.Fatalf("%s: %v", file, err)
		}
		if workflow.Permissions == nil {
			t.Errorf("%s has no permissions: its jobs have those of the repository's settings", filepath.Base(file))
		}
		for name, job := range workflow.Jobs {
			granted := job.Permissions
			if granted == nil {
				granted = workflow.Permissions
			}
			if !slices.Contains(slices.Collect(maps.Values(granted)), "write") {
				continue
			}
			for _, step := range job.Steps {
				if step.Uses == "" {
					continue
				}
				pinned++
				if !regexp.MustCompile(`@[0-9a-f]{40}$`).MatchString(step.Uses) {
					t.Errorf("%s: the job %s may write and uses %s, which is no commit", filepath.Base(file), name, step.Uses)
				}
			}
		}
	}
	if pinned == 0 {
		t.Error("no job that may write uses an action: this test reads the workflows wrongly")
	}
}

// The job that drafts a release attests the archives and the image, and adds the provenance to the draft afterwards.
func TestReleaseAttestsArchivesAndImage(t *testing.T) {
	text, err := os.ReadFile(filepath.Join(root(t), ".github/workflows/release.yaml"))
	if err != nil {
		t.Fatal(err)
	}
	var workflow struct {
		Jobs map[string]struct {
			Permissions map[string]string
			Steps       []struct {
				Uses, Run string
				With      map[string]any
			}
		}
	}
	if err := yaml.Unmarshal(text, &workflow); err != nil {
		t.Fatal(err)
	}
	draft := workflow.Jobs["draft"]
	for _, name := range []string{"id-token", "attestations", "packages", "contents"} {
		if draft.Permissions[name] != "write" {
			t.Errorf("the job may not write %s", name)
		}
	}
	var did []string
	for _, step := range draft.Steps {
		switch attests := strings.HasPrefix(step.Uses, "actions/attest-build-provenance@"); {
		case attests && step.With["push-to-registry"] == true:
			did = append(did, "image")
		case attests && step.With["subject-checksums"] == "bin/dist/checksums.txt":
			did = append(did, "archives")
		case strings.HasPrefix(step.Run, "make "):
			did = append(did, strings.Fields(step.Run)[1])
		}
	}
	if want := []string{"release", "image", "archives", "release-provenance"}; !slices.Equal(did, want) {
		t.Errorf("the job does %v, want %v", did, want)
	}
}

// Without a toolchain line, a release is built by the oldest Go that can build it. scripts/toolchain, which needs the
// network, checks that the line names the newest patch release.
func TestModulesNameTheSameToolchain(t *testing.T) {
	var files []string
	for _, pattern := range []string{"go.mod", "test/go.mod", "tools/go.mod", "tools/*/go.mod"} {
		found, err := filepath.Glob(filepath.Join(root(t), pattern))
		if err != nil || len(found) == 0 {
			t.Fatalf("no %s: %v", pattern, err)
		}
		files = append(files, found...)
	}
	lines := map[string][]string{}
	for _, file := range files {
		text, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		line := regexp.MustCompile(`(?m)^toolchain go\d+\.\d+\.\d+$`).FindString(string(text))
		lines[line] = append(lines[line], file)
	}
	if len(lines) != 1 || lines[""] != nil {
		t.Errorf("the toolchain lines differ, or are missing: %q; run scripts/toolchain update", lines)
	}
}
