package interceptor

import (
	"context"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	testgrpc "google.golang.org/grpc/interop/grpc_testing"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
)

// grpcServer answers with its name, in the message and in a header or trailer.
type grpcServer struct {
	testgrpc.UnimplementedTestServiceServer
	name string
	left chan struct{} // closed when a stream is canceled
}

func (s *grpcServer) UnaryCall(ctx context.Context, req *testgrpc.SimpleRequest) (*testgrpc.SimpleResponse, error) {
	md, _ := metadata.FromIncomingContext(ctx)
	grpc.SetHeader(ctx, metadata.Pairs("x-from", s.name))
	grpc.SetTrailer(ctx, metadata.Pairs("x-after-bin", string([]byte{0, 255})))
	if c := req.GetResponseStatus(); c != nil {
		return nil, status.Error(codes.Code(c.Code), c.Message)
	}
	if _, ok := ctx.Deadline(); ok {
		<-ctx.Done()
		return nil, ctx.Err()
	}
	return &testgrpc.SimpleResponse{Username: s.name, Hostname: md.Get(":authority")[0]}, nil
}

func (s *grpcServer) FullDuplexCall(stream testgrpc.TestService_FullDuplexCallServer) error {
	for {
		req, err := stream.Recv()
		switch {
		case err == io.EOF:
			stream.SetTrailer(metadata.Pairs("x-from", s.name))
			return nil
		case err != nil:
			close(s.left)
			return err
		}
		if err := stream.Send(&testgrpc.StreamingOutputCallResponse{Payload: req.Payload}); err != nil {
			return err
		}
	}
}

func serveGRPC(tb testing.TB, name string, options ...grpc.ServerOption) (*grpcServer, string) {
	tb.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		tb.Fatal(err)
	}
	s, impl := grpc.NewServer(options...), &grpcServer{name: name, left: make(chan struct{})}
	testgrpc.RegisterTestServiceServer(s, impl)
	ended := make(chan error, 1)
	go func() { ended <- s.Serve(l) }()
	tb.Cleanup(func() {
		s.Stop()
		if err := <-ended; err != nil {
			tb.Error(err)
		}
	})
	return impl, l.Addr().String()
}

func TestGRPCReachesItsTarget(t *testing.T) {
	_, app := serveGRPC(t, "app")
	laptop, addr := serveGRPC(t, "laptop")
	r := newRig(t, app)
	r.claim(Claim{ID: "me", Match: header(t, "x-user=me"), Target: &target{addr: addr}},
		Claim{ID: "lost", Match: header(t, "x-user=lost"), Target: &target{addr: "127.0.0.1:1"}})
	conn, err := grpc.NewClient("passthrough:///"+r.addr, grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	client := testgrpc.NewTestServiceClient(conn)
	as := func(user string) context.Context {
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		t.Cleanup(cancel)
		return metadata.AppendToOutgoingContext(context.WithoutCancel(ctx), "x-user", user)
	}

	for user, want := range map[string]string{"me": "laptop", "you": "app"} {
		var head, trail metadata.MD
		resp, err := client.UnaryCall(as(user), new(testgrpc.SimpleRequest), grpc.Header(&head), grpc.Trailer(&trail))
		if err != nil {
			t.Fatal(err)
		}
		if resp.Username != want || resp.Hostname != r.addr || head.Get("x-from")[0] != want || trail.Get("x-after-bin")[0] != "\x00\xff" {
			t.Errorf("%s was answered by %v, header %v, trailer %v", user, resp, head, trail)
		}
		_, err = client.UnaryCall(as(user), &testgrpc.SimpleRequest{ResponseStatus: &testgrpc.EchoStatus{Code: int32(codes.DataLoss), Message: "lost, sadly"}}, grpc.Trailer(&trail))
		if s := status.Convert(err); s.Code() != codes.DataLoss || s.Message() != "lost, sadly" || len(trail.Get("x-after-bin")) != 1 {
			t.Errorf("an error arrived as %v, trailer %v", err, trail)
		}

		stream, err := client.FullDuplexCall(as(user))
		if err != nil {
			t.Fatal(err)
		}
		for n := range 100 {
			body := make([]byte, 1+n*300)
			if err := stream.Send(&testgrpc.StreamingOutputCallRequest{Payload: &testgrpc.Payload{Body: body}}); err != nil {
				t.Fatal(err)
			}
			if resp, err := stream.Recv(); err != nil || len(resp.Payload.Body) != len(body) {
				t.Fatalf("%v, %v", resp, err)
			}
		}
		if err := stream.CloseSend(); err != nil {
			t.Fatal(err)
		}
		if _, err := stream.Recv(); err != io.EOF || stream.Trailer().Get("x-from")[0] != want {
			t.Errorf("a stream ended with %v, trailer %v", err, stream.Trailer())
		}
	}

	if _, err := client.EmptyCall(as("me"), new(testgrpc.Empty)); status.Code(err) != codes.Unimplemented {
		t.Errorf("a method that does not exist: %v", err)
	}
	if _, err := client.UnaryCall(as("lost"), new(testgrpc.SimpleRequest)); status.Code(err) != codes.Unavailable {
		t.Errorf("a target that refuses connections: %v", err)
	}
	soon, cancel := context.WithTimeout(as("you"), 100*time.Millisecond)
	defer cancel()
	if _, err := client.UnaryCall(soon, new(testgrpc.SimpleRequest)); status.Code(err) != codes.DeadlineExceeded {
		t.Errorf("a deadline that passes: %v", err)
	}
	ctx, cancel := context.WithCancel(as("me"))
	stream, err := client.FullDuplexCall(ctx)
	if err != nil {
		t.Fatal(err)
	}
	if err := stream.Send(&testgrpc.StreamingOutputCallRequest{Payload: &testgrpc.Payload{Body: []byte{1}}}); err != nil {
		t.Fatal(err)
	}
	if _, err := stream.Recv(); err != nil {
		t.Fatal(err)
	}
	cancel()
	select {
	case <-laptop.left:
	case <-time.After(10 * time.Second):
		t.Error("the target's stream goes on after the client has canceled it")
	}
}

// A server may notice a deadline before its client does. It then resets the stream with CANCEL. The handler here does not
// return before: between the end of its context and the reset, grpc-go would send the status CANCELED.
func TestGRPCDeadlineOfServer(t *testing.T) {
	answered := make(chan struct{})
	holds := grpc.StreamInterceptor(func(srv any, s grpc.ServerStream, _ *grpc.StreamServerInfo, handle grpc.StreamHandler) error {
		err := handle(srv, s)
		<-answered
		return err
	})
	defer close(answered)              // before the servers stop
	message := string(make([]byte, 5)) // a frame without fields
	for _, sent := range []string{"", message} {
		_, app := serveGRPC(t, "app", holds)
		r := newRig(t, app)
		out, in := io.Pipe()
		defer in.Close()
		req, err := http.NewRequest(http.MethodPost, "http://"+r.addr+"/grpc.testing.TestService/FullDuplexCall", out)
		if err != nil {
			t.Fatal(err)
		}
		req.Header.Set("Content-Type", "application/grpc")
		req.Header.Set("TE", "trailers")
		req.Header.Set("Grpc-Timeout", "300m")
		go io.WriteString(in, sent)
		resp, err := client(t, 2).Do(req)
		if err != nil {
			t.Fatal(err)
		}
		defer resp.Body.Close()
		got, err := io.ReadAll(resp.Body)
		status := resp.Header.Get("Grpc-Status") + resp.Trailer.Get("Grpc-Status")
		if err != nil || string(got) != sent || status != "4" {
			t.Errorf("a call that sent %q got %q, %v, status %q", sent, got, err, status)
		}
	}
}

func TestEndCallAnswersWithTheStatusOfTheDeadline(t *testing.T) {
	for timeout, want := range map[string]string{"20m": "4", "1M": "4", "": "1", "2H": "1", "7200S": "1", "99999999H": "1", "x": "1"} {
		r := httptest.NewRequest(http.MethodPost, "/", nil)
		r.Header.Set("Grpc-Timeout", timeout)
		w := httptest.NewRecorder()
		endCall(w, r, time.Now().Add(-time.Hour), false)
		if got := w.Result().Header.Get("Grpc-Status"); got != want {
			t.Errorf("a call with the timeout %q ended with %q, want %q", timeout, got, want)
		}
	}
}

// A gRPC server that shuts down sends GOAWAY, so that its clients connect elsewhere.
func TestGoAwayReachesTheClient(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	s := grpc.NewServer()
	testgrpc.RegisterTestServiceServer(s, &grpcServer{name: "app"})
	ended := make(chan error, 1)
	go func() { ended <- s.Serve(l) }()
	r := newRig(t, l.Addr().String())
	r.claim(Claim{Match: header(t, "x-user=me"), Target: new(target)})
	lost := make(chan struct{}, 1)
	conn, err := grpc.NewClient("passthrough:///"+r.addr, grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithContextDialer(func(ctx context.Context, addr string) (net.Conn, error) {
			c, err := new(net.Dialer).DialContext(ctx, "tcp", addr)
			return &closeNoticer{Conn: c, closed: lost}, err
		}))
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	if _, err := testgrpc.NewTestServiceClient(conn).UnaryCall(t.Context(), new(testgrpc.SimpleRequest)); err != nil {
		t.Fatal(err)
	}
	s.GracefulStop()
	if err := <-ended; err != nil {
		t.Error(err)
	}
	select {
	case <-lost:
	case <-time.After(10 * time.Second):
		t.Error("the client keeps its connection")
	}
}

type closeNoticer struct {
	net.Conn
	closed chan struct{}
}

func (c *closeNoticer) Close() error {
	select {
	case c.closed <- struct{}{}:
	default: // one that was made afterwards
	}
	return c.Conn.Close()
}
