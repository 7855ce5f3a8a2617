package cli

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"

	"github.com/spf13/cobra"

	"kubevpn/internal/api"
	"kubevpn/internal/laptop/cli/term"
	"kubevpn/internal/laptop/hostservice"
)

func newService(a *app) *cobra.Command {
	cmd := &cobra.Command{
		Use:   "service",
		Short: "Connect without a password: manage the service of the root helper",
		Long: "Manage a service of systemd, or of launchd on macOS, that starts the root helper in place of sudo,\n" +
			"so that `kubevpn connect` asks for no password. Only the user who installs it, or the members of a\n" +
			"group, may use it, and only for private networks and non-public domains: root allows more in\n" +
			hostservice.PolicyFile + ".",
		Example: examples("Install the service for you", "kubevpn service install", "Show who may use it",
			"kubevpn service status", "Remove it", "kubevpn service uninstall"),
		Args: noArgs,
		RunE: func(cmd *cobra.Command, _ []string) error { return cmd.Help() },
	}
	cmd.AddCommand(newServiceInstall(a), newServiceUninstall(a), newServiceStatus(a))
	return cmd
}

func newServiceInstall(a *app) *cobra.Command {
	group := ""
	cmd := &cobra.Command{
		Use:   "install",
		Short: "Install the service, or replace it",
		Long: "Copy this program to " + hostservice.Program + ", where only root can\n" +
			"change it. systemd or launchd starts it as root for each connection to\n" +
			hostservice.Socket + ". The command uses sudo if necessary. Open connections continue.",
		Example: examples("Install the service for you", "kubevpn service install",
			"Install it for the members of a group", "kubevpn service install --group developers"),
		Args: noArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if err := hostservice.Supported(); err != nil {
				return err
			}
			if os.Geteuid() > 0 {
				return a.asRoot(cmd.Context(), "service", "install", "--group", group)
			}
			if err := hostservice.Install(cmd.Context(), group); err != nil {
				return err
			}
			s, err := hostservice.Status(cmd.Context())
			if err == nil {
				fmt.Fprintf(a.Errout, "installed: `kubevpn connect` of %s asks for no password\n", users(s))
			}
			return err
		},
	}
	cmd.Flags().StringVar(&group, "group", "", "group whose members may use the service (default: only you)")
	return cmd
}

func newServiceUninstall(a *app) *cobra.Command {
	return &cobra.Command{
		Use:   "uninstall",
		Short: "End the connections of the service and remove it",
		Long: "Remove the service with its program and its policy. The connections that use it end. The command\n" +
			"uses sudo if necessary.",
		Example: examples("Remove the service", "kubevpn service uninstall"),
		Args:    noArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			s, err := hostservice.Status(cmd.Context())
			if err != nil {
				return err
			}
			if !s.Installed {
				fmt.Fprintln(a.Errout, notInstalled)
				return nil
			}
			if os.Geteuid() > 0 {
				return a.asRoot(cmd.Context(), "service", "uninstall")
			}
			return hostservice.Uninstall(cmd.Context())
		},
	}
}

// notInstalled is the text of the status without a service.
const notInstalled = "the service is not installed: `kubevpn connect` uses sudo"

func newServiceStatus(a *app) *cobra.Command {
	output := term.NewObjectFormat("text")
	cmd := &cobra.Command{
		Use:   "status",
		Short: "Show whether the service is installed, and who may use it",
		Example: examples("Show the service", "kubevpn service status", "Print it as JSON",
			"kubevpn service status -o json"),
		Args: noArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			s, err := hostservice.Status(cmd.Context())
			if err != nil {
				return err
			}
			s.TypeMeta = api.Type(api.KindHelperService)
			if !output.ForPeople() {
				return output.Print(a.Out, s, "helperservice/kubevpn-helper")
			}
			if !s.Installed {
				fmt.Fprintln(a.Out, notInstalled)
				return nil
			}
			a.printService(s)
			return nil
		},
	}
	output.AddTo(cmd)
	return cmd
}

func (a *app) printService(s api.HelperService) {
	active, you := "active", "you may use it"
	if !s.Active {
		active = "not active: see `" + hostservice.Inspect + "`"
	}
	if !s.Allowed {
		you = "you may not use it"
	}
	fmt.Fprintf(a.Out, "installed, %s\n", active)
	fmt.Fprintf(a.Out, "  version  %s\n", s.Version)
	fmt.Fprintf(a.Out, "  users    %s; %s\n", users(s), you)
	fmt.Fprintf(a.Out, "  socket   %s\n", s.Socket)
	fmt.Fprintf(a.Out, "  policy   %s\n", s.Policy)
}

// users returns who may use the service.
func users(s api.HelperService) string {
	if s.Group != "" {
		return "members of group " + s.Group
	}
	return "user " + s.User
}

// asRoot runs this program as root, with sudo, which may ask for a password on the terminal.
func (a *app) asRoot(ctx context.Context, args ...string) error {
	sudo, err := exec.LookPath("sudo")
	if err != nil {
		return api.Errorf(api.ExitPrivilege, "this command requires root, and sudo is not installed").
			WithHint("run it as root")
	}
	fmt.Fprintln(a.Errout, "This command requires root: sudo may ask for your password.")
	cmd := exec.CommandContext(ctx, sudo, append([]string{"--", a.executable}, args...)...)
	cmd.Stdin, cmd.Stdout, cmd.Stderr = os.Stdin, os.Stdout, os.Stderr
	err = cmd.Run()
	if exit, ok := errors.AsType[*exec.ExitError](err); ok && exit.ExitCode() > 0 {
		return exitCode(exit.ExitCode()) // sudo or this program has said why
	}
	return err
}
