// Package build builds the product for the suites and the benchmarks as the Makefile does: the laptop's program, and
// the image of the cluster's programs. It needs Go in PATH and a working directory within the module kubevpn/test.
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

// Product calls Kubevpn and Image with the version of the source.
func Product(ctx context.Context, dir, ref string) error {
	if err := Kubevpn(ctx, dir); err != nil {
		return err
	}
	return Image(ctx, dir, ref, "")
}

// Kubevpn builds dir/kubevpn.
func Kubevpn(ctx context.Context, dir string) error {
	root, err := moduleRoot(ctx, productModule)
	if err != nil {
		return err
	}
	return source{root: root}.program(ctx, dir, "kubevpn")
}

// Image builds dir/traffic, and writes its image to dir/image.tar under the name ref. The program reports version, or
// the version of the source if version is empty.
func Image(ctx context.Context, dir, ref, version string) error {
	root, err := moduleRoot(ctx, productModule)
	if err != nil {
		return err
	}
	return source{root, version}.image(ctx, dir, ref)
}

// source is the source of the product, and the version that its programs report (empty: that of the source).
type source struct{ root, version string }

func (s source) image(ctx context.Context, dir, ref string) error {
	if err := s.program(ctx, dir, "traffic"); err != nil {
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

// test builds a program that only the suites run.
func test(ctx context.Context, dir, name string) error {
	root, err := moduleRoot(ctx, "kubevpn/test")
	if err != nil {
		return err
	}
	return compile(ctx, root, "e2e/"+name, "-s -w", filepath.Join(dir, name))
}

// program builds a program of the product.
func (s source) program(ctx context.Context, dir, name string) error {
	flags := "-s -w"
	if s.version != "" {
		flags += " -X kubevpn/internal/process/version.version=" + s.version
	}
	return compile(ctx, s.root, "cmd/"+name, flags, filepath.Join(dir, name))
}

const productModule = "kubevpn"

// moduleRoot returns the directory of one of the repository's modules.
func moduleRoot(ctx context.Context, module string) (string, error) {
	root, err := exec.CommandContext(ctx, "go", "list", "-m", "-f", "{{.Dir}}", module).Output()
	if err != nil {
		return "", fmt.Errorf("finding the module %s: %w", module, err)
	}
	return strings.TrimSpace(string(root)), nil
}

// compile builds a package within its own module, whose directory is root, with the versions in that module's go.mod.
func compile(ctx context.Context, root, pkg, ldflags, output string) error {
	output, err := filepath.Abs(output)
	if err != nil {
		return err
	}
	cmd := exec.CommandContext(ctx, "go", "build", "-trimpath", "-ldflags="+ldflags, "-o", output, "./"+pkg)
	cmd.Dir = root
	cmd.Env = append(os.Environ(), "CGO_ENABLED=0")
	if out, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("building %s: %w\n%s", filepath.Base(pkg), err, out)
	}
	return nil
}
