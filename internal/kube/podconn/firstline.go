package podconn

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"net/http"
	"strconv"
	"time"

	"github.com/moby/spdystream/spdy"
	corev1 "k8s.io/api/core/v1"
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
		p, err := tryProtocols(ctx, d, func(ctx context.Context, how Protocol) (*portCaller, error) {
			return d.newPortCaller(ctx, how, namespace, pod, port)
		})
		var line []byte
		if err == nil {
			line, err = p.untilAnswered(ctx)
		}
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

// portCaller is a port-forward that connects to one port several times, one after the other. Attempt n has the streams
// 4n+1 for errors and 4n+3 for data.
type portCaller struct {
	link link
	raw  net.Conn
	port uint16

	headers *spdy.Framer // writes to out; the headers of all streams share its compression context
	out     bytes.Buffer
	tries   uint32

	line    []byte // of the latest attempt
	refused bool   // the latest attempt was refused
}

// newPortCaller makes the first attempt, which shows whether the protocol works.
func (d *Dialer) newPortCaller(ctx context.Context, how Protocol, namespace, pod string,
	port uint16) (*portCaller, error) {
	l, raw, err := d.forwardLink(ctx, how, namespace, pod)
	if err != nil {
		return nil, err
	}
	p := &portCaller{link: l, raw: raw, port: port}
	stop := context.AfterFunc(ctx, func() { raw.Close() })
	p.refused, err = p.call()
	if !stop() && err == nil {
		err = context.Cause(ctx)
	}
	if err != nil {
		raw.Close()
		return nil, fmt.Errorf("port-forward to pod %s/%s: %w", namespace, pod, dialError(ctx, err))
	}
	d.worked.Store(int32(how))
	return p, nil
}

// untilAnswered calls until a program sends a line, and closes the port-forward.
func (p *portCaller) untilAnswered(ctx context.Context) ([]byte, error) {
	defer p.raw.Close()
	stop := context.AfterFunc(ctx, func() { p.raw.Close() })
	defer stop()
	for pause := retryFirst; p.refused; pause = min(pause*3/2, retryLast) {
		// jitter, because all pods of a workload are called at the same time
		if !wakeup.Pause(ctx, pause/2+rand.N(pause)) {
			return nil, ctx.Err()
		}
		var err error
		if p.refused, err = p.call(); err != nil {
			return nil, err
		}
	}
	return p.line, nil
}

// call connects to the port and reads the first line. A connection that ends without data counts as refused.
func (p *portCaller) call() (refused bool, err error) {
	errorID, dataID := 4*p.tries+1, 4*p.tries+3
	opening, err := p.opening(errorID, dataID)
	if err != nil {
		return false, err
	}
	p.tries++
	if err := p.link.writeFrame(opening); err != nil {
		return false, err
	}
	p.line = nil
	for {
		stream, ended, data, err := p.next()
		if err != nil {
			return false, err
		}
		switch stream {
		case dataID:
			p.line = append(p.line, data...)
			if line, _, whole := bytes.Cut(p.line, []byte("\n")); whole || ended && len(line) > 0 ||
				len(line) > maxLine {
				p.line = line // do not wait for the stream's end, which may come a second later
				return false, nil
			}
		case errorID: // it ends after the data stream, or contains the refusal
			if len(data) > 0 || ended {
				return len(p.line) == 0, nil
			}
		}
	}
}

// opening returns, after headroom, SYN_STREAM and FIN of the error stream and SYN_STREAM of the data stream.
func (p *portCaller) opening(errorID, dataID uint32) ([]byte, error) {
	p.out.Reset()
	p.out.Write(make([]byte, headroom))
	if p.headers == nil {
		var err error
		if p.headers, err = spdy.NewFramer(&p.out, nil); err != nil {
			return nil, fmt.Errorf("compressing SPDY headers: %w", err)
		}
	}
	headers := func(kind string) http.Header {
		return http.Header{
			corev1.StreamType:                 {kind},
			corev1.PortHeader:                 {strconv.Itoa(int(p.port))},
			corev1.PortForwardRequestIDHeader: {strconv.FormatUint(uint64(p.tries), 10)},
		}
	}
	for _, f := range []spdy.Frame{
		&spdy.SynStreamFrame{StreamId: spdy.StreamId(errorID), Headers: headers(corev1.StreamTypeError)},
		&spdy.DataFrame{StreamId: spdy.StreamId(errorID), Flags: spdy.DataFlagFin},
		&spdy.SynStreamFrame{StreamId: spdy.StreamId(dataID), Headers: headers(corev1.StreamTypeData)},
	} {
		if err := p.headers.WriteFrame(f); err != nil {
			return nil, fmt.Errorf("building the SPDY opening: %w", err)
		}
	}
	return p.out.Bytes(), nil
}

// next reads a frame. It returns stream 0 for a frame that does not belong to a stream.
func (p *portCaller) next() (stream uint32, ended bool, data []byte, err error) {
	var head [spdyHeader]byte
	if _, err := io.ReadFull(p.link, head[:]); err != nil {
		return 0, false, nil, unexpected(err)
	}
	f := spdyFrame{head: head, headN: spdyHeader}
	length := int(binary.BigEndian.Uint32(head[4:]) & 0xffffff)
	if length > maxData {
		return 0, false, nil, fmt.Errorf("%w: a frame of %d bytes", errSPDY, length)
	}
	payload := make([]byte, length)
	if _, err := io.ReadFull(p.link, payload); err != nil {
		return 0, false, nil, unexpected(err)
	}
	if !f.control() {
		return f.stream(), f.fin(), payload, nil
	}
	if len(payload) >= 4 {
		stream = binary.BigEndian.Uint32(payload) & 0x7fffffff
	}
	switch spdy.ControlFrameType(f.kind()) {
	case spdy.TypeSynReply:
		return stream, f.fin(), nil, nil
	case spdy.TypeRstStream:
		return stream, true, nil, nil
	case spdy.TypeGoAway:
		return 0, false, nil, io.ErrUnexpectedEOF
	case spdy.TypePing:
		if stream%2 == 0 { // the peer's; ours would be odd
			return 0, false, nil, p.link.writeFrame(appendControl(make([]byte, headroom, headroom+12), spdy.TypePing,
				stream))
		}
	}
	return 0, false, nil, nil
}

// unexpected returns err, or io.ErrUnexpectedEOF in place of io.EOF.
func unexpected(err error) error {
	if errors.Is(err, io.EOF) {
		return io.ErrUnexpectedEOF
	}
	return err
}
