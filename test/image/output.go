package image

import (
	"context"
	"fmt"
	"io"
	"os"
	"path/filepath"

	"github.com/google/go-containerregistry/pkg/authn"
	"github.com/google/go-containerregistry/pkg/name"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/empty"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/google/go-containerregistry/pkg/v1/partial"
	"github.com/google/go-containerregistry/pkg/v1/remote"
	"github.com/google/go-containerregistry/pkg/v1/static"
	"github.com/google/go-containerregistry/pkg/v1/tarball"
	"github.com/google/go-containerregistry/pkg/v1/types"
)

// WriteTar writes img under the name ref (such as "ghcr.io/me/kubevpn:1.2") to a docker archive, which `ctr -n k8s.io
// images import`, `docker load` and `kind load image-archive` accept. The file appears whole or not at all.
func WriteTar(img v1.Image, ref, file string) error {
	tag, err := name.NewTag(ref)
	if err != nil {
		return fmt.Errorf("image name %q: %w", ref, err)
	}
	return writeWhole(file, func(w io.Writer) error { return tarball.Write(tag, img, w) })
}

// WriteFile writes a file that all users may read. It appears whole or not at all.
func WriteFile(file string, content []byte) error {
	return writeWhole(file, func(w io.Writer) error {
		_, err := w.Write(content)
		return err
	})
}

func writeWhole(file string, write func(io.Writer) error) error {
	dir := filepath.Dir(file)
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return err
	}
	temp, err := os.CreateTemp(dir, ".image-*")
	if err != nil {
		return err
	}
	defer os.Remove(temp.Name()) // after the rename there is nothing to remove
	if err := write(temp); err != nil {
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

// Push pushes images of several architectures as one image to the registry that ref names, with the credentials of
// `docker login` or of a credential helper in ~/.docker/config.json. It attaches the SBOM in sboms at the same index,
// if there is one, to each image. It returns the reference by digest.
func Push(ctx context.Context, ref string, images []v1.Image, sboms [][]byte) (string, error) {
	parsed, err := name.ParseReference(ref)
	if err != nil {
		return "", fmt.Errorf("image name %q: %w", ref, err)
	}
	index, err := Index(images)
	if err != nil {
		return "", err
	}
	options := []remote.Option{remote.WithContext(ctx), remote.WithAuthFromKeychain(authn.DefaultKeychain)}
	if err := remote.WriteIndex(parsed, index, options...); err != nil {
		return "", fmt.Errorf("pushing %s: %w", ref, err)
	}
	for i, sbom := range sboms {
		if err := attach(parsed.Context(), images[i], sbom, options); err != nil {
			return "", fmt.Errorf("pushing the SBOM of %s: %w", ref, err)
		}
	}
	digest, err := index.Digest()
	if err != nil {
		return "", fmt.Errorf("computing the digest of %s: %w", ref, err)
	}
	return parsed.Context().Digest(digest.String()).String(), nil
}

// attach pushes an SBOM as an OCI referrer of an image in the repository.
func attach(repository name.Repository, img v1.Image, sbom []byte, options []remote.Option) error {
	subject, err := partial.Descriptor(img)
	if err != nil {
		return err
	}
	artifact := mutate.ConfigMediaType(mutate.MediaType(empty.Image, types.OCIManifestSchema1), mediaType)
	artifact, err = mutate.AppendLayers(artifact, static.NewLayer(sbom, mediaType))
	if err != nil {
		return err
	}
	referrer, ok := mutate.Subject(artifact, *subject).(v1.Image)
	if !ok {
		return fmt.Errorf("%T is not an image", artifact)
	}
	digest, err := referrer.Digest()
	if err != nil {
		return err
	}
	return remote.Write(repository.Digest(digest.String()), referrer, options...)
}
