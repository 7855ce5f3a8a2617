//go:build release && linux

package release

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// TestInstallScriptVerifiesSignatureOfSnapshot verifies the signature that goreleaser made, with a real cosign, which
// takes minutes to build. An attacker who changes an archive can change its checksum too, but not the signature.
func TestInstallScriptVerifiesSignatureOfSnapshot(t *testing.T) {
	key := os.Getenv("COSIGN_KEY")
	if key == "" {
		t.Skip("SKIPPED: COSIGN_KEY is not set, so the snapshot is not signed; scripts/nightly release sets it")
	}
	root, err := filepath.Abs("../..")
	if err != nil {
		t.Fatal(err)
	}
	cosign := "#!/bin/sh\nexec go -C '" + root + "' tool -modfile=tools/cosign/go.mod cosign \"$@\"\n"
	programs := t.TempDir()
	if err := os.WriteFile(filepath.Join(programs, "cosign"), []byte(cosign), 0o755); err != nil {
		t.Fatal(err)
	}
	t.Setenv("PATH", programs+":"+os.Getenv("PATH"))
	ours := strings.TrimSuffix(key, ".key") + ".pub"
	prefix := t.TempDir()
	if out, err := install(t, prefix, "--from", dist, "--key", ours); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	checkVersion(t, filepath.Join(prefix, "bin", "kubevpn"))

	other := filepath.Join(t.TempDir(), "other")
	run(t, "cosign", "generate-key-pair", "--output-key-prefix", other)
	rejects(t, "signature of checksums.txt is wrong", "--from", dist, "--key", other+".pub")

	changed := published(t, version(t)) // another program, with its checksum
	write(t, filepath.Join(changed, "checksums.txt.sigstore.json"), read(t, "checksums.txt.sigstore.json"))
	if out, err := install(t, t.TempDir(), "--from", changed); err != nil {
		t.Fatalf("the changed release has a wrong checksum: %v\n%s", err, out)
	}
	rejects(t, "signature of checksums.txt is wrong", "--from", changed, "--key", ours)
}
