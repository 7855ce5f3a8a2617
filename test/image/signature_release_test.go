//go:build release

package image

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/google/go-containerregistry/pkg/name"
	"github.com/google/go-containerregistry/pkg/v1/remote"

	"kubevpn/internal/testenv"
)

// TestPushedImageIsSigned signs with a new key, and verifies as a user does. It builds cosign, which takes minutes.
func TestPushedImageIsSigned(t *testing.T) {
	testenv.NeedRoot(t)
	testenv.NeedPrograms(t, "make", "unshare", "git")
	dir := t.TempDir()
	cosign := func(args ...string) (string, error) {
		cmd := exec.CommandContext(t.Context(), "go", append([]string{"tool", "-modfile=tools/cosign/go.mod", "cosign"}, args...)...)
		cmd.Dir = "../.."
		cmd.Env = append(os.Environ(), "COSIGN_PASSWORD=secret")
		out, err := cmd.CombinedOutput()
		return string(out), err
	}
	for _, key := range []string{"ours", "other"} {
		if out, err := cosign("generate-key-pair", "--output-key-prefix", filepath.Join(dir, key)); err != nil {
			t.Fatalf("%v\n%s", err, out)
		}
	}
	pushed := pushProduct(t, copySource(t, time.Now()), newRegistry(t)+"/kubevpn:1", "exec \"$@\"",
		[]string{"COSIGN_PASSWORD=secret"}, "COSIGN_KEY="+filepath.Join(dir, "ours.key"))

	signed := []string{pushed}
	parsed, err := name.NewDigest(pushed)
	if err != nil {
		t.Fatal(err)
	}
	index, err := remote.Index(parsed)
	if err != nil {
		t.Fatal(err)
	}
	manifest, err := index.IndexManifest()
	if err != nil {
		t.Fatal(err)
	}
	for _, m := range manifest.Manifests {
		signed = append(signed, parsed.Context().Digest(m.Digest.String()).String())
	}
	if len(signed) != 3 {
		t.Errorf("pushed %v, want an image and its parts for two architectures", signed)
	}
	for _, ref := range signed {
		if out, err := cosign("verify", "--key", filepath.Join(dir, "ours.pub"), "--insecure-ignore-tlog", ref); err != nil {
			t.Errorf("%s: %v\n%s", ref, err, out)
		}
		out, err := cosign("verify", "--key", filepath.Join(dir, "other.pub"), "--insecure-ignore-tlog", ref)
		if err == nil || !strings.Contains(out, "signature") {
			t.Errorf("%s with another key: %v\n%s", ref, err, out)
		}
	}
}
