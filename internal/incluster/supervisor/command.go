//go:build linux

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
		Short: "Run the command of a clone and receive files for it",
		Long: `Run a command as PID 1 of a container of a clone. 'traffic sync' sends files for the
directories of --dir. The command starts when the first ones are complete. With
--restart, later files restart it. A command that ends by itself restarts after a
pause.`,
		Example: "  traffic supervise --dir /app --restart -- node server.js",
		Args:    cobra.MinimumNArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			cfg.Command = args
			cfg.Logger = slog.New(slog.NewTextHandler(os.Stderr, nil)).With("kubevpn", "supervise")
			exit, err := New(cfg).Run(cmd.Context())
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
	f.StringArrayVar(&cfg.Dirs, "dir", nil, "directory or file that receives files; repeatable")
	f.BoolVar(&cfg.Restart, "restart", false, "restart the command for new files")
	f.BoolVar(&cfg.Once, "once", false, "after success, restart the command only for new files")
	f.StringVar(&cfg.Socket, "socket", api.SupervisorSocket, "where to listen for files")
	return cmd
}

// Exit is the exit code of the command, as an error.
type Exit int

func (e Exit) Error() string { return fmt.Sprintf("the command ended with exit code %d", int(e)) }

func newSync() *cobra.Command {
	var at string
	cmd := &cobra.Command{
		Use:     "sync NUMBER",
		Short:   "Send files from standard input to 'traffic supervise'",
		Example: "  traffic sync 0",
		Args:    cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			dir, err := strconv.ParseUint(args[0], 10, 8)
			if err != nil {
				return api.Errorf(api.ExitUsage, "%q is not the number of a directory", args[0])
			}
			return forward(cmd.Context(), at, byte(dir), os.Stdin, os.Stdout)
		},
	}
	cmd.Flags().StringVar(&at, "socket", api.SupervisorSocket, "where 'traffic supervise' listens")
	return cmd
}

// forward connects the standard streams with the supervisor until either end closes.
func forward(ctx context.Context, at string, dir byte, in io.Reader, out io.Writer) error {
	var d net.Dialer
	conn, err := d.DialContext(ctx, "unix", at)
	if err != nil {
		return fmt.Errorf("cannot reach the supervisor: %w", err)
	}
	defer conn.Close()
	if _, err := conn.Write([]byte{dir}); err != nil {
		return fmt.Errorf("cannot send the number of the directory: %w", err)
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
		Use:     "copy FILE",
		Short:   "Copy this program to a volume, for a container that does not have it",
		Example: "  traffic copy " + api.SupervisorProgram,
		Args:    cobra.ExactArgs(1),
		RunE: func(_ *cobra.Command, args []string) error {
			self, err := os.Executable()
			if err != nil {
				return fmt.Errorf("cannot find this program: %w", err)
			}
			return install(self, args[0])
		},
	}
}

// install copies a program and makes it executable for everybody. A reader never sees a part of it.
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
