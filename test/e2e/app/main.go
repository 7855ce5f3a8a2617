// App is the sample application of the suites about intercepts. It runs in the cluster's pods and on the laptop, and
// each answer names the instance that gave it.
//
//	8080/tcp  HTTP/1.1, and HTTP/2 without TLS (prior knowledge, and by upgrade)
//	          /          JSON: {"name", "remote", "method", "path", "proto", "header", "body"}: body is its length and SHA-256
//	          /events    server-sent events: N of them (?n=), one every 100 ms
//	          /ws        WebSocket: "NAME" first, then an echo
//	          /via       forwards the request to the URL ?to=, without the header ?drop=; without one, it keeps connections
//	          /price     JSON: {"total", "at", "items": [{"id", "name"}]}: at and id vary, total is the value of -price
//	          /download  ?bytes=N zeros, with their SHA-256 in a trailer
//	          /hold      sends a head, and then nothing until the client disconnects
//	          /login     200; /moved redirects to it
//	          /seen      the number of requests, by the first word of User-Agent
//	          /deafen    closes the listener of 9001/tcp
//	          /unchanged 304, with the Content-Length of the unchanged content
//	9002/tcp  HTTP/1.1 by hand: answers each head with that head
//	9005/tcp  HTTP/1.1 by hand: answers each head with the text in X-Say, unescaped and with NAME replaced. Then
//	          echoes if the text begins a tunnel, and closes the connection if the text is HTTP/1.0, says close or has
//	          a Content-Length that begins with 200
//	8443/tcp  the same over TLS, with HTTP/2 if the client asks for it; only with a certificate
//	9090/tcp  gRPC: grpc.testing.TestService (UnaryCall, FullDuplexCall) with reflection; the trailer "x-name" contains the name
//	9443/tcp  the same over TLS; only with a certificate
//	9004/tcp  speaks first: "220 NAME\n", then echoes lines
//	9001/tcp  raw echo, after "NAME\n" as the answer to the first byte
//	9001/udp  answers each datagram with "NAME: " and the datagram
//	5300/udp  DNS: every question is answered with the TXT record "NAME"
//
// With -http PORT it serves only HTTP, on that port. With -mesh it acts as the proxy of a service mesh, as Istio's: it
// forwards connections that were redirected to 15006 to their original destination, from 127.0.0.6, and with a
// certificate those that were redirected to 15001, inside TLS. With -clients, 8443 requires such a certificate. With
// the arguments look and a JSON object (looking) it prints what a program sees of its surroundings.
package main

import (
	"bufio"
	"cmp"
	"context"
	"crypto/rand"
	"crypto/sha256"
	"crypto/tls"
	"crypto/x509"
	"encoding/hex"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"log"
	"net"
	"net/http"
	"net/url"
	"os"
	"os/signal"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/gorilla/websocket"
	"github.com/miekg/dns"
	"golang.org/x/net/http2"
	"golang.org/x/net/http2/h2c" //nolint:staticcheck // net/http serves no Upgrade: h2c
	"golang.org/x/sync/errgroup"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/health"
	healthpb "google.golang.org/grpc/health/grpc_health_v1"
	testgrpc "google.golang.org/grpc/interop/grpc_testing"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/reflection"
	"google.golang.org/grpc/status"
)

type app struct {
	name  string
	host  string // where it listens: all addresses, 127.0.0.1, the pod's
	cert  string
	key   string
	from  string // file of the certificate that clients need at 8443; empty: none
	price string // as JSON

	began time.Time

	only string        // the port of HTTP, the only one; empty: all
	deaf chan struct{} // closed by /deafen

	mu   sync.Mutex
	seen map[string]int
}

func main() {
	a := app{began: time.Now(), deaf: make(chan struct{}), seen: make(map[string]int)}
	flag.StringVar(&a.name, "name", "", "who answers; empty: the host's name")
	flag.StringVar(&a.host, "host", os.Getenv("LISTEN_HOST"), "address to listen on; empty: all ($LISTEN_HOST)")
	flag.StringVar(&a.cert, "cert", os.Getenv("TLS_CERT"), "file of a certificate, for 8443 ($TLS_CERT)")
	flag.StringVar(&a.key, "key", os.Getenv("TLS_KEY"), "file of its key ($TLS_KEY)")
	flag.StringVar(&a.from, "clients", os.Getenv("TLS_CLIENTS"),
		"file of the certificate that clients need at 8443 ($TLS_CLIENTS)")
	flag.StringVar(&a.price, "price", "10.5", "total of /price, as JSON")
	flag.StringVar(&a.only, "http", "", "serve only HTTP, at this port")
	ask := flag.String("get", "", "request this URL, and exit with 1 unless the status is 200")
	mesh := flag.Bool("mesh", false, "be a mesh's proxy")
	flag.Parse()
	if a.name == "" {
		a.name, _ = os.Hostname()
	}
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	run := a.run
	if *ask != "" {
		run = func(context.Context) error { return get(*ask) }
	}
	if flag.Arg(0) == "look" {
		run = func(context.Context) error { return look(os.Stdout, flag.Arg(1)) }
	}
	if *mesh {
		run = func(ctx context.Context) error { return runMesh(ctx, a.cert, a.key) }
	}
	if err := run(ctx); err != nil {
		log.Fatal(err)
	}
}

func (a *app) run(ctx context.Context) error {
	g, ctx := errgroup.WithContext(ctx)
	handler := a.handler()
	many := &http2.Server{MaxConcurrentStreams: 5000} //nolint:staticcheck // as below
	upgrading := h2c.NewHandler(handler, many)        //nolint:staticcheck // net/http serves no Upgrade: h2c
	plain := &http.Server{Handler: upgrading, MaxHeaderBytes: 1 << 20}
	a.serve(ctx, g, cmp.Or(a.only, "8080"), plain.Serve, plain.Close)
	if a.only != "" {
		return g.Wait()
	}
	if a.cert != "" {
		config, err := a.clients()
		if err != nil {
			return err
		}
		secure := &http.Server{Handler: handler, TLSConfig: config}
		a.serve(ctx, g, "8443", func(l net.Listener) error { return secure.ServeTLS(l, a.cert, a.key) }, secure.Close)
	}
	a.serveCalls(ctx, g, "9090")
	if a.cert != "" {
		pair, err := credentials.NewServerTLSFromFile(a.cert, a.key)
		if err != nil {
			return err
		}
		a.serveCalls(ctx, g, "9443", grpc.Creds(pair))
	}
	a.serveConns(ctx, g, "9004", a.speakFirst)
	a.serveConns(ctx, g, "9001", a.echo)
	a.serveConns(ctx, g, "9002", func(c *net.TCPConn) error { return answerHeads(c, echoHead) })
	a.serveConns(ctx, g, "9005", func(c *net.TCPConn) error { return answerHeads(c, a.say) })
	packets, err := net.ListenPacket("udp", net.JoinHostPort(a.host, "9001"))
	if err != nil {
		return err
	}
	context.AfterFunc(ctx, func() { packets.Close() })
	g.Go(func() error { return a.echoPackets(packets) })
	names := &dns.Server{Addr: net.JoinHostPort(a.host, "5300"), Net: "udp", Handler: dns.HandlerFunc(a.answer)}
	context.AfterFunc(ctx, func() { _ = names.Shutdown() })
	g.Go(names.ListenAndServe)
	log.Printf("%s is ready", a.name)
	if err := g.Wait(); ctx.Err() == nil {
		return err
	}
	return nil
}

// clients returns a configuration that requires the certificate of clients, or nil.
func (a *app) clients() (*tls.Config, error) {
	if a.from == "" {
		return nil, nil
	}
	text, err := os.ReadFile(a.from)
	if err != nil {
		return nil, err
	}
	pool := x509.NewCertPool()
	if !pool.AppendCertsFromPEM(text) {
		return nil, fmt.Errorf("%s has no certificate", a.from)
	}
	return &tls.Config{ClientAuth: tls.RequireAndVerifyClientCert, ClientCAs: pool}, nil
}

func get(address string) error {
	resp, err := http.Get(address)
	if err != nil {
		return err
	}
	resp.Body.Close()
	if resp.StatusCode != http.StatusOK {
		return errors.New(resp.Status)
	}
	return nil
}

func (a *app) serve(ctx context.Context, g *errgroup.Group, port string, serve func(net.Listener) error,
	end func() error) {
	g.Go(func() error {
		l, err := net.Listen("tcp", net.JoinHostPort(a.host, port))
		if err != nil {
			return err
		}
		context.AfterFunc(ctx, func() { _ = end() })
		return serve(l)
	})
}

func (a *app) serveCalls(ctx context.Context, g *errgroup.Group, port string, options ...grpc.ServerOption) {
	calls := grpc.NewServer(options...)
	testgrpc.RegisterTestServiceServer(calls, &testService{name: a.name})
	healthpb.RegisterHealthServer(calls, health.NewServer())
	reflection.Register(calls)
	a.serve(ctx, g, port, calls.Serve, func() error { calls.Stop(); return nil })
}

func (a *app) serveConns(ctx context.Context, g *errgroup.Group, port string, handle func(*net.TCPConn) error) {
	end := make(chan func() error, 1)
	a.serve(ctx, g, port, func(l net.Listener) error {
		end <- l.Close
		if port == "9001" {
			go func() { <-a.deaf; l.Close() }()
		}
		for {
			c, err := l.Accept()
			if errors.Is(err, net.ErrClosed) {
				return nil
			}
			if err != nil {
				return err
			}
			go func() {
				defer c.Close()
				if err := handle(c.(*net.TCPConn)); err != nil {
					log.Printf("%s: %v", port, err)
				}
			}()
		}
	}, func() error { return (<-end)() })
}

func (a *app) handler() http.Handler {
	mux := http.NewServeMux()
	mux.HandleFunc("/", a.describe)
	mux.HandleFunc("/file", a.file)
	mux.HandleFunc("/via", a.via)
	mux.HandleFunc("/events", a.events)
	mux.HandleFunc("/ws", a.webSocket)
	mux.HandleFunc("/download", a.download)
	mux.HandleFunc("/price", a.quote)
	mux.HandleFunc("/hold", hold)
	mux.HandleFunc("/login", a.describe)
	mux.Handle("/moved", http.RedirectHandler("/login", http.StatusFound))
	mux.HandleFunc("/unchanged", func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("X-Name", a.name)
		w.Header().Set("Content-Length", "7")
		w.WriteHeader(http.StatusNotModified)
	})
	mux.HandleFunc("/deafen", func(http.ResponseWriter, *http.Request) { close(a.deaf) })
	mux.HandleFunc("/seen", func(w http.ResponseWriter, _ *http.Request) {
		a.mu.Lock()
		defer a.mu.Unlock()
		if err := json.NewEncoder(w).Encode(a.seen); err != nil {
			log.Print(err)
		}
	})
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		agent, _, _ := strings.Cut(r.UserAgent(), " ")
		if r.TLS != nil {
			agent = "tls " + agent
		}
		a.mu.Lock()
		a.seen[agent+" "+r.URL.Path]++
		a.mu.Unlock()
		mux.ServeHTTP(w, r)
	})
}

// described is the JSON answer of /.
type described struct {
	Name   string      `json:"name"`
	Remote string      `json:"remote"`
	Method string      `json:"method"`
	Path   string      `json:"path"`
	Host   string      `json:"host"`
	Proto  string      `json:"proto"`
	Header http.Header `json:"header"`
	Body   struct {
		Length int64  `json:"length"`
		SHA256 string `json:"sha256"`
	} `json:"body"`
}

func (a *app) describe(w http.ResponseWriter, r *http.Request) {
	d := described{Name: a.name, Remote: r.RemoteAddr, Method: r.Method, Path: r.URL.Path, Host: r.Host, Proto: r.Proto,
		Header: r.Header}
	sum := sha256.New()
	var err error
	if d.Body.Length, err = io.Copy(sum, r.Body); err != nil {
		log.Printf("body: %v", err)
		return
	}
	d.Body.SHA256 = hex.EncodeToString(sum.Sum(nil))
	w.Header().Set("Content-Type", "application/json")
	w.Header().Set("X-Name", a.name)
	if err := json.NewEncoder(w).Encode(d); err != nil {
		log.Print(err)
	}
}

// via forwards a request as a gateway does.
func (a *app) via(w http.ResponseWriter, r *http.Request) {
	client, drop := http.DefaultTransport, r.URL.Query().Get("drop")
	if drop != "" {
		client = &http.Transport{DisableKeepAlives: true}
	}
	req, err := http.NewRequestWithContext(r.Context(), r.Method, r.URL.Query().Get("to"), http.NoBody)
	if err != nil {
		http.Error(w, err.Error(), http.StatusBadRequest)
		return
	}
	req.Header = r.Header.Clone()
	req.Header.Del("Connection")
	req.Header.Del(drop)
	resp, err := client.RoundTrip(req)
	if err != nil {
		http.Error(w, err.Error(), http.StatusBadGateway)
		return
	}
	defer resp.Body.Close()
	w.WriteHeader(resp.StatusCode)
	if _, err := io.Copy(w, resp.Body); err != nil {
		log.Print(err)
	}
}

// file answers with a file of its own file system, and with the start time of the program.
func (a *app) file(w http.ResponseWriter, r *http.Request) {
	text, err := os.ReadFile(r.URL.Query().Get("path"))
	if err != nil {
		http.Error(w, a.name+": "+err.Error(), http.StatusNotFound)
		return
	}
	w.Header().Set("X-Began", a.began.Format(time.RFC3339Nano))
	if _, err := w.Write(text); err != nil {
		log.Print(err)
	}
}

func number(r *http.Request, key string, otherwise int64) int64 {
	n, err := strconv.ParseInt(r.URL.Query().Get(key), 10, 64)
	if err != nil {
		return otherwise
	}
	return n
}

func (a *app) events(w http.ResponseWriter, r *http.Request) {
	w.Header().Set("Content-Type", "text/event-stream")
	out := http.NewResponseController(w)
	tick := time.NewTicker(100 * time.Millisecond)
	defer tick.Stop()
	for i := range number(r, "n", 5) {
		fmt.Fprintf(w, "data: %s %d\n\n", a.name, i)
		if err := out.Flush(); err != nil {
			return
		}
		select {
		case <-tick.C:
		case <-r.Context().Done():
			return
		}
	}
}

func (a *app) webSocket(w http.ResponseWriter, r *http.Request) {
	c, err := (&websocket.Upgrader{}).Upgrade(w, r, nil)
	if err != nil {
		log.Print(err)
		return
	}
	defer c.Close()
	err = c.WriteMessage(websocket.TextMessage, []byte(a.name))
	for err == nil {
		var kind int
		var message []byte
		if kind, message, err = c.ReadMessage(); err == nil {
			err = c.WriteMessage(kind, message)
		}
	}
}

// quote answers with values that vary, and with one that depends on the version of the program.
func (a *app) quote(w http.ResponseWriter, r *http.Request) {
	w.Header().Set("Content-Type", "application/json")
	fmt.Fprintf(w, `{"total": %s, "at": %q, "items": [{"id": %q, "name": %q}]}`+"\n", a.price,
		time.Now().Format(time.RFC3339Nano), rand.Text(), r.URL.Query().Get("item"))
}

func (a *app) download(w http.ResponseWriter, r *http.Request) {
	w.Header().Set("Trailer", "X-Sha256")
	w.Header().Set("X-Name", a.name)
	sum := sha256.New()
	if _, err := io.CopyN(io.MultiWriter(w, sum), zeros{}, number(r, "bytes", 1<<20)); err != nil {
		log.Print(err)
		return
	}
	w.Header().Set("X-Sha256", hex.EncodeToString(sum.Sum(nil)))
}

func hold(w http.ResponseWriter, r *http.Request) {
	if err := http.NewResponseController(w).Flush(); err != nil {
		log.Print(err)
	}
	<-r.Context().Done()
}

// answerHeads calls answer for each head until answer returns false. A head is all lines up to an empty one, and need
// not be a valid request.
func answerHeads(c *net.TCPConn, answer func(c *net.TCPConn, r *bufio.Reader, head string) (bool, error)) error {
	r := bufio.NewReader(c)
	var head []byte
	for {
		line, err := r.ReadBytes('\n')
		if errors.Is(err, io.EOF) {
			return nil
		} else if err != nil {
			return err
		}
		if head = append(head, line...); len(line) > 2 {
			continue
		}
		if goes, err := answer(c, r, string(head)); !goes || err != nil {
			return err
		}
		head = nil
	}
}

func echoHead(c *net.TCPConn, _ *bufio.Reader, head string) (bool, error) {
	_, err := fmt.Fprintf(c, "HTTP/1.1 200\r\nx-Name : %d\r\ncontent-LENGTH: %[1]d\r\n\r\n%s", len(head), head)
	return true, err
}

// say answers with the text in X-Say.
func (a *app) say(c *net.TCPConn, r *bufio.Reader, head string) (bool, error) {
	_, after, _ := strings.Cut(head, "X-Say: ")
	escaped, _, _ := strings.Cut(after, "\r\n")
	text, err := url.PathUnescape(escaped)
	if err != nil {
		return false, err
	}
	if _, err := io.WriteString(c, strings.ReplaceAll(text, "NAME", a.name)); err != nil {
		return false, err
	}
	if strings.HasPrefix(head, "CONNECT") || strings.Contains(text, " 101 ") {
		_, err := io.Copy(c, r)
		return false, err
	}
	return !strings.HasPrefix(text, "HTTP/1.0") && !strings.Contains(text, "Content-Length: 200") &&
		!strings.Contains(text, "Connection: close"), nil
}

type zeros struct{}

func (zeros) Read(p []byte) (int, error) { clear(p); return len(p), nil }

func (a *app) speakFirst(c *net.TCPConn) error {
	if _, err := fmt.Fprintf(c, "220 %s\n", a.name); err != nil {
		return err
	}
	_, err := io.Copy(c, c)
	return err
}

func (a *app) echo(c *net.TCPConn) error {
	r := bufio.NewReader(c)
	if _, err := r.Peek(1); err != nil {
		if errors.Is(err, io.EOF) {
			return nil
		}
		return err
	}
	if _, err := fmt.Fprintln(c, a.name); err != nil {
		return err
	}
	if _, err := io.Copy(c, r); err != nil {
		return err
	}
	return c.CloseWrite()
}

func (a *app) echoPackets(c net.PacketConn) error {
	b := make([]byte, 1<<16)
	for {
		n, from, err := c.ReadFrom(b)
		if err != nil {
			return err
		}
		if _, err := c.WriteTo(append([]byte(a.name+": "), b[:n]...), from); err != nil {
			log.Printf("udp: %v", err)
		}
	}
}

func (a *app) answer(w dns.ResponseWriter, question *dns.Msg) {
	m := new(dns.Msg).SetReply(question)
	for _, q := range question.Question {
		m.Answer = append(m.Answer,
			&dns.TXT{Hdr: dns.RR_Header{Name: q.Name, Rrtype: dns.TypeTXT, Class: dns.ClassINET},
				Txt: []string{a.name}})
	}
	if err := w.WriteMsg(m); err != nil {
		log.Printf("dns: %v", err)
	}
}

// testService answers with the app's name.
type testService struct {
	testgrpc.UnimplementedTestServiceServer
	name string
}

func (s *testService) UnaryCall(ctx context.Context, in *testgrpc.SimpleRequest) (*testgrpc.SimpleResponse, error) {
	if err := grpc.SetTrailer(ctx, metadata.Pairs("x-name", s.name)); err != nil {
		return nil, err
	}
	if s := in.GetResponseStatus(); s != nil {
		return nil, status.Error(codes.Code(s.GetCode()), s.GetMessage()) //nolint:gosec // a code
	}
	return &testgrpc.SimpleResponse{Hostname: s.name, Payload: in.GetPayload()}, nil
}

func (s *testService) FullDuplexCall(stream testgrpc.TestService_FullDuplexCallServer) error {
	stream.SetTrailer(metadata.Pairs("x-name", s.name))
	for {
		in, err := stream.Recv()
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return err
		}
		body := append([]byte(s.name+": "), in.GetPayload().GetBody()...)
		response := &testgrpc.StreamingOutputCallResponse{Payload: &testgrpc.Payload{Body: body}}
		if err := stream.Send(response); err != nil {
			return err
		}
		if s := in.GetResponseStatus(); s != nil { // although the client has not ended
			return status.Error(codes.Code(s.GetCode()), s.GetMessage()) //nolint:gosec // a code
		}
	}
}
