package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"os/signal"
	"slices"
	"strings"
	"syscall"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/spf13/cobra"

	"kubevpn/test/image"
)

// options are the flags of build and push.
type options struct {
	ref        string
	files      []string
	entrypoint string
	user       string
	labels     map[string]string
	iptables   bool
}

func run(args []string, stdout, stderr io.Writer) int {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM)
	defer stop()
	root := &cobra.Command{
		Use:           "image",
		Short:         "Make a container image of static binaries, without Docker",
		SilenceUsage:  true,
		SilenceErrors: true,
	}
	root.AddCommand(build(stderr), push(stdout, stderr), sbom(stdout), lock(stderr))
	root.SetArgs(args)
	root.SetOut(stdout)
	root.SetErr(stderr)
	if err := root.ExecuteContext(ctx); err != nil {
		fmt.Fprintln(stderr, "image:", err)
		return 1
	}
	return 0
}

func build(stderr io.Writer) *cobra.Command {
	var o options
	var out string
	c := &cobra.Command{
		Use:   "build",
		Short: "Write an image of one architecture to a file that ctr, docker and kind load, and its SBOM beside it",
		Example: "  image build --ref kubevpn/traffic:dev --file bin/traffic:/traffic --user 65532 --out " +
			"bin/kubevpn-image.tar",
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			images, sboms, err := o.images(cmd.Context())
			if err != nil {
				return err
			}
			if len(images) != 1 {
				return errors.New("the files are of several architectures: " +
					"build one image for each, or push them as one image")
			}
			document := strings.TrimSuffix(out, ".tar") + ".spdx.json"
			if err := image.WriteFile(document, sboms[0]); err != nil {
				return err
			}
			if err := image.WriteTar(images[0], o.ref, out); err != nil {
				return err
			}
			fmt.Fprintf(stderr, "wrote %s to %s, and its SBOM to %s\n", o.ref, out, document)
			return nil
		},
	}
	o.flags(c)
	c.Flags().StringVar(&out, "out", "", "the `FILE` to write (a docker archive)")
	require(c, "ref", "file", "out")
	return c
}

func push(stdout, stderr io.Writer) *cobra.Command {
	var o options
	c := &cobra.Command{
		Use: "push",
		Short: "Push an image of all architectures of its files to its registry, with docker login's credentials and " +
			"with SBOMs, and print its digest",
		Example: "  image push --ref ghcr.io/me/kubevpn:1.2 --user 65532 \\\n" +
			"    --file bin/linux-amd64/traffic:/traffic --file bin/linux-arm64/traffic:/traffic",
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			images, sboms, err := o.images(cmd.Context())
			if err != nil {
				return err
			}
			pushed, err := image.Push(cmd.Context(), o.ref, images, sboms)
			if err != nil {
				return err
			}
			fmt.Fprintln(stdout, pushed)
			fmt.Fprintf(stderr, "\nTo use it, write this line into ~/.config/kubevpn/config.yaml:\nimage: %s\n", pushed)
			return nil
		},
	}
	o.flags(c)
	require(c, "ref", "file")
	return c
}

func sbom(stdout io.Writer) *cobra.Command {
	var out, version string
	c := &cobra.Command{
		Use:     "sbom FILE",
		Short:   "Write the SBOM (SPDX 2.3, JSON) of an archive (.tar.gz, .zip) or a program: its Go modules",
		Example: "  image sbom kubevpn_1.2_linux_amd64.tar.gz --version 1.2 --out kubevpn_1.2_linux_amd64.spdx.json",
		Args:    cobra.ExactArgs(1),
		RunE: func(_ *cobra.Command, args []string) error {
			document, err := image.ArchiveSBOM(args[0], version)
			if err != nil {
				return err
			}
			if out == "" {
				_, err = stdout.Write(document)
				return err
			}
			return image.WriteFile(out, document)
		},
	}
	c.Flags().StringVar(&version, "version", "", "the `VERSION` of what the archive contains")
	c.Flags().StringVar(&out, "out", "", "the `FILE` to write (default: standard output)")
	return c
}

func lock(stderr io.Writer) *cobra.Command {
	var out string
	c := &cobra.Command{
		Use:   "lock",
		Short: "Lock the current versions of Debian's packages with iptables",
		Args:  cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			l, err := image.NewLock(cmd.Context())
			if err != nil {
				return err
			}
			if err := l.Write(out); err != nil {
				return err
			}
			fmt.Fprintf(stderr, "wrote the versions of %d packages to %s\n", len(l.Packages), out)
			return nil
		},
	}
	c.Flags().StringVar(&out, "out", "", "the `FILE` to write")
	require(c, "out")
	return c
}

func (o *options) flags(c *cobra.Command) {
	c.Flags().StringVar(&o.ref, "ref", "", "the image's `NAME`, such as ghcr.io/me/kubevpn:1.2")
	c.Flags().StringArrayVar(&o.files, "file", nil,
		"a static binary and its place in the image, `SOURCE:/PATH`; may be repeated")
	c.Flags().StringVar(&o.entrypoint, "entrypoint", "", "the `PATH` to run (default: the first file's)")
	c.Flags().StringVar(&o.user, "user", "", "the `UID[:GID]` to run as (default: root)")
	c.Flags().BoolVar(&o.iptables, "iptables", false,
		"add Debian's iptables, of both backends, with its libraries; the lock names the packages")
	c.Flags().StringToStringVar(&o.labels, "label", nil, "a `KEY=VALUE` for the image's configuration; may be repeated")
}

// require marks required flags. It panics on a flag that does not exist, because that is a programming error.
func require(c *cobra.Command, names ...string) {
	for _, name := range names {
		if err := c.MarkFlagRequired(name); err != nil {
			panic(err)
		}
	}
}

// images builds an image for each architecture of the files, and its SBOM.
func (o *options) images(ctx context.Context) ([]v1.Image, [][]byte, error) {
	files := map[string][]image.File{}
	for _, f := range o.files {
		source, path, found := strings.Cut(f, ":")
		if !found || source == "" || path == "" {
			return nil, nil, errors.New("--file wants SOURCE:/PATH")
		}
		arch, err := image.Architecture(source)
		if err != nil {
			return nil, nil, fmt.Errorf("%s: %w", source, err)
		}
		files[arch] = append(files[arch], image.File{Source: source, Path: path})
	}
	var images []v1.Image
	var sboms [][]byte
	for _, arch := range slices.Sorted(maps.Keys(files)) {
		built := image.Options{Files: files[arch], User: o.user, Labels: o.labels,
			Entrypoint: []string{cmp.Or(o.entrypoint, files[arch][0].Path)}}
		if o.iptables {
			tree, err := image.IPTables(ctx, arch)
			if err != nil {
				return nil, nil, err
			}
			built.Tree = tree
		}
		img, err := image.Build(built)
		if err != nil {
			return nil, nil, err
		}
		document, err := image.ImageSBOM(img, o.ref, built)
		if err != nil {
			return nil, nil, err
		}
		images, sboms = append(images, img), append(sboms, document)
	}
	return images, sboms, nil
}
