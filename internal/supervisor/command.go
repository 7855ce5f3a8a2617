package supervisor

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"strconv"

	"github.com/spf13/cobra"

	"kubevpn/internal/api"
)

// NewCommands returns `traffic supervise`, `traffic sync` and `traffic copy`.
func NewCommands() []*cobra.Command { return []*cobra.Command{newSupervise(), newSync(), newCopy()} }

func newSupervise() *cobra.Command {
	var cfg Config
	cmd := &cobra.Command{
		Use:   "supervise [flags] -- COMMAND...",
		Short: "Run a clone's command, and take files for it",
		Long: `Runs a command as PID 1 of a clone's container. Files that come to the directories
of --dir, from 'traffic sync', are put there, the first before the command begins;
with --restart, the command is started again for later ones. One that ends by itself
is started again after a pause.`,
		Example:       "  traffic supervise --dir /app --restart -- node server.js",
		Args:          cobra.MinimumNArgs(1),
		SilenceUsage:  true,
		SilenceErrors: true,
		RunE: func(cmd *cobra.Command, args []string) error {
			cfg.Command = args
			cfg.Logger = slog.New(slog.NewTextHandler(os.Stderr, nil)).With("kubevpn", "supervise")
			s, err := New(cfg)
			if err != nil {
				return api.Errorf(api.ExitUsage, "%w", err)
			}
			exit, err := s.Run(cmd.Context())
			if err != nil {
				return err
			}
			if exit != 0 {
				return Exit(exit)
			}
			return nil
		},
	}
	f := cmd.Flags()
	f.StringArrayVar(&cfg.Dirs, "dir", nil, "directory, or file, that files go to; repeated")
	f.BoolVar(&cfg.Restart, "restart", false, "start the command again when files came")
	f.BoolVar(&cfg.Once, "once", false, "start the command again only for files, once it has ended well")
	f.StringVar(&cfg.Socket, "socket", api.SupervisorSocket, "where to listen for files")
	return cmd
}

// Exit is what the command ended with: the program's own exit code.
type Exit int

func (e Exit) Error() string { return fmt.Sprintf("the command ended with exit code %d", int(e)) }

func newSync() *cobra.Command {
	var at string
	cmd := &cobra.Command{
		Use:           "sync NUMBER",
		Short:         "Take files for a directory of 'traffic supervise' from standard input",
		Example:       "  traffic sync 0",
		Args:          cobra.ExactArgs(1),
		SilenceUsage:  true,
		SilenceErrors: true,
		RunE: func(cmd *cobra.Command, args []string) error {
			if n, err := strconv.Atoi(args[0]); err != nil || n < 0 {
				return api.Errorf(api.ExitUsage, "%q is not the number of a directory", args[0])
			}
			return passOn(cmd.Context(), at, args[0], os.Stdin, os.Stdout)
		},
	}
	cmd.Flags().StringVar(&at, "socket", api.SupervisorSocket, "where 'traffic supervise' listens")
	return cmd
}

// passOn connects the standard streams with the supervisor, until it or the laptop ends.
func passOn(ctx context.Context, at, dir string, in io.Reader, out io.Writer) error {
	var d net.Dialer
	conn, err := d.DialContext(ctx, "unix", at)
	if err != nil {
		return fmt.Errorf("reaching the supervisor: %w", err)
	}
	defer conn.Close()
	if _, err := fmt.Fprintln(conn, dir); err != nil {
		return fmt.Errorf("telling the supervisor of the directory: %w", err)
	}
	gone := make(chan error, 1)
	go func() { // ends with the process: nothing ends a read of standard input
		_, err := io.Copy(conn, in)
		gone <- errors.Join(err, conn.(*net.UnixConn).CloseWrite())
	}()
	_, err = io.Copy(out, conn)
	select {
	case in := <-gone:
		return errors.Join(err, in)
	default:
		return err
	}
}

func newCopy() *cobra.Command {
	return &cobra.Command{
		Use:           "copy FILE",
		Short:         "Copy this program to where a container without it can run it",
		Example:       "  traffic copy " + api.SupervisorProgram,
		Args:          cobra.ExactArgs(1),
		SilenceUsage:  true,
		SilenceErrors: true,
		RunE: func(_ *cobra.Command, args []string) error {
			self, err := os.Executable()
			if err != nil {
				return fmt.Errorf("looking for this program: %w", err)
			}
			return install(self, args[0])
		},
	}
}

// install puts a program to a place from which everybody may run it, whole or not at all.
func install(program, to string) (err error) {
	from, err := os.Open(program)
	if err != nil {
		return err
	}
	defer from.Close()
	f, err := os.CreateTemp(filepath.Dir(to), filepath.Base(to)+".")
	if err != nil {
		return err
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, os.Remove(f.Name()))
		}
	}()
	_, err = io.Copy(f, from)
	if err := errors.Join(err, f.Chmod(0o755), f.Close()); err != nil {
		return err
	}
	return os.Rename(f.Name(), to)
}
