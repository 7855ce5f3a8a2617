package build

import (
	"context"
	"path/filepath"

	"kubevpn/test/image"
)

// Hostile builds dir/hostile, the traffic manager that attacks its laptops, and writes its image to dir/hostile.tar.
func Hostile(ctx context.Context, dir, ref string) error {
	if err := test(ctx, dir, "hostile"); err != nil {
		return err
	}
	img, err := image.Build(image.Options{Files: []image.File{{Source: filepath.Join(dir, "hostile"),
		Path: "/traffic"}}, User: "65532:65532"})
	if err != nil {
		return err
	}
	return image.WriteTar(img, ref, filepath.Join(dir, "hostile.tar"))
}
