package build

import (
	"context"
	"path/filepath"

	"github.com/google/go-containerregistry/pkg/v1/mutate"

	"kubevpn/test/image"
)

// Show builds the program show and its image into dir: show and show.tar. The image sets its own variables and contains
// a cat.
func Show(ctx context.Context, dir, ref string) error {
	if err := test(ctx, dir, "show"); err != nil {
		return err
	}
	program := filepath.Join(dir, "show")
	img, err := image.Build(image.Options{Files: []image.File{{Source: program, Path: "/show"},
		{Source: program, Path: "/bin/cat"}}})
	if err != nil {
		return err
	}
	config, err := img.ConfigFile()
	if err != nil {
		return err
	}
	config = config.DeepCopy()
	config.Config.Env = []string{"PATH=/bin", "FLAVOUR=vanilla", "COLOR=of the image", "JAVA_HOME=/opt/java",
		"GOPATH=/go"}
	if img, err = mutate.ConfigFile(img, config); err != nil {
		return err
	}
	return image.WriteTar(img, ref, filepath.Join(dir, "show.tar"))
}
