package client

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"strings"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/util/httpstream/spdy" //nolint:staticcheck // the executor has its types
	"k8s.io/client-go/kubernetes/scheme"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/remotecommand"
	"k8s.io/client-go/util/exec"
	"k8s.io/streaming/pkg/httpstream"
)

// saidMost limits the end of a program's standard error that errors contain, in bytes.
const saidMost = 4 << 10

// execPing keeps load balancers from closing an idle connection, as client-go does.
const execPing = 5 * time.Second

// ExecOptions are the options of Exec.
type ExecOptions struct {
	Namespace, Pod, Container string
	Command                   []string
	Stdin                     io.Reader // nil: none
	Stdout                    io.Writer
}

// Exec runs a program in a container until it or ctx ends. It uses WebSocket (v5.channel.k8s.io) and falls back to
// SPDY. If the program fails, the error contains its exit code and the end of its standard error.
func (c *Cluster) Exec(ctx context.Context, o ExecOptions) error {
	url := c.kube.CoreV1().RESTClient().Post().Resource("pods").Namespace(o.Namespace).Name(o.Pod).SubResource("exec").
		VersionedParams(&corev1.PodExecOptions{
			Container: o.Container, Command: o.Command, Stdin: o.Stdin != nil, Stdout: true, Stderr: true,
		}, scheme.ParameterCodec).URL()
	executor, err := c.executor(url)
	if err != nil {
		return c.Explain(err)
	}
	said := &tail{most: saidMost}
	err = executor.StreamWithContext(ctx, remotecommand.StreamOptions{Stdin: o.Stdin, Stdout: o.Stdout, Stderr: said})
	var exit exec.ExitError
	switch {
	case err == nil:
		return nil
	case ctx.Err() != nil:
		return ctx.Err()
	case errors.As(err, &exit) && exit.Exited():
		text := fmt.Sprintf("%s ended with exit code %d", o.Command[0], exit.ExitStatus())
		if end := said.String(); end != "" {
			text += ": " + end
		}
		return errors.New(text)
	}
	return c.ExplainContext(ctx, fmt.Errorf("running %s in %s/%s: %w", o.Command[0], o.Namespace, o.Pod, err))
}

// executor returns an executor for an exec. Through jump hosts it uses only SPDY, for which client-go accepts a dialer.
func (c *Cluster) executor(url *url.URL) (remotecommand.Executor, error) {
	config, err := c.login.withCertificate(c.config)
	if err != nil {
		return nil, err
	}
	if c.dial.jump != nil {
		return c.jumpExecutor(config, url)
	}
	first, err := remotecommand.NewWebSocketExecutor(config, "GET", url.String())
	if err != nil {
		return nil, err
	}
	second, err := remotecommand.NewSPDYExecutor(config, "POST", url)
	if err != nil {
		return nil, err
	}
	return remotecommand.NewFallbackExecutor(first, second, func(err error) bool {
		return httpstream.IsUpgradeFailure(err) || httpstream.IsHTTPSProxyError(err)
	})
}

func (c *Cluster) jumpExecutor(config *rest.Config, url *url.URL) (remotecommand.Executor, error) {
	tlsConfig, err := rest.TLSConfigFor(config)
	if err != nil {
		return nil, err
	}
	upgrade, err := spdy.NewRoundTripperWithConfig(spdy.RoundTripperConfig{
		PingPeriod:       execPing,
		UpgradeTransport: &http.Transport{DialContext: c.DialContext, TLSClientConfig: tlsConfig},
	})
	if err != nil {
		return nil, err
	}
	wrapper, err := rest.HTTPWrappersForConfig(config, upgrade)
	if err != nil {
		return nil, err
	}
	return remotecommand.NewSPDYExecutorForTransports(wrapper, upgrade, "POST", url)
}

// tail is a writer that keeps the last bytes. It is safe for concurrent use.
type tail struct {
	most int
	mu   sync.Mutex
	kept []byte
}

func (t *tail) Write(p []byte) (int, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.kept = append(t.kept, p...)
	if more := len(t.kept) - t.most; more > 0 {
		t.kept = t.kept[more:]
	}
	return len(p), nil
}

func (t *tail) String() string {
	return strings.TrimSpace(string(bytes.ToValidUTF8(t.bytes(), nil)))
}

// bytes returns a copy of what is kept.
func (t *tail) bytes() []byte {
	t.mu.Lock()
	defer t.mu.Unlock()
	return bytes.Clone(t.kept)
}

// DialExec runs a program in a container and returns a connection to its standard input and output. Close ends the
// program's input and releases the connection. Read returns Exec's error, or io.EOF, when the program has ended or
// cannot run.
func (c *Cluster) DialExec(namespace, pod, container string, command []string) net.Conn {
	ours, theirs := net.Pipe()
	ctx, cancel := context.WithCancel(context.Background())
	conn := &execConn{Conn: ours, cancel: cancel}
	go func() {
		defer cancel()
		conn.err = c.Exec(ctx, ExecOptions{
			Namespace: namespace, Pod: pod, Container: container, Command: command, Stdin: theirs, Stdout: theirs,
		})
		theirs.Close()
	}()
	return conn
}

type execConn struct {
	net.Conn
	cancel context.CancelFunc
	err    error // set before the other end closes, which Read reports as io.EOF
}

func (c *execConn) Read(p []byte) (int, error) {
	n, err := c.Conn.Read(p)
	if errors.Is(err, io.EOF) {
		err = cmp.Or(c.err, err)
	}
	return n, err
}

func (c *execConn) Close() error {
	c.cancel()
	return c.Conn.Close()
}
