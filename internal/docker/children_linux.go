package docker

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"net"
	"os"
	"os/exec"
	"runtime"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"

	"kubevpn/internal/api"
	"kubevpn/internal/podenv"
	"kubevpn/pkg/host/sandbox"
)

// answerTimeout limits the time of an answer, because the other end may have been stopped.
const answerTimeout = time.Minute

// child is a `docker run` command, which waits for the end of its container.
type child struct {
	name string
	cmd  *exec.Cmd
	done chan struct{} // closed when the command has ended: normally the engine has removed the container then
	err  error         // of the command; valid once done is closed
	left bool          // the command has ended, but its container still runs
}

// command starts cmd, and calls after when it has ended.
func (r *run) command(name string, cmd *exec.Cmd, after func()) (*child, error) {
	if err := cmd.Start(); err != nil {
		return nil, fmt.Errorf("cannot run docker: %w", err)
	}
	c := &child{name: name, cmd: cmd, done: make(chan struct{})}
	go func() {
		defer close(c.done)
		c.err = cmd.Wait()
		after()
	}()
	return c, nil
}

// docker returns a docker command in a process group of its own, which the terminal's signals do not reach.
func (r *run) docker(args []string) *exec.Cmd {
	cmd := exec.Command(r.Engine.command, args...)
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	return cmd
}

const (
	removeTimeout = 15 * time.Second // until a container is removed by itself, and then by force
	killDelay     = 5 * time.Second
)

// removed waits until a container is removed. After removeTimeout it removes the container by force.
func (r *run) removed(c *child) error {
	wait := func(limit time.Duration) bool {
		t := time.NewTimer(limit)
		defer t.Stop()
		select {
		case <-c.done:
			return true
		case <-t.C:
			return false
		}
	}
	if wait(removeTimeout) && !c.left && c.cmd.ProcessState.ExitCode() >= 0 { // the command was not killed
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
	accepted := make(chan struct{})
	defer close(accepted)
	go func() {
		select {
		case <-c.done:
		case <-ctx.Done():
		case <-accepted:
		}
		l.Close() // which removes the socket
	}()
	conn, err := l.AcceptUnix()
	switch {
	case err == nil:
		return conn, nil
	case ctx.Err() != nil:
		return nil, context.Cause(ctx)
	case errors.Is(err, net.ErrClosed):
		return nil, errNotStarted
	}
	return nil, fmt.Errorf("cannot accept the connection of the container's first process: %w", err)
}

var errNotStarted = errors.New("`docker run` ended first")

// networkContainer owns the network and the volumes of all containers.
type networkContainer struct {
	*child
	remote  *sandbox.Remote
	volumes string        // the directory of the volumes on this machine
	stderr  *bytes.Buffer // of docker; may be read once done is closed
}

func (r *run) startNetwork(ctx context.Context) (_ *networkContainer, err error) {
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
	n := &networkContainer{stderr: &bytes.Buffer{}}
	cmd := r.docker(r.plan.network(dir))
	cmd.Stderr = n.stderr
	if n.child, err = r.command(networkName(r.plan.id), cmd, func() {}); err != nil {
		return nil, err
	}
	defer func() {
		if err != nil {
			n.close()
			err = errors.Join(err, r.removed(n.child))
		}
	}()
	conn, err := accept(ctx, l, n.child)
	if err != nil {
		return nil, n.explain(err)
	}
	if n.remote, err = sandbox.Attach(ctx, conn, r.Logger); err != nil {
		return nil, n.explain(err)
	}
	n.volumes, err = r.Engine.mountpoint(ctx, n.name, volumesAt)
	return n, err
}

// explain adds the output of docker to err if docker has ended.
func (n *networkContainer) explain(err error) error {
	select {
	case <-n.done:
	default:
		return err
	}
	return api.Errorf(api.ExitEngine, "cannot start the network container: %w", said(err, n.stderr.String()))
}

// gone returns the error for the end of the network container during a run.
func (n *networkContainer) gone() error {
	return api.Errorf(api.ExitEngine, "the container %s, which owns the network of the others, has ended", n.name).
		WithHint("see `journalctl -u docker` for the cause")
}

// close ends the network container and its volumes, without waiting for the end.
func (n *networkContainer) close() {
	if n.remote != nil {
		n.remote.Close()
	}
}

// show writes a volume, which the containers see at once.
func (r *run) show(ctx context.Context, v podenv.Volume) error {
	owned := owned(r.plan.pod, v)
	owned.Dirs = r.points[v.Name]
	ctx, cancel := context.WithTimeout(ctx, answerTimeout)
	defer cancel()
	if err := r.network.remote.Update(ctx, owned); err != nil {
		return fmt.Errorf("cannot write the volume %s: %w", v.Name, err)
	}
	return nil
}

// running is a container whose program has started.
type running struct {
	*child
	container string          // its name in the pod
	remote    *sandbox.Remote // its first process
	ended     <-chan struct{} // closed when the program or its container has ended
}

// start starts the n-th container and returns when its program runs.
func (r *run) start(ctx context.Context, n int) (_ *running, err error) {
	c := r.plan.containers[n]
	mounts := r.resolve(ctx, c)
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
	cmd := r.docker(r.plan.run(dir, n, mounts))
	flush := func() {}
	if c.chosen {
		cmd.Stdout, cmd.Stderr = r.Stdout, r.Stderr
		if err := r.input(cmd); err != nil {
			return nil, err
		}
	} else {
		out, errout := r.prefixed(c.name, r.Stdout), r.prefixed(c.name, r.Stderr)
		cmd.Stdout, cmd.Stderr = out, errout
		flush = func() { out.flush(); errout.flush() }
	}
	one := &running{container: c.name}
	if one.child, err = r.command(containerName(r.plan.id, c.name), cmd, flush); err != nil {
		return nil, err
	}
	defer func() {
		if err != nil {
			one.close()
			err = errors.Join(err, r.removed(one.child))
		}
	}()
	conn, err := accept(ctx, l, one.child)
	if err != nil {
		if errors.Is(err, errNotStarted) {
			return nil, api.Errorf(api.ExitEngine, "cannot start the container %s: %w", c.name,
				errors.Join(err, one.err))
		}
		return nil, err
	}
	limited, cancel := context.WithTimeout(ctx, answerTimeout)
	defer cancel()
	// Its log is discarded: a program of the container may have replaced our process.
	if one.remote, err = sandbox.Attach(limited, conn, nil); err == nil {
		err = one.remote.Run(limited, r.programs[c.name])
	}
	if err != nil {
		return nil, c.notStarted(err, c.chosen && r.plan.user.Entrypoint != nil)
	}
	one.ended = one.remote.Done()
	return one, nil
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
	if errors.Is(err, syscall.ENOEXEC) && c.of.Architecture != runtime.GOARCH {
		e = e.WithHint("the image is for %s, and this machine is %s: choose another image with --image, or "+
			"install an emulator (Debian: sudo apt install qemu-user-static)",
			c.of.Architecture, runtime.GOARCH)
	}
	return e
}

// resolve returns the mounts of a container, with their paths on this machine.
func (r *run) resolve(ctx context.Context, c container) []mount {
	ctx, cancel := context.WithTimeout(ctx, answerTimeout)
	defer cancel()
	var all []mount
	for _, m := range r.mounts[c.name] {
		if !mountable(m.Path) {
			r.Warn(fmt.Sprintf("volume %s at %s: nothing can be mounted there", m.Volume, m.Path))
			continue
		}
		if name := r.writer(c.name, m); name != "" {
			r.Warn(fmt.Sprintf("omitting volume %s at %s of container %s: container %s can write above its "+
				"subPath, and a link there could lead the engine, which is root, out of the volume "+
				"(CVE-2017-1002101); -c NAME runs one container alone", m.Volume, m.Path, c.name, name))
			continue
		}
		if m.Source != "" {
			all = append(all, mount{source: m.Source, path: m.Path, readOnly: m.ReadOnly})
			continue
		}
		at := ""
		if m.SubPath != "" {
			var err error
			if at, err = r.network.remote.Resolve(ctx, m.Volume, m.SubPath); err != nil {
				r.Warn(fmt.Sprintf("volume %s at %s: %v", m.Volume, m.Path, err))
				continue
			}
		}
		all = append(all, mount{source: source(r.network.volumes, m.Volume, at), path: m.Path, readOnly: m.ReadOnly})
	}
	return all
}

// writer returns another container of this run that can replace a directory above m's subPath at any time, or "". The
// container of, which m belongs to, starts only after the engine has made its mounts.
func (r *run) writer(of string, m podenv.Mount) string {
	for _, name := range slices.Sorted(maps.Keys(r.mounts)) {
		if name != of && slices.ContainsFunc(r.mounts[name], func(o podenv.Mount) bool {
			above := o.SubPath == "" && m.SubPath != "" || strings.HasPrefix(m.SubPath, o.SubPath+"/")
			return o.Volume == m.Volume && !o.ReadOnly && above
		}) {
			return name
		}
	}
	return ""
}

// signal sends the program a signal, unless it has ended.
func (one *running) signal(s syscall.Signal) { _ = one.remote.Signal(s) }

// close ends the container without waiting for its end.
func (one *running) close() {
	if one.remote != nil {
		_ = one.remote.Close() // it has no TUN, and its socket closes once
	}
}

// exit returns the exit code of the program, after all of its output was written.
func (one *running) exit() (int, error) {
	<-one.done
	if ended := one.remote.Ended(); ended != nil {
		return ended.Code, nil
	}
	var exit *exec.ExitError
	if !errors.As(one.err, &exit) {
		return 0, api.Errorf(api.ExitEngine, "the container %s ended without a report: %w", one.container,
			errors.Join(errors.New("its first process ended"), one.err))
	}
	const failed = 125 // docker's own
	if code := exit.ExitCode(); code != failed && code > 0 {
		return code, nil // the exit code of a killed container
	}
	return 0, api.Errorf(api.ExitEngine, "the Docker Engine has ended the container %s: docker %w", one.container,
		exit).
		WithHint("see `journalctl -u docker` for the cause")
}

// prefixed returns a writer of whole lines, each with the name of the container before it.
func (r *run) prefixed(name string, to io.Writer) *prefixer {
	end := "\n"
	if r.plan.tty() { // docker has made the terminal raw
		end = "\r\n"
	}
	return &prefixer{mu: &r.output, to: to, prefix: "[" + name + "] ", end: end}
}

type prefixer struct {
	mu          *sync.Mutex
	to          io.Writer
	prefix, end string
	rest        []byte
}

// lineMost is the length at which the prefixer writes a line without waiting for its end.
const lineMost = 64 << 10

func (p *prefixer) Write(b []byte) (int, error) {
	n := len(b)
	p.rest = append(p.rest, b...)
	for {
		line, after, found := bytes.Cut(p.rest, []byte("\n"))
		if !found && len(p.rest) < lineMost {
			return n, nil
		}
		p.rest = after
		if err := p.line(line); err != nil {
			return n, err
		}
	}
}

// flush writes the last line if it does not end in a newline.
func (p *prefixer) flush() {
	if len(p.rest) > 0 {
		_ = p.line(p.rest) // the terminal may be gone
	}
}

func (p *prefixer) line(text []byte) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	_, err := io.WriteString(p.to, p.prefix+strings.TrimSuffix(string(text), "\r")+p.end)
	return err
}
