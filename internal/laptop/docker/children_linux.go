package docker

import (
	"bufio"
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"maps"
	"net"
	"os"
	"os/exec"
	"path"
	"runtime"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"

	"kubevpn/internal/api"
	"kubevpn/internal/kube/podenv"
	"kubevpn/pkg/host/sandbox"
	"kubevpn/pkg/wakeup"
)

// answerTimeout limits the time of an answer, because the other end may have been stopped.
const answerTimeout = time.Minute

// child is a `docker run` command, which waits for the end of its container.
type child struct {
	name     string // of the container in the engine
	cmd      *exec.Cmd
	done     chan struct{}   // closed when the command has ended: normally the engine has removed the container then
	err      error           // of the command; valid once done is closed
	detached bool            // the command has ended, but its container still runs
	stderr   bytes.Buffer    // of the command, if it goes nowhere else; may be read once done is closed
	copying  sync.WaitGroup  // of the output of the command
	remote   *sandbox.Remote // the first process of the container; nil: it has not connected
	// Set by start:
	container string          // its name in the pod
	ended     <-chan struct{} // closed when the program or its container has ended
}

// launch runs a container, and returns when its first process is ready. args returns the arguments of docker for the
// directory of the socket, and streams connects docker's standard streams; nil: nothing is connected.
func (r *run) launch(ctx context.Context, name string, log *slog.Logger, args func(dir string) []string,
	streams func(*child) error) (*child, error) {
	dir, err := r.socketDir()
	defer os.RemoveAll(dir)
	if err != nil {
		return nil, err
	}
	l, err := listen(dir)
	if err != nil {
		return nil, err
	}
	defer l.Close()
	c := &child{name: name, cmd: exec.Command(r.Engine.command, args(dir)...)}
	c.cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true} // the terminal's signals do not reach it
	if streams == nil {
		c.cmd.Stderr = &c.stderr
	} else if err := streams(c); err != nil {
		return nil, err
	}
	if err := c.begin(); err != nil {
		return nil, err
	}
	conn, err := accept(ctx, l, c)
	if err == nil {
		limited, cancel := context.WithTimeout(ctx, answerTimeout)
		defer cancel()
		c.remote, err = sandbox.Attach(limited, conn, log)
	}
	if err != nil {
		return nil, r.abandon(c, c.explain(ctx, err))
	}
	return c, nil
}

// begin starts the command.
func (c *child) begin() error {
	if err := c.cmd.Start(); err != nil {
		return fmt.Errorf("cannot run docker: %w", err)
	}
	c.done = make(chan struct{})
	go func() {
		defer close(c.done)
		c.copying.Wait() // Wait closes the pipes
		c.err = c.cmd.Wait()
	}()
	return nil
}

// explain returns the error for a container that did not start. If docker has ended, it adds what docker said.
func (c *child) explain(ctx context.Context, err error) error {
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	select {
	case <-c.done:
		err = said(errors.Join(err, c.err), c.stderr.String())
	default:
	}
	return api.Errorf(api.ExitEngine, "cannot start the container %s: %w", c.name, err)
}

// signal sends the program a signal, unless it has ended.
func (c *child) signal(s syscall.Signal) { _ = c.remote.Signal(s) }

// close ends the container, without waiting for the end.
func (c *child) close() {
	if c.remote != nil {
		_ = c.remote.Close() // its socket closes once
	}
}

// abandon ends and removes a container that could not be started, because of err.
func (r *run) abandon(c *child, err error) error {
	c.close()
	return errors.Join(err, r.removed(c))
}

const (
	removeTimeout = 15 * time.Second // until a container is removed by itself, and then by force
	killDelay     = 5 * time.Second
)

// removed waits until a container is removed. After removeTimeout it removes the container by force.
func (r *run) removed(c *child) error {
	wait := func(limit time.Duration) bool {
		select {
		case <-c.done:
			return true
		case <-time.After(limit):
			return false
		}
	}
	if wait(removeTimeout) && !c.detached && c.cmd.ProcessState.ExitCode() >= 0 { // the command was not killed
		return nil
	}
	ctx, cancel := context.WithTimeout(context.Background(), removeTimeout) // the run's own has ended
	defer cancel()
	err := r.Engine.remove(ctx, c.name)
	if !wait(killDelay) {
		err = errors.Join(err, errors.New("`docker run` does not return"))
		if e := c.cmd.Process.Kill(); e == nil {
			<-c.done
		}
	}
	if err == nil {
		return nil
	}
	return api.Errorf(api.ExitEngine, "cannot remove the container %s: %w", c.name, err).
		WithHint("`docker rm --force %s` removes it", c.name)
}

// accept takes the connection of a container's first process, and no other.
func accept(ctx context.Context, l *net.UnixListener, c *child) (*net.UnixConn, error) {
	defer wakeup.Go(ctx, func(ctx context.Context) {
		select {
		case <-c.done:
		case <-ctx.Done():
		}
		l.Close() // which removes the socket
	})()
	conn, err := l.AcceptUnix()
	switch {
	case err == nil:
		return conn, nil
	case errors.Is(err, net.ErrClosed):
		return nil, errors.New("`docker run` ended first")
	}
	return nil, fmt.Errorf("cannot accept the connection of the container's first process: %w", err)
}

// network is the container that owns the network and the volumes of all others.
type network struct {
	*child
	volumes string // the directory of the volumes on this machine
}

func (r *run) startNetwork(ctx context.Context) (*network, error) {
	c, err := r.launch(ctx, networkName(r.plan.id), r.Logger, r.plan.network, nil)
	if err != nil {
		return nil, err
	}
	volumes, err := r.Engine.mountpoint(ctx, c.name, volumesAt)
	if err != nil {
		return nil, r.abandon(c, err)
	}
	return &network{c, volumes}, nil
}

// gone returns the error for the end of the network container during a run.
func (n *network) gone() error {
	return api.Errorf(api.ExitEngine, "the container %s, which owns the network of the others, has ended", n.name).
		WithHint("see `journalctl -u docker` for the cause")
}

// show writes a volume, which the containers see at once.
func (r *run) show(ctx context.Context, v podenv.Volume) error {
	owned := owned(r.Pod, v)
	owned.Dirs = r.content.points[v.Name]
	ctx, cancel := context.WithTimeout(ctx, answerTimeout)
	defer cancel()
	if err := r.network.remote.Update(ctx, owned); err != nil {
		return fmt.Errorf("cannot write the volume %s: %w", v.Name, err)
	}
	return nil
}

// start starts the n-th container and returns when its program runs.
func (r *run) start(ctx context.Context, n int) (*child, error) {
	c := r.plan.containers[n]
	mounts := r.resolve(ctx, c)
	// Its log is discarded: a program of the container may have replaced our process.
	one, err := r.launch(ctx, containerName(r.plan.id, c.name), nil,
		func(dir string) []string { return r.plan.run(dir, n, mounts) },
		func(one *child) error { return r.connectStreams(c, one) })
	if err != nil {
		return nil, err
	}
	limited, cancel := context.WithTimeout(ctx, answerTimeout)
	defer cancel()
	if err := one.remote.Run(limited, r.content.programs[c.name]); err != nil {
		err = c.notStarted(err, c.chosen && r.Arguments.Entrypoint != nil)
		return nil, r.abandon(one, cmp.Or(context.Cause(ctx), err))
	}
	one.container, one.ended = c.name, one.remote.Done()
	return one, nil
}

// connectStreams connects the chosen container to the standard streams of this process. The output of another one gets
// the container's name before each line.
func (r *run) connectStreams(c container, one *child) error {
	if c.chosen {
		one.cmd.Stdout, one.cmd.Stderr = r.Stdout, r.Stderr
		return r.input(one.cmd)
	}
	out, err := one.cmd.StdoutPipe()
	if err != nil {
		return err
	}
	errout, err := one.cmd.StderrPipe()
	if err != nil {
		return err
	}
	one.copying.Go(func() { r.prefix(c.name, out, r.Stdout) })
	one.copying.Go(func() { r.prefix(c.name, errout, r.Stderr) })
	return nil
}

// input connects the user's input to the `docker run` of the chosen container. Docker must be in the terminal's
// foreground to read the terminal. There Ctrl-C would end docker, except with a TTY of the container: then docker makes
// the terminal raw, which sends no signals. Without one, kubevpn reads for docker.
//
//	-it, a terminal   docker in kubevpn's process group: reads the terminal
//	-i, a terminal    docker in its own: reads a pipe
//	-i, a file        docker in its own: reads the file
func (r *run) input(cmd *exec.Cmd) error {
	switch {
	case !r.plan.interactive():
	case !r.Terminal:
		cmd.Stdin = r.Stdin
	case r.plan.tty():
		cmd.Stdin, cmd.SysProcAttr = r.Stdin, nil
	default:
		to, err := cmd.StdinPipe()
		if err != nil {
			return err
		}
		go func() { // ends with this process or with the input
			_, _ = io.Copy(to, r.Stdin) // the program may have closed its end
			to.Close()
		}()
	}
	return nil
}

// notStarted returns the error for a program that did not start. byUser reports whether the user named the program.
func (c container) notStarted(err error, byUser bool) error {
	code := api.ExitEngine
	if byUser {
		code = api.ExitUsage
	}
	e := api.Errorf(code, "container %s (image %s): %w", c.name, c.image, err)
	if errors.Is(err, syscall.ENOEXEC) && c.imageInfo.Architecture != runtime.GOARCH {
		e = e.WithHint("the image is for %s, and this machine is %s: choose another image with --image, or "+
			"install an emulator (Debian: sudo apt install qemu-user-static)",
			c.imageInfo.Architecture, runtime.GOARCH)
	}
	return e
}

// resolve returns the mounts of a container, with their paths on this machine.
func (r *run) resolve(ctx context.Context, c container) []mount {
	ctx, cancel := context.WithTimeout(ctx, answerTimeout)
	defer cancel()
	var all []mount
	for _, m := range r.content.mounts[c.name] {
		if !mountable(m.Path) {
			r.Warn(fmt.Sprintf("volume %s at %s: nothing can be mounted there", m.Volume, m.Path))
			continue
		}
		from := cmp.Or(m.Source, path.Join(m.Volume, m.SubPath))
		name := r.writer(c.name, from)
		at := ""
		if m.Source == "" && m.SubPath != "" && name == "" {
			var err error
			if at, err = r.network.remote.Resolve(ctx, m.Volume, m.SubPath); err != nil {
				r.Warn(fmt.Sprintf("volume %s at %s: %v", m.Volume, m.Path, err))
				continue
			}
			name = r.writer(c.name, path.Join(m.Volume, at))
		}
		if name != "" {
			r.Warn(fmt.Sprintf("omitting volume %s at %s of container %s: container %s can write above "+
				"it, and a link there could lead the engine, which is root, out of the volume "+
				"(CVE-2017-1002101); -c NAME runs one container alone", m.Volume, m.Path, c.name, name))
			continue
		}
		all = append(all, mount{source: cmp.Or(m.Source, volumePath(r.network.volumes, m.Volume, at)), path: m.Path,
			readOnly: m.ReadOnly})
	}
	return all
}

// writer returns another container of this run that can replace a directory on the way to from at any time, or "". The
// container of, for which the engine makes the mount, starts only afterwards. from is a path on this machine, or the
// name of a volume and a path below it, and clean like those of the other mounts: two volumes may be the same
// directory of this machine, or lie within each other.
//
// The engine takes a path, not a descriptor, and follows it as root. A path through /proc/PID/fd leads to a mount of
// another mount namespace, which the kernel does not bind (do_loopback in fs/namespace.c returns EINVAL). So what
// others can replace is not mounted.
func (r *run) writer(of, from string) string {
	for _, name := range slices.Sorted(maps.Keys(r.content.mounts)) {
		if name != of && slices.ContainsFunc(r.content.mounts[name], func(o podenv.Mount) bool {
			above := cmp.Or(o.Source, path.Join(o.Volume, o.SubPath))
			return !o.ReadOnly && strings.HasPrefix(from, strings.TrimSuffix(above, "/")+"/")
		}) {
			return name
		}
	}
	return ""
}

// exit returns the exit code of the program, after all of its output was written.
func (c *child) exit() (int, error) {
	<-c.done
	if ended := c.remote.Ended(); ended != nil {
		return ended.Code, nil
	}
	exit, ok := errors.AsType[*exec.ExitError](c.err)
	if !ok {
		return 0, api.Errorf(api.ExitEngine, "the container %s ended without a report: %w", c.container,
			errors.Join(errors.New("its first process ended"), c.err))
	}
	const failed = 125 // docker's own
	if code := exit.ExitCode(); code != failed && code > 0 {
		return code, nil // the exit code of a killed container
	}
	return 0, api.Errorf(api.ExitEngine, "the Docker Engine has ended the container %s: docker %w", c.container,
		exit).
		WithHint("see `journalctl -u docker` for the cause")
}

// lineMost is the length at which prefix writes a line without waiting for its end.
const lineMost = 64 << 10

// prefix copies lines, each with the name of the container before it. It reads all, also if nothing can be written, so
// that the container does not block.
func (r *run) prefix(name string, from io.Reader, to io.Writer) {
	end := "\n"
	if r.plan.tty() { // docker has made the terminal raw
		end = "\r\n"
	}
	lines := bufio.NewReaderSize(from, lineMost)
	for {
		line, err := lines.ReadSlice('\n')
		if len(line) > 0 {
			text := strings.TrimSuffix(strings.TrimSuffix(string(line), "\n"), "\r")
			r.output.Lock()
			_, _ = io.WriteString(to, "["+name+"] "+api.Clean(text)+end) // the terminal may be gone
			r.output.Unlock()
		}
		if err != nil && !errors.Is(err, bufio.ErrBufferFull) {
			return
		}
	}
}
