package cluster

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
)

const (
	// The wait before a port that refuses is tried again grows from first to last: a container takes some tenths of a second
	// to start, and an attempt on a connection that is there costs the cluster about a millisecond.
	knockFirst = 20 * time.Millisecond
	knockLast  = 100 * time.Millisecond
	// A connection that breaks, or a pod that has no network yet, is a matter of more.
	reconnectLast = time.Second
	// maxGreeting is the most that is read of what a port says.
	maxGreeting = 64 << 10
)

// FirstLine waits until somebody listens at a TCP port of the pod's loopback address, and returns the first line of what is said
// there to who connects and says nothing. It goes by pods/portforward, which needs the pod's network alone; the kubelet gives a
// container's log only after its next look at the container runtime, up to a second later. The port is tried again and again
// on one connection:
//
//	laptop ═ API server ═ kubelet ═ container runtime ─▶ 127.0.0.1:port   refused, a pause, refused, a pause, ... connected
//
// Who answers is somebody in the pod: nothing says in which of its containers. The error is ctx's, or an *api.Error: that the
// user may not forward ports, or that the pod has gone (ErrPodGone).
func (c *Cluster) FirstLine(ctx context.Context, namespace, pod string, port uint16) ([]byte, error) {
	for pause := knockLast; ; pause = min(2*pause, reconnectLast) {
		k, err := eitherWay(ctx, c, func(ctx context.Context, how Protocol) (*knocker, error) {
			return c.knocker(ctx, how, namespace, pod, port)
		})
		var said []byte
		if err == nil {
			said, err = k.untilAnswered(ctx)
		}
		switch {
		case ctx.Err() != nil:
			return nil, ctx.Err()
		case err == nil:
			return said, nil
		case apierrors.IsNotFound(err):
			return nil, podGone(namespace, pod)
		case apierrors.IsForbidden(err), apierrors.IsUnauthorized(err):
			return nil, c.Explain(err)
		}
		c.log.Debug("waiting for somebody to listen in a pod", "pod", pod, "port", port, "err", err, "again", pause)
		if err := linger(ctx, pause); err != nil {
			return nil, err
		}
	}
}

// knocker is a port-forward on which one port is connected to several times, one after the other. Its streams of the n-th
// attempt are 4n+1, for errors, and 4n+3, for data.
type knocker struct {
	link link
	raw  net.Conn
	port uint16

	headers *spdy.Framer // all streams' headers share a compression context
	out     bytes.Buffer // what headers writes
	tries   uint32

	said    []byte
	refused bool // the first attempt has been, and was refused
}

// knocker makes the first attempt, which shows whether the protocol gets through.
func (c *Cluster) knocker(ctx context.Context, how Protocol, namespace, pod string, port uint16) (*knocker, error) {
	l, raw, err := c.forwardLink(ctx, how, namespace, pod)
	if err != nil {
		return nil, err
	}
	k := &knocker{link: l, raw: raw, port: port}
	stop := context.AfterFunc(ctx, func() { raw.Close() })
	k.refused, err = k.knock()
	if !stop() && err == nil {
		err = context.Cause(ctx)
	}
	if err != nil {
		raw.Close()
		return nil, fmt.Errorf("port-forward to pod %s/%s: %w", namespace, pod, dialError(ctx, err))
	}
	c.worked.Store(int32(how))
	return k, nil
}

// untilAnswered knocks until somebody says something, and closes the port-forward.
func (k *knocker) untilAnswered(ctx context.Context) ([]byte, error) {
	defer k.raw.Close()
	stop := context.AfterFunc(ctx, func() { k.raw.Close() })
	defer stop()
	for pause := knockFirst; k.refused; pause = min(pause*3/2, knockLast) {
		if err := linger(ctx, pause/2+rand.N(pause)); err != nil { // so that the pods of a workload are not tried all at once
			return nil, err
		}
		var err error
		if k.refused, err = k.knock(); err != nil {
			return nil, err
		}
	}
	return k.said, nil
}

// knock connects to the port and reads what is said, if anybody listens. To end without a word is to refuse.
func (k *knocker) knock() (refused bool, err error) {
	errorID, dataID := 4*k.tries+1, 4*k.tries+3
	opening, err := k.opening(errorID, dataID)
	if err != nil {
		return false, err
	}
	k.tries++
	if err := k.link.writeFrame(opening); err != nil {
		return false, err
	}
	k.said = nil
	for {
		stream, ended, data, err := k.next()
		if err != nil {
			return false, err
		}
		switch stream {
		case dataID:
			k.said = append(k.said, data...)
			if line, _, whole := bytes.Cut(k.said, []byte("\n")); whole || ended && len(line) > 0 || len(line) > maxGreeting {
				k.said = line // the runtime tells of the end up to a second later
				return false, nil
			}
		case errorID: // it ends last, or says why there is nothing
			if len(data) > 0 || ended {
				return len(k.said) == 0, nil
			}
		}
	}
}

// opening is SYN_STREAM and FIN of the error stream, then SYN_STREAM of the data stream, after headroom.
func (k *knocker) opening(errorID, dataID uint32) ([]byte, error) {
	k.out.Reset()
	k.out.Write(make([]byte, headroom))
	if k.headers == nil {
		var err error
		if k.headers, err = spdy.NewFramer(&k.out, nil); err != nil {
			return nil, fmt.Errorf("compressing SPDY headers: %w", err)
		}
	}
	headers := func(kind string) http.Header {
		return http.Header{
			corev1.StreamType:                 {kind},
			corev1.PortHeader:                 {strconv.Itoa(int(k.port))},
			corev1.PortForwardRequestIDHeader: {strconv.FormatUint(uint64(k.tries), 10)},
		}
	}
	for _, f := range []spdy.Frame{
		&spdy.SynStreamFrame{StreamId: spdy.StreamId(errorID), Headers: headers(corev1.StreamTypeError)},
		&spdy.DataFrame{StreamId: spdy.StreamId(errorID), Flags: spdy.DataFlagFin},
		&spdy.SynStreamFrame{StreamId: spdy.StreamId(dataID), Headers: headers(corev1.StreamTypeData)},
	} {
		if err := k.headers.WriteFrame(f); err != nil {
			return nil, fmt.Errorf("building the SPDY opening: %w", err)
		}
	}
	return k.out.Bytes(), nil
}

// next reads a frame: what it says of a stream, which is 0 if that is nothing.
func (k *knocker) next() (stream uint32, ended bool, data []byte, err error) {
	var head [spdyHeader]byte
	if _, err := io.ReadFull(k.link, head[:]); err != nil {
		return 0, false, nil, unexpected(err)
	}
	f := spdyFrame{head: head, headN: spdyHeader}
	length := int(binary.BigEndian.Uint32(head[4:]) & 0xffffff)
	if length > maxData {
		return 0, false, nil, fmt.Errorf("%w: a frame of %d bytes", errSPDY, length)
	}
	payload := make([]byte, length)
	if _, err := io.ReadFull(k.link, payload); err != nil {
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
			return 0, false, nil, k.link.writeFrame(appendControl(make([]byte, headroom, headroom+12), spdy.TypePing, stream))
		}
	}
	return 0, false, nil, nil
}

// unexpected is err; the end of the connection is never expected.
func unexpected(err error) error {
	if errors.Is(err, io.EOF) {
		return io.ErrUnexpectedEOF
	}
	return err
}
