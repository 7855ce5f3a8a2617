package podconn

import (
	"bytes"
	"context"
	"io"
	"math/rand/v2"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"

	"kubevpn/internal/kube/client"
	"kubevpn/pkg/wakeup"
)

const (
	// The backoff after a port refuses. A container takes some tenths of a second to start, and an attempt on an open
	// connection costs the cluster about a millisecond.
	retryFirst = 20 * time.Millisecond
	retryLast  = 100 * time.Millisecond
	// reconnectLast limits the backoff after the connection breaks, or while the pod has no network.
	reconnectLast = time.Second
	// maxLine limits the line, in bytes.
	maxLine = 64 << 10
)

// FirstLine waits until a program listens at a TCP port of the pod's loopback address, and returns the first line that
// the program sends to a client that sends nothing. It uses pods/portforward, which works as soon as the pod has a
// network; the kubelet delivers a container's log up to a second later. FirstLine retries on one connection:
//
//	laptop ═ API server ═ kubelet ═ container runtime ─▶ 127.0.0.1:port   refused, a pause, ..., connected
//
// Any container of the pod may answer. The error is ctx's, or an *api.Error: the user may not forward ports, or the pod
// is gone (client.ErrPodGone).
func (d *Dialer) FirstLine(ctx context.Context, namespace, pod string, port uint16) ([]byte, error) {
	for pause := retryLast; ; pause = min(2*pause, reconnectLast) {
		line, err := d.firstLine(ctx, namespace, pod, port)
		switch {
		case ctx.Err() != nil:
			return nil, ctx.Err()
		case err == nil:
			return line, nil
		case apierrors.IsNotFound(err):
			return nil, client.PodGone(namespace, pod)
		case apierrors.IsForbidden(err), apierrors.IsUnauthorized(err):
			return nil, d.cluster.Explain(err)
		}
		d.log.Debug("waiting for a program to listen in a pod", "pod", pod, "port", port, "err", err, "again", pause)
		if !wakeup.Pause(ctx, pause) {
			return nil, ctx.Err()
		}
	}
}

// firstLine is FirstLine until the connection breaks.
func (d *Dialer) firstLine(ctx context.Context, namespace, pod string, port uint16) ([]byte, error) {
	var o *opener
	c, err := d.tryProtocols(ctx, func(ctx context.Context, how Protocol) (*podConn, error) {
		o = &opener{port: port}
		return d.portForward(ctx, how, namespace, pod, o)
	})
	if err != nil {
		return nil, err
	}
	defer c.Close()
	stop := context.AfterFunc(ctx, func() { c.Close() })
	defer stop()
	for pause := retryFirst; ; pause = min(pause*3/2, retryLast) {
		line, err := readLine(c)
		if err == nil || !c.over() {
			return line, err
		}
		// jitter, because all pods of a workload are called at the same time
		if !wakeup.Pause(ctx, pause/2+rand.N(pause)) {
			return nil, ctx.Err()
		}
		if err := c.open(ctx, o); err != nil {
			return nil, err
		}
	}
}

// readLine reads a line without its newline, which may be missing at the end. It does not wait for the end of the
// stream, which may come a second later.
func readLine(r io.Reader) ([]byte, error) {
	var all []byte
	var buf [512]byte
	for {
		n, err := r.Read(buf[:])
		all = append(all, buf[:n]...)
		line, _, whole := bytes.Cut(all, []byte("\n"))
		switch {
		case whole, len(line) > maxLine, err == io.EOF && len(line) > 0:
			return line, nil
		case err != nil:
			return nil, err
		}
	}
}
