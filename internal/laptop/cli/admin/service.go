package admin

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"

	"github.com/spf13/cobra"

	"kubevpn/internal/api"
	"kubevpn/internal/laptop/cli/command"
	"kubevpn/internal/laptop/cli/term"
	"kubevpn/internal/laptop/hostservice"
)

func newService(f *command.Factory) *cobra.Command {
	cmd := &cobra.Command{
		Use:   "service",
		Short: "Connect without a password: manage the service of the root helper",
		Long: "Manage a service of systemd, or of launchd on macOS, that starts the root helper in place of sudo,\n" +
			"so that `kubevpn connect` asks for no password. Only the user who installs it, or the members of a\n" +
			"group, may use it, and only for private networks and non-public domains: root allows more in\n" +
			hostservice.PolicyFile + ".",
		Example: command.Examples("Install the service for you", "kubevpn service install", "Show who may use it",
			"kubevpn service status", "Remove it", "kubevpn service uninstall"),
	}
	cmd.AddCommand(newServiceInstall(f), newServiceUninstall(f), newServiceStatus(f))
	return cmd
}

func newServiceInstall(f *command.Factory) *cobra.Command {
	group := ""
	cmd := &cobra.Command{
		Use:   "install",
		Short: "Install the service, or replace it",
		Long: "Copy this program to " + hostservice.Program + ", where only root can\n" +
			"change it. systemd or launchd starts it as root for each connection to\n" +
			hostservice.Socket + ". The command uses sudo if necessary. Open connections continue.",
		Example: command.Examples("Install the service for you", "kubevpn service install",
			"Install it for the members of a group", "kubevpn service install --group developers"),
		RunE: func(cmd *cobra.Command, _ []string) error {
			if err := hostservice.Supported(); err != nil {
				return err
			}
			if os.Geteuid() > 0 {
				return asRoot(cmd.Context(), f, "service", "install", "--group", group)
			}
			if err := hostservice.Install(cmd.Context(), group); err != nil {
				return err
			}
			s, err := hostservice.Status(cmd.Context())
			if err == nil {
				fmt.Fprintf(f.Errout, "installed: `kubevpn connect` of %s asks for no password\n", users(s))
			}
			return err
		},
	}
	cmd.Flags().StringVar(&group, "group", "", "group whose members may use the service (default: only you)")
	return cmd
}

func newServiceUninstall(f *command.Factory) *cobra.Command {
	return &cobra.Command{
		Use:   "uninstall",
		Short: "End the connections of the service and remove it",
		Long: "Remove the service with its program and its policy. The connections that use it end. The command\n" +
			"uses sudo if necessary.",
		Example: command.Examples("Remove the service", "kubevpn service uninstall"),
		RunE: func(cmd *cobra.Command, _ []string) error {
			s, err := hostservice.Status(cmd.Context())
			if err != nil {
				return err
			}
			if !s.Installed {
				fmt.Fprintln(f.Errout, notInstalled)
				return nil
			}
			if os.Geteuid() > 0 {
				return asRoot(cmd.Context(), f, "service", "uninstall")
			}
			return hostservice.Uninstall(cmd.Context())
		},
	}
}

// notInstalled is the text of the status without a service.
const notInstalled = "the service is not installed: `kubevpn connect` uses sudo"

func newServiceStatus(f *command.Factory) *cobra.Command {
	output := term.NewObjectFormat("text")
	cmd := &cobra.Command{
		Use:   "status",
		Short: "Show whether the service is installed, and who may use it",
		Example: command.Examples("Show the service", "kubevpn service status", "Print it as JSON",
			"kubevpn service status -o json"),
		RunE: func(cmd *cobra.Command, _ []string) error {
			s, err := hostservice.Status(cmd.Context())
			if err != nil {
				return err
			}
			s.TypeMeta = api.Type(api.KindHelperService)
			if !output.ForPeople() {
				return output.Print(f.Out, s, "helperservice/kubevpn-helper")
			}
			if !s.Installed {
				fmt.Fprintln(f.Out, notInstalled)
				return nil
			}
			printService(f.Out, s)
			return nil
		},
	}
	output.AddTo(cmd)
	return cmd
}

func printService(w io.Writer, s api.HelperService) {
	active, you := "active", "you may use it"
	if !s.Active {
		active = "not active: see `" + hostservice.Inspect + "`"
	}
	if !s.Allowed {
		you = "you may not use it"
	}
	fmt.Fprintf(w, "installed, %s\n", active)
	fmt.Fprintf(w, "  version  %s\n", s.Version)
	fmt.Fprintf(w, "  users    %s; %s\n", users(s), you)
	fmt.Fprintf(w, "  socket   %s\n", s.Socket)
	fmt.Fprintf(w, "  policy   %s\n", s.Policy)
}

// users returns who may use the service.
func users(s api.HelperService) string {
	if s.Group != "" {
		return "members of group " + s.Group
	}
	return "user " + s.User
}

// asRoot runs this program as root, with sudo, which may ask for a password on the terminal.
func asRoot(ctx context.Context, f *command.Factory, args ...string) error {
	sudo, err := exec.LookPath("sudo")
	if err != nil {
		return api.Errorf(api.ExitPrivilege, "this command requires root, and sudo is not installed").
			WithHint("run it as root")
	}
	fmt.Fprintln(f.Errout, "This command requires root: sudo may ask for your password.")
	cmd := exec.CommandContext(ctx, sudo, append([]string{"--", f.Executable}, args...)...)
	cmd.Stdin, cmd.Stdout, cmd.Stderr = os.Stdin, os.Stdout, os.Stderr
	err = cmd.Run()
	if exit, ok := errors.AsType[*exec.ExitError](err); ok && exit.ExitCode() > 0 {
		return command.ExitCode(exit.ExitCode()) // sudo or this program has said why
	}
	return err
}
