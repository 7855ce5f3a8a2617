// Package build makes the product for the suites and the benchmarks, as the Makefile makes it for people: the laptop's
// program, and the image of the cluster's. Go has to be in PATH, and the working directory within the module
// kubevpn/test.
package build

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"

	"kubevpn/test/image"
)

// Product makes what Kubevpn and Image make, of the source's own version.
func Product(ctx context.Context, dir, ref string) error {
	if err := Kubevpn(ctx, dir); err != nil {
		return err
	}
	return Image(ctx, dir, ref, "")
}

// Kubevpn builds dir/kubevpn.
func Kubevpn(ctx context.Context, dir string) error { return program(ctx, dir, "kubevpn", "") }

// Image builds dir/traffic, which says that it is of this version (empty: of the source's), and writes its image to
// dir/image.tar, under the name ref.
func Image(ctx context.Context, dir, ref, version string) error {
	if err := program(ctx, dir, "traffic", version); err != nil {
		return err
	}
	iptables, err := image.IPTables(ctx, runtime.GOARCH)
	if err != nil {
		return err
	}
	img, err := image.Build(image.Options{
		Files: []image.File{{Source: filepath.Join(dir, "traffic"), Path: "/traffic"}}, User: "65532:65532",
		Tree: iptables,
	})
	if err != nil {
		return err
	}
	return image.WriteTar(img, ref, filepath.Join(dir, "image.tar"))
}

// App builds dir/app, the application of the suites about intercepts, and writes its image to dir/app.tar.
func App(ctx context.Context, dir, ref string) error {
	if err := test(ctx, dir, "app"); err != nil {
		return err
	}
	program := filepath.Join(dir, "app")
	img, err := image.Build(image.Options{Files: []image.File{{Source: program, Path: "/app"}}, User: "65532:65532"})
	if err != nil {
		return err
	}
	return image.WriteTar(img, ref, filepath.Join(dir, "app.tar"))
}

// test builds a program of the suites, which nothing else needs to run.
func test(ctx context.Context, dir, name string) error {
	return compile(ctx, "kubevpn/test", "e2e/"+name, "-s -w", filepath.Join(dir, name))
}

// program builds a program of the product.
func program(ctx context.Context, dir, name, version string) error {
	flags := "-s -w"
	if version != "" {
		flags += " -X kubevpn/internal/version.version=" + version
	}
	return compile(ctx, "kubevpn", "cmd/"+name, flags, filepath.Join(dir, name))
}

// compile builds a package within its own module: with the versions in that module's go.mod.
func compile(ctx context.Context, module, pkg, ldflags, output string) error {
	output, err := filepath.Abs(output)
	if err != nil {
		return err
	}
	root, err := exec.CommandContext(ctx, "go", "list", "-m", "-f", "{{.Dir}}", module).Output()
	if err != nil {
		return fmt.Errorf("finding the module %s: %w", module, err)
	}
	cmd := exec.CommandContext(ctx, "go", "build", "-trimpath", "-ldflags="+ldflags, "-o", output, "./"+pkg)
	cmd.Dir = strings.TrimSpace(string(root))
	cmd.Env = append(os.Environ(), "CGO_ENABLED=0")
	if out, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("building %s: %w\n%s", filepath.Base(pkg), err, out)
	}
	return nil
}
