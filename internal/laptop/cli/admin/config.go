package admin

import (
	"context"
	"fmt"
	"io"
	"strings"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
	"sigs.k8s.io/yaml"

	"kubevpn/internal/api"
	"kubevpn/internal/config"
	"kubevpn/internal/laptop/cli/command"
	"kubevpn/internal/laptop/cli/term"
)

type configOptions struct {
	f       *command.Factory
	kube    command.ClusterFlags
	origins bool
	output  *term.Format
}

func newConfig(f *command.Factory) *cobra.Command {
	cmd := &cobra.Command{
		Use:   "config",
		Short: "Show the settings",
		Long: "Show the settings of all commands. A flag takes precedence over the environment, the environment\n" +
			"over your file, your file over the client defaults of the cluster, and these over the built-in default.",
		Example: command.Examples("Show each setting and where it comes from", "kubevpn config view --show-origin"),
	}
	o := &configOptions{f: f, output: term.NewObjectFormat("text")}
	view := &cobra.Command{
		Use:   "view",
		Short: "Print the settings in the format of the configuration file",
		Long: "Print the settings that have a value, in the format of the configuration file. The command reads the\n" +
			"client defaults from the cluster. If that fails, it warns and prints the other settings.",
		Example: command.Examples(
			"Print the settings", "kubevpn config view",
			"Show where each setting comes from", "kubevpn config view --show-origin",
			"Show those for another cluster", "kubevpn config view --show-origin --context staging",
		),
		RunE: func(cmd *cobra.Command, _ []string) error { return f.Report(cmd.Context(), nil, o.view) },
	}
	view.Flags().BoolVar(&o.origins, "show-origin", false, "print all settings, with the origin of each value")
	o.output.AddTo(view)
	o.kube.AddTo(view, f)
	command.Section(view, command.SectionConnection, func(*pflag.FlagSet) {
		config.AddFlags(view, config.KeyManagerNamespace)
	})
	cmd.AddCommand(view)
	return cmd
}

func (o *configOptions) view(ctx context.Context, on func(api.Event), quiet func()) error {
	cfg, err := o.kube.Settings()
	if err != nil {
		return err
	}
	s, err := o.kube.LoginWithDefaults(ctx, on, nil)
	quiet()
	switch {
	case ctx.Err() != nil:
		return ctx.Err()
	case err != nil:
		fmt.Fprintf(o.f.Errout, "! without the client defaults of the cluster: %s\n", api.OneLine(err.Error()))
	default:
		cfg = s.Config
	}
	switch all := cfg.Settings(); {
	case !o.output.ForPeople():
		names := api.Texts(all, func(s api.Setting) string { return "setting/" + s.Key })
		list := api.SettingList{TypeMeta: api.Type(api.KindSettingList), Items: all}
		return o.output.Print(o.f.Out, list, names...)
	case o.origins:
		return printOrigins(o.f.Out, all)
	default:
		return printSettings(o.f.Out, all)
	}
}

// printOrigins prints a table of all settings.
func printOrigins(out io.Writer, all []api.Setting) error {
	t := term.NewTable(out, false)
	t.Row([]string{"KEY", "VALUE", "ORIGIN"}, nil)
	for _, s := range all {
		origin := string(s.Origin)
		if s.Source != "" {
			origin += " (" + s.Source + ")"
		}
		t.Row([]string{s.Key, term.Dash(term.Printable(s.Value)), term.Printable(origin)}, nil)
	}
	return t.Flush()
}

// printSettings prints the settings that have a value as YAML. The file also accepts a list as one text.
func printSettings(w io.Writer, all []api.Setting) error {
	for _, s := range all {
		if s.Value == "" {
			continue
		}
		var value any = s.Value
		if values := strings.Split(s.Value, ","); len(values) > 1 {
			value = values
		} else if s.Value == "true" || s.Value == "false" {
			value = s.Value == "true"
		}
		text, err := yaml.Marshal(map[string]any{s.Key: value})
		if err != nil {
			return fmt.Errorf("cannot encode the settings as YAML: %w", err)
		}
		if _, err := w.Write(text); err != nil {
			return err
		}
	}
	return nil
}
