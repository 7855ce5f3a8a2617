package workload

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"regexp"
	"strings"

	"github.com/spf13/cobra"

	"kubevpn/internal/api"
	"kubevpn/internal/config"
	"kubevpn/internal/kube/podenv"
	"kubevpn/internal/laptop/cli/command"
	"kubevpn/internal/laptop/cli/term"
	"kubevpn/internal/laptop/dev"
)

type envOptions struct {
	f         *command.Factory
	workload  string
	kube      command.ClusterFlags
	container string
	file      string
	output    *term.Format
}

func newEnv(f *command.Factory) *cobra.Command {
	o := &envOptions{f: f, output: term.NewFormat("dotenv", "shell", "json", "docker")}
	cmd := &cobra.Command{
		Use:   "env TYPE/NAME",
		Short: "Print the environment variables of a workload's container",
		Long: "Print the environment variables of a container of a workload, with the values of its ConfigMaps,\n" +
			"Secrets and fields, and the variables of its image if a pod runs. The command needs no connection.\n" +
			"Like `kubevpn dev`, the formats dotenv and shell leave out variables that decide what programs of\n" +
			"this machine execute, such as PATH.",
		Example: command.Examples(
			"Print the variables for a .env file", "kubevpn env deployment/web",
			"Write them to a file that only you can read", "kubevpn env deployment/web --file .env",
			"Set them in this shell", "eval \"$(kubevpn env deployment/web -o shell)\"",
			"Run an image with them", "kubevpn env deployment/web -c app -o docker --file web.env",
			"docker run --env-file web.env web:dev",
		),
		Args: oneWorkload(""),
		RunE: func(cmd *cobra.Command, args []string) error {
			o.workload = args[0]
			return f.Report(cmd.Context(), nil, o.run)
		},
		ValidArgsFunction: o.kube.CompleteWorkloads,
	}
	o.kube.AddTo(cmd, f)
	cmd.Flags().StringVarP(&o.container, "container", "c", "",
		"container "+defaultContainer)
	cmd.Flags().StringVar(&o.file, "file", "", "file to write with mode 0600, instead of standard output")
	command.CompleteWith(cmd, "container", o.kube.CompleteContainers)
	o.output.AddTo(cmd)
	o.kube.PickWorkload(cmd)
	return cmd
}

func (o *envOptions) run(ctx context.Context, on func(api.Event), quiet func()) error {
	c, err := o.kube.Login(ctx, on)
	if err != nil {
		return err
	}
	warn := func(text string) { on(api.Event{Warning: text}) }
	local := o.output.String() == "dotenv" || o.output.String() == "shell"
	variables, err := dev.Environment(ctx, dev.Target{
		Cluster: c.Cluster, Namespace: c.Prepared.Namespace, Workload: o.workload, Container: o.container,
	}, local, warn)
	if err != nil {
		return c.ExplainContext(ctx, err)
	}
	text, err := formatEnvironment(o.output.String(), variables, warn)
	quiet()
	switch {
	case err != nil:
		return err
	case o.file != "":
		if err := config.WriteFile(o.file, text); err != nil {
			return api.Errorf(api.ExitUsage, "cannot write the --file: %w", err)
		}
		return nil
	}
	_, err = o.f.Exact().Write(text)
	return err
}

// The names that each format can contain.
var (
	shellName  = regexp.MustCompile(`^[A-Za-z_][A-Za-z0-9_]*$`)
	dotenvName = regexp.MustCompile(`^[A-Za-z_][A-Za-z0-9_.-]*$`)
	dockerName = regexp.MustCompile(`^[^#=\s][^=\s]*$`)
)

// formatEnvironment formats variables. It calls warn for those whose names the format cannot contain.
func formatEnvironment(format string, variables []podenv.Variable, warn func(string)) ([]byte, error) {
	var b bytes.Buffer
	if format == "json" {
		all := map[string]string{}
		for _, v := range variables {
			all[v.Name] = v.Value
		}
		enc := json.NewEncoder(&b)
		enc.SetEscapeHTML(false)
		enc.SetIndent("", "  ")
		err := enc.Encode(all)
		return b.Bytes(), err
	}
	names := map[string]*regexp.Regexp{"shell": shellName, "dotenv": dotenvName, "docker": dockerName}[format]
	for _, v := range variables {
		switch {
		case !names.MatchString(v.Name):
			warn(fmt.Sprintf("omitting the variable %q: -o %s cannot contain its name", v.Name, format))
		case format == "shell":
			fmt.Fprintf(&b, "export %s='%s'\n", v.Name, strings.ReplaceAll(v.Value, "'", `'\''`))
		case format == "dotenv":
			fmt.Fprintf(&b, "%s=%s\n", v.Name, dotenvValue(v.Value))
		case strings.ContainsAny(v.Value, "\r\n"):
			return nil, api.Errorf(api.ExitUsage, "-o docker: the value of %s has several lines, which an env-file of "+
				"Docker cannot contain", v.Name).
				WithHint("use -o json, -o shell or -o dotenv; " +
					"`kubevpn dev --docker` runs the container with all variables")
		default:
			fmt.Fprintf(&b, "%s=%s\n", v.Name, v.Value)
		}
	}
	return b.Bytes(), nil
}

var plainValue = regexp.MustCompile(`^[A-Za-z0-9_./:@%+,-]*$`)

// dotenvValue quotes a value for a .env file. All libraries read single quotes literally. Double quotes have the
// escapes of Docker Compose, for values that single quotes cannot contain.
func dotenvValue(value string) string {
	switch {
	case plainValue.MatchString(value):
		return value
	case !strings.ContainsAny(value, "'\\\r\n"):
		return "'" + value + "'"
	}
	return `"` + strings.NewReplacer(`\`, `\\`, `"`, `\"`, `$`, `\$`, "\n", `\n`, "\r", `\r`).Replace(value) + `"`
}
