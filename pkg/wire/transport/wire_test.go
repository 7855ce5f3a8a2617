package transport

import (
	"bytes"
	"context"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"syscall"
	"testing"
	"time"
)

func TestRequestParsesBack(t *testing.T) {
	for _, test := range []struct {
		request   Request
		datagrams bool
		want      string
	}{
		{Request{Proto: ProtoControl}, false, "0000" + "000000" + "000000"},
		{Request{Proto: ProtoTicket}, false, "0005" + "000000" + "000000"},
		{Request{ProtoTCP, netip.MustParseAddrPort("198.19.0.2:40000"), netip.MustParseAddrPort("10.96.0.10:80")}, false,
			"0006" + "04c61300029c40" + "040a60000a0050"},
		{Request{ProtoUDP, netip.AddrPort{}, netip.MustParseAddrPort("[fd00::10]:53")}, true,
			"0111" + "000000" + "10fd0000000000000000000000000000100035"},
		{Request{Proto: ProtoIP, Src: netip.MustParseAddrPort("198.19.0.2:3")}, false, "0004" + "04c61300020003" + "000000"},
	} {
		got := appendRequest(nil, test.request, test.datagrams)
		if hex.EncodeToString(got) != test.want {
			t.Errorf("%s: got %x, want %s", test.request, got, test.want)
		}
		back, datagrams, err := parseRequest(got)
		if err != nil || back != test.request || datagrams != test.datagrams {
			t.Errorf("%s comes back as %s, %v, %v", test.request, back, datagrams, err)
		}
	}
}

func TestProtoHasAName(t *testing.T) {
	for proto, want := range map[Proto]string{
		ProtoControl: "control", ProtoEcho: "echo", ProtoIP: "ip", ProtoTicket: "ticket", ProtoTCP: "tcp", ProtoUDP: "udp", 132: "protocol 132",
	} {
		if got := proto.String(); got != want {
			t.Errorf("protocol %d is %q, want %q", uint8(proto), got, want)
		}
	}
}

func TestHelloParsesBack(t *testing.T) {
	h := hello{Session: SessionID{1}, Token: token{2}, Link: 3, Flags: flagFirst, Attempt: 4, Received: 5}
	want := "6b75626576706e01" + "01000000000000000000000000000000" +
		"0200000000000000000000000000000000000000000000000000000000000000" + "03010000" + "00000004" + "0000000000000005"
	if got := hex.EncodeToString(marshalHandshake(h)); got != want {
		t.Errorf("got %s, want %s", got, want)
	}
	if back, err := readHandshake[hello](bytes.NewReader(marshalHandshake(h))); back != h || err != nil {
		t.Errorf("comes back as %+v, %v", back, err)
	}
	r := reply{Status: statusStale, Received: 7}
	if got, want := hex.EncodeToString(marshalHandshake(r)), "6b75626576706e01"+"0500000000000000"+"0000000000000007"; got != want {
		t.Errorf("got %s, want %s", got, want)
	}
	if back, err := readHandshake[reply](bytes.NewReader(marshalHandshake(r))); back != r || err != nil {
		t.Errorf("comes back as %+v, %v", back, err)
	}
}

func TestCodeOfMapsErrors(t *testing.T) {
	dial := func(errno error) error {
		return &net.OpError{Op: "dial", Err: os.NewSyscallError("connect", errno)}
	}
	for _, test := range []struct {
		err  error
		want Code
	}{
		{nil, CodeOK},
		{dial(syscall.ECONNREFUSED), CodeRefused},
		{dial(syscall.ECONNRESET), CodeRefused},
		{dial(syscall.Errno(10061)), CodeRefused},
		{dial(syscall.EHOSTUNREACH), CodeHostUnreachable},
		{dial(syscall.ENETUNREACH), CodeNetUnreachable},
		{dial(syscall.ETIMEDOUT), CodeTimeout},
		{dial(syscall.EACCES), CodeProhibited},
		{dial(syscall.EPERM), CodeProhibited},
		{dial(syscall.EMFILE), CodeFailed},
		{&net.OpError{Op: "dial", Err: os.ErrDeadlineExceeded}, CodeTimeout},
		{fmt.Errorf("dialing: %w", context.DeadlineExceeded), CodeTimeout},
		{&net.DNSError{IsTimeout: true}, CodeTimeout},
		{context.Canceled, CodeFailed},
		{fmt.Errorf("opening: %w", CodeNetUnreachable.Err()), CodeNetUnreachable},
	} {
		if got := CodeOf(test.err); got != test.want {
			t.Errorf("%v: got %v, want %v", test.err, got, test.want)
		}
	}
}

// server runs a Server on a pipe listener and returns its dial function.
func runServer(t *testing.T, cfg ServerConfig) func() net.Conn {
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- NewServer(cfg).Serve(ctx, listener) }()
	t.Cleanup(func() {
		cancel()
		if err := <-done; err != nil {
			t.Error(err)
		}
	})
	return func() net.Conn {
		c, err := net.Dial("tcp", listener.Addr().String())
		if err != nil {
			t.Fatal(err)
		}
		c.SetDeadline(time.Now().Add(20 * time.Second))
		t.Cleanup(func() { c.Close() })
		return c
	}
}

func TestHandshakeIsRejected(t *testing.T) {
	dial := runServer(t, ServerConfig{MaxLinks: 4})
	id, secret := SessionID{1}, token{2}
	for _, test := range []struct {
		name  string
		hello hello
		want  status
	}{
		{"unknown_session", hello{Session: id, Token: secret, Attempt: 1}, statusUnknown},
		{"first_link_is_not_0", hello{Session: id, Token: secret, Flags: flagFirst, Link: 1, Attempt: 1}, statusUnknown},
		{"first", hello{Session: id, Token: secret, Flags: flagFirst, Attempt: 1}, statusOK},
		{"wrong_token", hello{Session: id, Token: token{3}, Attempt: 2}, statusRefused},
		{"wrong_token_and_first", hello{Session: id, Token: token{3}, Flags: flagFirst, Attempt: 2}, statusRefused},
		{"same_attempt", hello{Session: id, Token: secret, Attempt: 1}, statusStale},
		{"next_attempt", hello{Session: id, Token: secret, Attempt: 3}, statusOK},
		{"late_attempt", hello{Session: id, Token: secret, Attempt: 2}, statusStale},
		{"link_that_never_was", hello{Session: id, Token: secret, Link: 1, Attempt: 1, Received: 9}, statusUnknown},
		{"second_link", hello{Session: id, Token: secret, Link: 1, Flags: flagFirst, Attempt: 1}, statusOK},
		{"too_many_links", hello{Session: id, Token: secret, Link: 4, Flags: flagFirst, Attempt: 1}, statusFull},
	} {
		t.Run(test.name, func(t *testing.T) {
			c := dial()
			c.Write(marshalHandshake(test.hello))
			r, err := readHandshake[reply](c)
			if err != nil || r.Status != test.want {
				t.Errorf("got %d, %v, want %d", r.Status, err, test.want)
			}
		})
	}
	t.Run("other_version", func(t *testing.T) {
		c := dial()
		b := marshalHandshake(hello{Session: id, Token: secret, Attempt: 9})
		b[7] = 9
		c.Write(b[:8])
		if r, err := readHandshake[reply](c); err != nil || r.Status != statusVersion {
			t.Errorf("got %d, %v", r.Status, err)
		}
	})
	t.Run("something_else", func(t *testing.T) {
		c := dial()
		fmt.Fprint(c, "GET / HTTP/1.1\r\n\r\n")
		if b, err := io.ReadAll(c); len(b) != 0 {
			t.Errorf("got %q, %v", b, err)
		}
	})
}

// TestClientEndsOnAnotherVersion: a client does not try again.
func TestClientEndsOnAnotherVersion(t *testing.T) {
	c := NewClient(ClientConfig{Dial: func(context.Context) (net.Conn, error) {
		a, b := net.Pipe()
		go func() {
			readHandshake[hello](b)
			b.Write(marshalHandshake(reply{Status: statusVersion}))
			b.Close()
		}()
		return a, nil
	}})
	if err := c.Run(t.Context()); !errors.Is(err, ErrVersion) {
		t.Errorf("got %v", err)
	}
}

// TestViolationEndsTheSession: a violation of the protocol ends only the session of its sender.
func TestViolationEndsTheSession(t *testing.T) {
	frame := func(kind byte, length int, stream uint32, payload ...byte) []byte {
		var b [headerLen]byte
		putHeader(&b, header{kind: kind, length: length, stream: stream})
		return append(b[:], payload...)
	}
	whole := func(kind byte, stream uint32, payload ...byte) []byte {
		return frame(kind, len(payload), stream, payload...)
	}
	request := appendRequest(nil, Request{Proto: ProtoTCP}, false)
	opened := whole(frameOpen, 1, request...)
	datagrams := whole(frameOpen, 1, appendRequest(nil, Request{Proto: ProtoUDP}, true)...)
	big := whole(frameData, 1, make([]byte, 60<<10)...)
	for _, test := range []struct {
		name string
		send []byte
	}{
		{"unknown_type", whole(99, 0)},
		{"too_long", frame(frameData, maxPayload+1, 1)},
		{"long_control", whole(frameAck, 0, make([]byte, 9)...)},
		{"data_without_stream", whole(frameData, 0)},
		{"ack_with_stream", whole(frameAck, 1, make([]byte, 8)...)},
		{"ack_beyond", whole(frameAck, 0, 0, 0, 0, 1, 0, 0, 0, 0)},
		{"bad_request", whole(frameOpen, 1, 0, 6, 5)},
		{"their_number", whole(frameOpen, 2, request...)},
		{"opened_twice", append(opened[:len(opened):len(opened)], opened...)},
		{"answer_to_nothing", append(opened[:len(opened):len(opened)], whole(frameAnswer, 1, 0)...)},
		{"beyond_window", append(datagrams, bytes.Repeat(big, 5)...)},
		{"data_before_answer", append(opened[:len(opened):len(opened)], whole(frameData, 1, 1)...)},
		{"data_after_fin", append(opened[:len(opened):len(opened)], append(whole(frameFin, 1), whole(frameData, 1, 1)...)...)},
		{"window_overflow", append(opened[:len(opened):len(opened)], whole(frameWindow, 1, 0xff, 0xff, 0xff, 0xff)...)},
	} {
		t.Run(test.name, func(t *testing.T) {
			ended := make(chan error, 1)
			dial := runServer(t, ServerConfig{OnSession: func(ctx context.Context, s *Session) {
				<-s.Done()
				ended <- s.Err()
			}})
			c := dial()
			c.Write(marshalHandshake(hello{Session: SessionID{1}, Flags: flagFirst, Attempt: 1}))
			if r, err := readHandshake[reply](c); err != nil || r.Status != statusOK {
				t.Fatal(r, err)
			}
			c.Write(test.send)
			select {
			case err := <-ended:
				if !errors.Is(err, ErrProtocol) {
					t.Errorf("session ended with %v", err)
				}
			case <-time.After(20 * time.Second):
				t.Error("the session goes on")
			}
		})
	}
}

func TestReplayContinuesAfterRewind(t *testing.T) {
	var r replay
	var all []byte
	for i := range 3000 { // frames of 100 bytes: more than one chunk
		b := bytes.Repeat([]byte{byte(i)}, 100)
		all = append(all, b...)
		r.append(b)
	}
	read := func() []byte {
		var got []byte
		for r.unsent() > 0 {
			b, c := r.take()
			got = append(got, b...)
			r.release(c)
		}
		return got
	}
	if !bytes.Equal(read(), all) {
		t.Fatal("first sending differs")
	}
	if err := r.ack(1234); err != nil {
		t.Fatal(err)
	}
	if err := r.rewind(70_001); err != nil {
		t.Fatal(err)
	}
	if !bytes.Equal(read(), all[70_001:]) {
		t.Fatal("replay differs")
	}
	if err := r.rewind(70_000); err == nil {
		t.Error("replaying what was acknowledged succeeds")
	}
	if err := r.ack(uint64(len(all) + 1)); err == nil {
		t.Error("acknowledging the future succeeds")
	}
	if err := r.ack(uint64(len(all))); err != nil || len(r.chunks) != 0 || r.held() != 0 {
		t.Errorf("%v, %d chunks are held for %d bytes", err, len(r.chunks), r.held())
	}
}

func FuzzRequest(f *testing.F) {
	f.Add(appendRequest(nil, Request{ProtoTCP, netip.MustParseAddrPort("1.2.3.4:5"), netip.MustParseAddrPort("[::1]:6")}, true))
	f.Fuzz(func(t *testing.T, b []byte) {
		r, datagrams, err := parseRequest(b)
		if err != nil {
			return
		}
		if again := appendRequest(nil, r, datagrams); !bytes.Equal(again, b) {
			t.Errorf("%x becomes %x", b, again)
		}
	})
}

func FuzzHello(f *testing.F) {
	f.Add(marshalHandshake(hello{Session: SessionID{1}, Flags: flagFirst}))
	f.Fuzz(func(t *testing.T, b []byte) {
		if h, err := readHandshake[hello](bytes.NewReader(b)); err == nil {
			if back, err := readHandshake[hello](bytes.NewReader(marshalHandshake(h))); err != nil || back != h {
				t.Errorf("%+v becomes %+v, %v", h, back, err)
			}
		}
		readHandshake[reply](bytes.NewReader(b))
	})
}

// FuzzFrames sends arbitrary bytes to a session, which must not panic or leak.
func FuzzFrames(f *testing.F) {
	var b [headerLen]byte
	add := func(kind byte, stream uint32, payload []byte) []byte {
		putHeader(&b, header{kind: kind, length: len(payload), stream: stream})
		return append(append([]byte(nil), b[:]...), payload...)
	}
	tcp := add(frameOpen, 1, appendRequest(nil, Request{Proto: ProtoTCP}, false))
	udp := add(frameOpen, 3, appendRequest(nil, Request{Proto: ProtoUDP}, true))
	f.Add(append(append(tcp, add(frameData, 1, []byte("hello"))...), add(frameFin, 1, nil)...))
	f.Add(append(append(udp, add(frameData, 3, nil)...), add(frameFin, 3, []byte{1})...))
	f.Add(add(framePing, 0, make([]byte, 16)))
	f.Add(binary.BigEndian.AppendUint64(nil, 1<<63))
	f.Fuzz(func(t *testing.T, b []byte) {
		s := newSession(identity{client: false}, 1, NewBudget(16, 64<<20), Tuning{}.withDefaults(), NewServer(ServerConfig{}).log)
		near, far := net.Pipe()
		if _, err := s.link(0).attach(near, fallback, 0); err != nil {
			t.Fatal(err)
		}
		go io.Copy(io.Discard, far)
		go func() {
			for {
				in, err := s.Accept(context.Background())
				if err != nil {
					return
				}
				if in.Datagrams() {
					if p, err := in.AcceptPackets(); err == nil {
						go p.ReadPacket(make([]byte, 100))
					}
				} else if st, err := in.Accept(); err == nil {
					go st.WriteTo(io.Discard)
				}
			}
		}()
		far.Write(b)
		far.Close()
		s.fail(ErrSessionClosed)
		s.wg.Wait()
	})
}
