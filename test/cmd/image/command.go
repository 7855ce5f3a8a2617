package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os/signal"
	"strings"
	"syscall"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/spf13/cobra"

	"kubevpn/test/image"
)

// options are the flags of both commands.
type options struct {
	ref        string
	files      []string
	entrypoint string
	user       string
	labels     map[string]string
	iptables   bool
	out        string
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
	root.AddCommand(build(stderr), push(stdout))
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
	c := &cobra.Command{
		Use:   "build",
		Short: "Write an image to a file that ctr, docker and kind load",
		Example: "  image build --ref kubevpn/traffic:dev --file bin/traffic:/traffic --user 65532 --out " +
			"bin/kubevpn-image.tar",
		Args: cobra.NoArgs,
		RunE: func(*cobra.Command, []string) error {
			img, err := o.image()
			if err != nil {
				return err
			}
			if err := image.WriteTar(img, o.ref, o.out); err != nil {
				return err
			}
			fmt.Fprintf(stderr, "wrote %s to %s\n", o.ref, o.out)
			return nil
		},
	}
	o.flags(c)
	c.Flags().StringVar(&o.out, "out", "", "the `FILE` to write (a docker archive)")
	require(c, "ref", "file", "out")
	return c
}

func push(stdout io.Writer) *cobra.Command {
	var o options
	c := &cobra.Command{
		Use:     "push",
		Short:   "Push an image to its registry, with docker login's credentials, and print its digest",
		Example: "  image push --ref ghcr.io/me/kubevpn:1.2 --file bin/traffic:/traffic --user 65532",
		Args:    cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			img, err := o.image()
			if err != nil {
				return err
			}
			pushed, err := image.Push(cmd.Context(), img, o.ref)
			if err == nil {
				fmt.Fprintln(stdout, pushed)
			}
			return err
		},
	}
	o.flags(c)
	require(c, "ref", "file")
	return c
}

func (o *options) flags(c *cobra.Command) {
	c.Flags().StringVar(&o.ref, "ref", "", "the image's `NAME`, such as ghcr.io/me/kubevpn:1.2")
	c.Flags().StringArrayVar(&o.files, "file", nil,
		"a static binary and its place in the image, `SOURCE:/PATH`; may be repeated")
	c.Flags().StringVar(&o.entrypoint, "entrypoint", "", "the `PATH` to run (default: the first file's)")
	c.Flags().StringVar(&o.user, "user", "", "the `UID[:GID]` to run as (default: root)")
	c.Flags().BoolVar(&o.iptables, "iptables", false,
		"add this machine's iptables, of both backends, with its libraries")
	c.Flags().StringToStringVar(&o.labels, "label", nil, "a `KEY=VALUE` for the image's configuration; may be repeated")
}

// require marks flags that must be given. It panics on a flag that does not exist: a mistake of this file.
func require(c *cobra.Command, names ...string) {
	for _, name := range names {
		if err := c.MarkFlagRequired(name); err != nil {
			panic(err)
		}
	}
}

func (o *options) image() (v1.Image, error) {
	built := image.Options{User: o.user, Labels: o.labels}
	if o.entrypoint != "" {
		built.Entrypoint = []string{o.entrypoint}
	}
	for _, f := range o.files {
		source, path, found := strings.Cut(f, ":")
		if !found || source == "" || path == "" {
			return nil, errors.New("--file wants SOURCE:/PATH")
		}
		built.Files = append(built.Files, image.File{Source: source, Path: path})
	}
	if o.iptables {
		tree, err := image.IPTables()
		if err != nil {
			return nil, err
		}
		built.Tree = tree
	}
	return image.Build(built)
}
