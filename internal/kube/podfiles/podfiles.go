// Package podfiles opens the files of a container of a pod.
//
//	laptop ═ pods/exec ═▶ traffic files, in an ephemeral container with targetContainerName ─▶ /proc/PID/root
//	   └──── pods/exec ═▶ kubevpn files, which the laptop copies into the container itself ─▶ /
//
// The second way is for clusters or users without ephemeral containers. It needs `sh`, `gzip` and a directory for the
// program in the container, and a laptop with Linux and the node's architecture.
package podfiles

import (
	"compress/gzip"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"runtime"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/kubectl/pkg/cmd/util/podcmd"

	"kubevpn/internal/api"
	"kubevpn/internal/kube/client"
	"kubevpn/internal/kube/workloads"
	"kubevpn/internal/process/files"
)

const (
	// prefix, with a number, is the name of an ephemeral container.
	prefix = "kubevpn-files-"
	// stay is how long the container stays after its last use.
	stay = 10 * time.Minute
)

// Source is a container of a pod that runs.
type Source struct {
	Cluster   *client.Cluster
	Pod       *corev1.Pod
	Container string
	Image     string // of the ephemeral container
}

// Files are the files of a directory of the container, at the other end of Conn (package remotefs).
type Files struct {
	Conn net.Conn
	Name string // files.Hello.Name
	How  string // the way that is in use, for people
}

// Open opens the files of a path: a directory, or the one that holds the file. Errors are *api.Error.
func Open(ctx context.Context, s Source, path string, writable bool) (*Files, error) {
	name, err := s.beside(ctx)
	var f *Files
	if err == nil {
		f, err = s.dial(ctx, name, []string{files.Program, files.Command, "--keep", name, "--container", s.Container},
			path, writable)
	}
	if e := api.AsError(err); e == nil || e.Code != api.ExitInject && e.Code != api.ExitPermission {
		if f != nil {
			f.How = "the ephemeral container " + name
		}
		return f, err
	}
	program, second := s.upload(ctx)
	if second == nil {
		f, second = s.dial(ctx, s.Container, []string{program, files.Command, "--remove"}, path, writable)
	}
	if second != nil {
		return nil, api.Errorf(api.AsError(err).Code, "%w; a program in the container itself does not do either: %w",
			err, second).WithHint("%s", api.AsError(err).Hint)
	}
	f.How = fmt.Sprintf("a program in the container itself, because %s", api.AsError(err).Message)
	return f, nil
}

// beside returns the name of an ephemeral container that sees the processes of the container.
func (s Source) beside(ctx context.Context) (string, error) {
	w := workloads.New(s.Cluster)
	h := workloads.Helper{
		Prefix: prefix, Image: s.Image, Target: s.Container, Security: s.security(),
		Args: func(name string) []string {
			return []string{files.Command, "--keep", name, "--stay", stay.String()}
		},
		What: "a container that reads the files of " + s.Container,
	}
	name, _, err := w.AddHelper(ctx, s.Pod, h, false)
	if err != nil {
		return "", err
	}
	return name, w.AwaitHelper(ctx, s.Pod, name)
}

// security returns the security context of a container that may look into the target: with its user if that is known,
// else as root, which becomes that user. A process needs the capabilities of those that it looks at.
func (s Source) security() *corev1.SecurityContext {
	c := workloads.Restricted()
	uid, gid, known := userOf(s.Pod, s.Container)
	if known && uid != 0 {
		c.RunAsUser, c.RunAsGroup = &uid, &gid
		return c
	}
	c.RunAsUser, c.RunAsGroup, c.RunAsNonRoot = new(int64), new(int64), new(bool)
	c.AllowPrivilegeEscalation, c.Capabilities = nil, nil
	if target, _ := podcmd.FindContainerByName(s.Pod, s.Container); target != nil && target.SecurityContext != nil {
		c.Privileged = target.SecurityContext.Privileged
		if target.SecurityContext.Capabilities != nil {
			c.Capabilities = &corev1.Capabilities{Add: target.SecurityContext.Capabilities.Add}
		}
	}
	return c
}

// userOf returns the user of a container's first process: what the kubelet reports (since Kubernetes 1.31), or what the
// pod's specification says. If neither does, the image does.
func userOf(p *corev1.Pod, name string) (uid, gid int64, known bool) {
	for _, st := range slices.Concat(p.Status.ContainerStatuses, p.Status.InitContainerStatuses) {
		if st.Name == name && st.User != nil && st.User.Linux != nil {
			return st.User.Linux.UID, st.User.Linux.GID, true
		}
	}
	set := func(u, g *int64) {
		if u != nil {
			uid, known = *u, true
		}
		if g != nil {
			gid = *g
		}
	}
	if c := p.Spec.SecurityContext; c != nil {
		set(c.RunAsUser, c.RunAsGroup)
	}
	if c, _ := podcmd.FindContainerByName(p, name); c != nil && c.SecurityContext != nil {
		set(c.SecurityContext.RunAsUser, c.SecurityContext.RunAsGroup)
	}
	return uid, gid, known
}

// dial starts the far end, and reads its Hello.
func (s Source) dial(ctx context.Context, container string, command []string, path string,
	writable bool) (f *Files, err error) {
	command = append(command, "--path", path)
	if writable {
		command = append(command, "--write")
	}
	conn := s.Cluster.DialExec(s.Pod.Namespace, s.Pod.Name, container, command)
	defer func() {
		if err != nil {
			conn.Close()
		}
	}()
	hello, err := files.ReadHello(ctx, conn)
	switch {
	case ctx.Err() != nil:
		return nil, ctx.Err()
	case errors.Is(err, files.ErrVersion): // a program of this version may be used instead
		return nil, api.Errorf(api.ExitInject, "%w %s", err, container)
	case err != nil:
		return nil, s.Cluster.Explain(fmt.Errorf("cannot serve the files of the container %s: %w", s.Container, err))
	case hello.Error != "":
		code := api.ExitUsage
		if hello.Unseen {
			code = api.ExitInject
		}
		return nil, api.Errorf(code, "%s", api.OneLine(hello.Error))
	}
	return &Files{Conn: conn, Name: hello.Name}, nil
}

// place writes a program to the first directory from which the container may run one, and prints its path.
const place = `PATH=$PATH:/bin:/usr/bin; for d in /tmp /var/tmp /run /home "$PWD"; do f=$d/.kubevpn-files-$$
if (umask 077; printf '#!/bin/sh\n' >"$f") 2>/dev/null && chmod 700 "$f" && "$f" 2>/dev/null; then
gzip -dc >"$f" && echo "$f" && exit; fi
rm -f "$f"; done
echo 'no directory allows to run a program' >&2; exit 1`

// upload copies this program into the container, and returns its path.
func (s Source) upload(ctx context.Context) (string, error) {
	if runtime.GOOS != "linux" {
		return "", fmt.Errorf("this machine runs %s, and containers run Linux", runtime.GOOS)
	}
	self, err := os.Open("/proc/self/exe")
	if err != nil {
		return "", err
	}
	defer self.Close()
	in, out := io.Pipe()
	defer in.Close()
	go func() {
		z, _ := gzip.NewWriterLevel(out, gzip.BestSpeed)
		_, err := io.Copy(z, self)
		out.CloseWithError(errors.Join(err, z.Close()))
	}()
	var said strings.Builder
	err = s.Cluster.Exec(ctx, client.ExecOptions{Namespace: s.Pod.Namespace, Pod: s.Pod.Name, Container: s.Container,
		Command: []string{"/bin/sh", "-c", place}, Stdin: in, Stdout: &said})
	return strings.TrimSpace(said.String()), err
}
