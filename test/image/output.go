package image

import (
	"context"
	"fmt"
	"os"
	"path/filepath"

	"github.com/google/go-containerregistry/pkg/authn"
	"github.com/google/go-containerregistry/pkg/name"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/remote"
	"github.com/google/go-containerregistry/pkg/v1/tarball"
)

// WriteTar writes img under the name ref (such as "ghcr.io/me/kubevpn:1.2") to a docker archive, which `ctr -n k8s.io
// images import`, `docker load` and `kind load image-archive` take. The file appears whole or not at all.
func WriteTar(img v1.Image, ref, file string) error {
	tag, err := name.NewTag(ref)
	if err != nil {
		return fmt.Errorf("image name %q: %w", ref, err)
	}
	dir := filepath.Dir(file)
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return err
	}
	temp, err := os.CreateTemp(dir, ".image-*.tar")
	if err != nil {
		return err
	}
	defer os.Remove(temp.Name()) // after the rename there is nothing to remove
	if err := tarball.Write(tag, img, temp); err != nil {
		temp.Close()
		return fmt.Errorf("writing %s: %w", file, err)
	}
	if err := temp.Chmod(0o644); err != nil {
		temp.Close()
		return err
	}
	if err := temp.Close(); err != nil {
		return fmt.Errorf("writing %s: %w", file, err)
	}
	return os.Rename(temp.Name(), file)
}

// Push pushes img to the registry that ref names, with the credentials that `docker login` or a credential helper
// left in ~/.docker/config.json. It returns the reference by digest that the registry now has.
func Push(ctx context.Context, img v1.Image, ref string) (string, error) {
	parsed, err := name.ParseReference(ref)
	if err != nil {
		return "", fmt.Errorf("image name %q: %w", ref, err)
	}
	err = remote.Write(parsed, img, remote.WithContext(ctx), remote.WithAuthFromKeychain(authn.DefaultKeychain))
	if err != nil {
		return "", fmt.Errorf("pushing %s: %w", ref, err)
	}
	digest, err := img.Digest()
	if err != nil {
		return "", fmt.Errorf("computing the digest of %s: %w", ref, err)
	}
	return parsed.Context().Digest(digest.String()).String(), nil
}
