//go:build release && linux

package release

import (
	"encoding/json"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

// repository returns the root of this repository.
func repository(t *testing.T) string {
	t.Helper()
	root, err := filepath.Abs("../..")
	if err != nil {
		t.Fatal(err)
	}
	return root
}

// realCosign puts cosign into PATH, which takes minutes to build.
func realCosign(t *testing.T) {
	t.Helper()
	cosign := "#!/bin/sh\nexec go -C '" + repository(t) + "' tool -modfile=tools/cosign/go.mod cosign \"$@\"\n"
	programs := t.TempDir()
	if err := os.WriteFile(filepath.Join(programs, "cosign"), []byte(cosign), 0o755); err != nil {
		t.Fatal(err)
	}
	t.Setenv("PATH", programs+":"+os.Getenv("PATH"))
}

// newKey returns the path of a new pair of keys, without .key and .pub. Its password is in the environment.
func newKey(t *testing.T) string {
	t.Helper()
	prefix := filepath.Join(t.TempDir(), "cosign")
	run(t, "cosign", "generate-key-pair", "--output-key-prefix", prefix)
	return prefix
}

// TestInstallScriptVerifiesSignatureOfSnapshot verifies the signatures that goreleaser made. An attacker who changes an
// archive can change its checksum too, but not the signature.
func TestInstallScriptVerifiesSignatureOfSnapshot(t *testing.T) {
	key := os.Getenv("COSIGN_KEY")
	if key == "" {
		t.Skip("SKIPPED: COSIGN_KEY is not set, so the snapshot is not signed; scripts/nightly release sets it")
	}
	realCosign(t)
	ours := strings.TrimSuffix(key, ".key") + ".pub"
	prefix := t.TempDir()
	out, err := install(t, prefix, "--from", dist, "--key", ours)
	if err != nil || !strings.Contains(out, "verified: signature, checksum and provenance\n") {
		t.Fatalf("%v\n%s", err, out)
	}
	checkVersion(t, filepath.Join(prefix, "bin", "kubevpn"))
	rejects(t, "signature of checksums.txt is wrong", "--from", dist, "--key", newKey(t)+".pub")

	changed := published(t, version(t)) // another program, with its checksum
	write(t, filepath.Join(changed, "checksums.txt.sigstore.json"), read(t, "checksums.txt.sigstore.json"))
	if out, err := install(t, t.TempDir(), "--from", changed); err != nil {
		t.Fatalf("the changed release has a wrong checksum: %v\n%s", err, out)
	}
	rejects(t, "signature of checksums.txt is wrong", "--from", changed, "--key", ours)
}

// TestInstallScriptVerifiesProvenance signs releases as scripts/release does. Whoever can sign checksums, but has not
// built the archive, has only the provenance of another archive or one by another key.
func TestInstallScriptVerifiesProvenance(t *testing.T) {
	realCosign(t)
	t.Setenv("COSIGN_PASSWORD", "secret")
	t.Setenv("REPOSITORY", "some.one/kubevpn")
	ours, others := newKey(t), newKey(t)
	signed := func(version, key string) string {
		dir := published(t, version)
		t.Setenv("VERSION", version)
		t.Setenv("COSIGN_KEY", key+".key")
		sums := filepath.Join(dir, "checksums.txt")
		run(t, filepath.Join(repository(t), "scripts/release"), "sign", sums, sums+".sigstore.json")
		return dir
	}
	dir := signed("1.2.0", ours)
	archive := "kubevpn_1.2.0_" + host + ".tar.gz"
	provenance := filepath.Join(dir, "provenance.intoto.jsonl")
	checkProvenance(t, provenance, archive)
	out, err := install(t, t.TempDir(), "--from", dir, "--key", ours+".pub")
	if err != nil || !strings.Contains(out, "verified: signature, checksum and provenance\n") {
		t.Fatalf("%v\n%s", err, out)
	}
	for name, from := range map[string]string{
		"of another archive": signed("1.3.0", ours), "by another key": signed("1.2.0", others),
	} {
		t.Run(name, func(t *testing.T) {
			bundle, err := os.ReadFile(filepath.Join(from, "provenance.intoto.jsonl"))
			if err != nil {
				t.Fatal(err)
			}
			write(t, provenance, bundle)
			rejects(t, "provenance of "+archive+" is wrong", "--from", dir, "--key", ours+".pub")
		})
	}
	write(t, filepath.Join(dir, archive), []byte("changed"))
	rejects(t, "instead of", "--from", dir, "--key", ours+".pub")
}

// checkProvenance checks that a bundle has SLSA provenance of each file in checksums.txt, and names the source.
func checkProvenance(t *testing.T, file, archive string) {
	t.Helper()
	content, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	var bundle struct{ DSSEEnvelope struct{ Payload []byte } }
	var statement struct {
		PredicateType string
		Subject       []struct{ Name string }
		Predicate     struct {
			BuildDefinition struct {
				ResolvedDependencies []struct {
					URI    string
					Digest struct{ GitCommit string }
				}
			}
		}
	}
	if err := json.Unmarshal(content, &bundle); err != nil {
		t.Fatal(err)
	}
	if err := json.Unmarshal(bundle.DSSEEnvelope.Payload, &statement); err != nil {
		t.Fatal(err)
	}
	var names []string
	for _, s := range statement.Subject {
		names = append(names, s.Name)
	}
	want := []string{"kubevpn_1.2.0_plan9_amd64.tar.gz", archive, archive + ".spdx.json"}
	if !slices.Equal(names, want) || statement.PredicateType != "https://slsa.dev/provenance/v1" {
		t.Errorf("got %s of %v, want provenance of %v", statement.PredicateType, names, want)
	}
	commit := strings.TrimSpace(run(t, "git", "rev-parse", "HEAD"))
	sources := statement.Predicate.BuildDefinition.ResolvedDependencies
	if len(sources) != 1 || sources[0].URI != "git+https://github.com/some.one/kubevpn" || sources[0].Digest.GitCommit != commit {
		t.Errorf("got the sources %+v, want %s", sources, commit)
	}
}
