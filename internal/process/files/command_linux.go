package files

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/signal"
	"path"
	"syscall"
	"time"

	"github.com/spf13/cobra"
	"golang.org/x/sys/unix"

	"kubevpn/pkg/wire/remotefs"
)

// options are the flags.
type options struct {
	stay      time.Duration
	keep      string
	container string
	path      string
	write     bool
	remove    bool
}

// NewCommand returns the command of both programs.
func NewCommand() *cobra.Command {
	var o options
	cmd := &cobra.Command{
		Use:   Command,
		Short: "Serve files of a container on standard input and output",
		Long: `Serves the directory --path of the container --container of this pod, whose
processes it must see, or without --container of its own, on standard input and
output. It serves as the user of the container's first process.

With --stay it only keeps its container while the program is used there.`,
		Example: "  traffic files --keep kubevpn-files-1 --stay 10m",
		Args:    cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			ctx, stop := signal.NotifyContext(cmd.Context(), os.Interrupt, syscall.SIGTERM, syscall.SIGHUP)
			defer stop()
			if o.stay > 0 {
				return o.wait(ctx)
			}
			return o.serve(ctx)
		},
	}
	f := cmd.Flags()
	f.DurationVar(&o.stay, "stay", 0, "end when nobody has used the container for that time")
	f.StringVar(&o.keep, "keep", "", "name of the abstract unix socket by which users keep the container")
	f.StringVar(&o.container, "container", "", "name of the container in the pod")
	f.StringVar(&o.path, "path", "/", "the directory, or a file")
	f.BoolVar(&o.write, "write", false, "allow changes")
	f.BoolVar(&o.remove, "remove", false, "remove the file of this program first")
	return cmd
}

// wait returns when nobody has connected to the socket for a while. Those who wait in its backlog are users, too.
func (o *options) wait(ctx context.Context) error {
	l, err := net.ListenUnix("unix", &net.UnixAddr{Name: "@" + o.keep, Net: "unix"})
	if err != nil {
		return err
	}
	defer l.Close()
	defer context.AfterFunc(ctx, func() { l.Close() })()
	for {
		if err := l.SetDeadline(time.Now().Add(o.stay)); err != nil {
			return nil // ctx has ended
		}
		conn, err := l.Accept()
		if err != nil {
			return nil
		}
		stop := context.AfterFunc(ctx, func() { conn.Close() })
		_, _ = io.Copy(io.Discard, conn) // until the user has ended
		stop()
		conn.Close()
	}
}

// serve serves the files until its input ends.
func (o *options) serve(ctx context.Context) error {
	if o.remove {
		if program, err := os.Executable(); err != nil || os.Remove(program) != nil {
			fmt.Fprintln(os.Stderr, "cannot remove this program:", program, err)
		}
	}
	if o.keep != "" {
		kept, err := net.Dial("unix", "@"+o.keep)
		if err != nil {
			return err
		}
		defer kept.Close()
	}
	unix.Umask(0) // the laptop's kernel has applied the user's
	root, name, err := o.open()
	hello := Hello{Protocol: Protocol, Name: name}
	if err != nil {
		hello.Error, hello.Unseen = err.Error(), errors.Is(err, errUnseen)
	}
	if e := json.NewEncoder(os.Stdout).Encode(hello); e != nil || err != nil {
		return e
	}
	server, err := remotefs.NewServer(root, !o.write)
	if err != nil {
		return err
	}
	return server.Serve(ctx, stdio{})
}

// stdio is standard input and output.
type stdio struct{}

func (stdio) Read(b []byte) (int, error)  { return os.Stdin.Read(b) }
func (stdio) Write(b []byte) (int, error) { return os.Stdout.Write(b) }
func (stdio) Close() error                { return errors.Join(os.Stdin.Close(), os.Stdout.Close()) }

// open opens the directory of --path, or the one above.
func (o *options) open() (root *os.Root, name string, err error) {
	base := "/"
	if o.container != "" {
		if base, err = enter(o.container); err != nil {
			return nil, "", err
		}
	}
	return openIn(base, o.path)
}

// openIn opens a path in a container whose root is base. Links in the path lead to files of the container.
func openIn(base, file string) (root *os.Root, name string, err error) {
	top, err := unix.Open(base, unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, "", fmt.Errorf("%w: %w", errUnseen, err)
	}
	defer unix.Close(top)
	at := func(p string) (int, error) {
		return unix.Openat2(top, p, &unix.OpenHow{Flags: unix.O_PATH | unix.O_DIRECTORY | unix.O_CLOEXEC,
			Resolve: unix.RESOLVE_IN_ROOT | unix.RESOLVE_NO_MAGICLINKS})
	}
	name = "."
	dir, err := at(file)
	if errors.Is(err, unix.ENOENT) || errors.Is(err, unix.ENOTDIR) {
		clean := path.Clean("/" + file)
		name = path.Base(clean)
		dir, err = at(path.Dir(clean))
	}
	if err == nil {
		defer unix.Close(dir)
		root, err = os.OpenRoot(fmt.Sprintf("/proc/self/fd/%d", dir))
	}
	if err != nil {
		return nil, "", fmt.Errorf("%s in the container: %w", file, err)
	}
	return root, name, nil
}
