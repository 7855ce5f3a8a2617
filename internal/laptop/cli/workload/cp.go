package workload

import (
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"strings"
	"time"

	"github.com/dustin/go-humanize"
	"github.com/spf13/cobra"

	"kubevpn/internal/api"
	"kubevpn/internal/config"
	"kubevpn/internal/kube/podfiles"
	"kubevpn/internal/laptop/cli/command"
	"kubevpn/internal/laptop/cli/term"
	"kubevpn/internal/laptop/filecopy"
)

type cpOptions struct {
	f         *command.Factory
	kube      command.ClusterFlags
	container string
	output    *term.Format
	workload  string // TYPE/NAME
	copy      filecopy.Copy
}

func newCp(f *command.Factory) *cobra.Command {
	o := &cpOptions{f: f, output: term.NewFormat("text", "json")}
	cmd := &cobra.Command{
		Use:   "cp [POD|TYPE/NAME:]PATH [POD|TYPE/NAME:]PATH",
		Short: "Copy files between this machine and a container",
		Long: "Copy a file or a directory between this machine and a container, in either direction. One of the two\n" +
			"paths has the name of a pod or of a workload before a colon. The command needs no\n" +
			"connection. A file keeps its name in a destination that is a directory; a directory does so if the\n" +
			"destination is written like data/ or ., and otherwise the two are merged.\n\n" +
			"It skips files that are there with the same size and time. After an interruption, the same command\n" +
			"continues the copy. Write a local path with a colon like ./a:b.",
		Example: command.Examples(
			"Copy a directory from a pod of a workload", "kubevpn cp deployment/web:/app/data ./data",
			"Copy a file into a container of a pod", "kubevpn cp dump.sql db-0:/tmp/ -c postgres",
			"Copy what is in this directory", "kubevpn cp . deployment/web:/app",
		),
		ValidArgsFunction: o.complete,
		Args:              func(_ *cobra.Command, args []string) error { return o.parse(args) },
		RunE:              func(cmd *cobra.Command, _ []string) error { return f.Report(cmd.Context(), nil, o.run) },
	}
	o.kube.AddTo(cmd, f)
	cmd.Flags().StringVarP(&o.container, "container", "c", "", "container "+defaultContainer)
	command.CompleteWith(cmd, "container",
		func(cmd *cobra.Command, args []string, text string) ([]cobra.Completion, cobra.ShellCompDirective) {
			_ = o.parse(args) // there may be one so far
			return o.kube.CompleteContainers(cmd, []string{o.workload}, text)
		})
	config.AddFlags(cmd, config.KeyImage, config.KeyManagerNamespace)
	cmd.Flag("image").Usage = "image of the ephemeral container, if the pod needs one (default: the traffic manager's)"
	o.output.AddTo(cmd)
	return cmd
}

// parse sets what to copy.
func (o *cpOptions) parse(args []string) error {
	for n, arg := range args {
		name, path, found := strings.Cut(arg, ":")
		if !strings.Contains(name, "/") {
			name = "pod/" + name
		}
		if found && command.IsWorkload(name) && arg[0] != '.' && arg[0] != '~' && filepath.VolumeName(arg) == "" {
			o.workload, o.copy.Path, o.copy.Upload = name, path, n == 1
		} else {
			o.copy.Local = arg
		}
	}
	if len(args) != 2 || o.copy.Path == "" || o.copy.Local == "" {
		return api.Errorf(api.ExitUsage, "`kubevpn cp` takes a path of this machine and one of a container").
			WithHint("for example `kubevpn cp deployment/web:/app/data ./data` or `kubevpn cp ./data web-0:/app`")
	}
	return nil
}

// complete completes the name of a workload, and files of this machine.
func (o *cpOptions) complete(cmd *cobra.Command, args []string, text string) (all []cobra.Completion,
	how cobra.ShellCompDirective) {
	if _ = o.parse(append(args, text)); o.workload == "" && len(args) < 2 {
		all, how = o.kube.CompleteWorkloads(cmd, nil, text)
	}
	switch {
	case len(all) == 0:
		return nil, cobra.ShellCompDirectiveDefault
	case strings.Contains(text, "/"):
		all = api.Texts(all, func(name string) string { return name + ":" })
	}
	return all, how | cobra.ShellCompDirectiveNoSpace
}

// run opens the files of the container, and copies.
func (o *cpOptions) run(ctx context.Context, on func(api.Event), quiet func()) error {
	l, err := o.kube.Login(ctx, on)
	if err != nil {
		return err
	}
	w, pod, err := l.RunningPod(ctx, o.workload)
	if err != nil {
		return err
	}
	container, err := w.Container(o.container)
	if err != nil {
		return err
	}
	image := l.Config.Image
	if !o.kube.Changed("image") {
		asks := command.Consenting{Factory: o.f, Cluster: l.Cluster, Consent: &api.Consent{}}
		if image, err = asks.Image(ctx, l.Config, l.Prepared.Namespace); err != nil {
			return err
		}
	}
	files, err := podfiles.Open(ctx, podfiles.Source{Cluster: l.Cluster, Pod: pod, Container: container.Name,
		Image: image}, o.copy.Path, o.copy.Upload)
	if err != nil {
		return err
	}
	o.copy.Conn, o.copy.Remote = files.Conn, files.Name
	on(api.Event{Step: "Opening the files of " + pod.Name, Detail: files.How, Done: true})
	return o.transfer(ctx, on, quiet)
}

// transfer copies, and prints the result.
func (o *cpOptions) transfer(ctx context.Context, on func(api.Event), quiet func()) error {
	start, shown := time.Now(), time.Now()
	o.copy.Progress = func(s filecopy.Stats) {
		if time.Since(shown) > time.Second {
			shown = time.Now()
			on(api.Event{Step: "Copying", Detail: fmt.Sprintf("%d of %d files, %s of %s", s.Files, s.TotalFiles,
				humanize.Bytes(uint64(s.Bytes)), humanize.Bytes(uint64(max(s.TotalBytes, s.Bytes))))})
		}
	}
	s, err := o.copy.Run(ctx)
	for _, note := range s.Notes {
		on(api.Event{Warning: note})
	}
	quiet()
	const again = "The same command continues the copy."
	switch _, explained := errors.AsType[*api.Error](err); {
	case ctx.Err() != nil:
		return api.Errorf(api.ExitInterrupted, "interrupted after %s", api.Count(s.Files, "file")).WithHint(again)
	case explained:
		return err
	case err != nil:
		return api.Errorf(api.ExitLost, "%w", err).WithHint(again)
	}
	took := time.Since(start).Seconds()
	if o.output.ForPeople() {
		fmt.Fprintf(o.f.Out, "copied %s, %s in %.1fs (skipped %d that were there)\n", api.Count(s.Files, "file"),
			humanize.Bytes(uint64(s.Bytes)), took, s.Skipped)
	} else {
		err = o.output.Print(o.f.Out, map[string]any{"files": s.Files, "bytes": s.Bytes, "skipped": s.Skipped,
			"seconds": took})
	}
	if err == nil && s.Failed > 0 {
		return api.Errorf(api.ExitUnexpected, "cannot copy %s", api.Count(s.Failed, "file")).
			WithHint("The warnings have the causes. The same command tries these files again.")
	}
	return err
}
