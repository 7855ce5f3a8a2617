package interceptor

import (
	"bytes"
	"context"
	"crypto/tls"
	"io"
	"net"
	"net/http"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"golang.org/x/net/http2"
	"golang.org/x/net/http2/hpack"

	"kubevpn/internal/testenv"
)

// unfinishedHeads are heads without an end, as a client sends them. Each takes megabytes in net/http's server.
func unfinishedHeads(t *testing.T) map[string][]byte {
	long := append([]byte("GET / HTTP/1.1\r\nHost: a\r\n"), testenv.ShortLines(256<<10)...)
	second := append([]byte("GET / HTTP/1.1\r\nHost: a\r\n\r\nGET / HTTP/1.1\r\n"), testenv.ShortLines(256<<10)...)
	frames := func(field string, n int) []byte {
		var b bytes.Buffer
		b.WriteString(http2.ClientPreface)
		f := http2.NewFramer(&b, nil)
		f.WriteSettings()
		var first bytes.Buffer
		e := hpack.NewEncoder(&first)
		for _, h := range [][2]string{{":method", "GET"}, {":scheme", "http"}, {":authority", "a"}, {":path", "/"}} {
			e.WriteField(hpack.HeaderField{Name: h[0], Value: h[1]})
		}
		f.WriteHeaders(http2.HeadersFrameParam{StreamID: 1, BlockFragment: first.Bytes()})
		for ; n > 0; n -= 4000 {
			if err := f.WriteContinuation(1, false, bytes.Repeat([]byte(field), 4000/len(field))); err != nil {
				t.Fatal(err)
			}
		}
		return b.Bytes()
	}
	return map[string][]byte{
		"http1": long, "http1, the second": second,
		"http2":           frames("\x90", 20000),           // accept-encoding of the static table: 47 bytes each
		"http2, literals": frames("\x00\x01a\x00", 120000), // a field "a" without a value: 33 bytes each
	}
}

// A head has a minute from its first byte to its last. A client that sends nothing has as long as the application allows.
func TestHeadsTimeOut(t *testing.T) {
	_, certificate := serveTLS(t, "", false)
	server := &tls.Config{Certificates: []tls.Certificate{certificate}, NextProtos: []string{"http/1.1"}}
	heads := map[string]string{"http1": "GET / HTTP/1.1\r\nHost: a\r\n", "tls": "", "silent inside tls": ""}
	for name, head := range unfinishedHeads(t) {
		if name == "http2" {
			heads[name] = string(head[:2000])
		}
	}
	for name, head := range heads {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				i := New(Config{
					Claims: func(string, uint16) []Claim {
						return []Claim{{Match: header(t, "a=b"), Target: &target{}, TLS: server}}
					},
					Application: func(context.Context, Flow) (net.Conn, error) {
						near, far := net.Pipe()
						go tls.Server(far, server).Read(make([]byte, 1))
						return near, nil
					},
				})
				near, far := net.Pipe()
				defer near.Close()
				ended := make(chan struct{})
				go func() {
					defer close(ended)
					i.ServeConn(t.Context(), far, Flow{Protocol: "tcp"})
				}()
				switch name {
				case "tls":
					head = "\x16\x03\x01\x02\x00\x01"
				case "silent inside tls":
					conn := tls.Client(near, &tls.Config{InsecureSkipVerify: true, NextProtos: server.NextProtos})
					if err := conn.HandshakeContext(t.Context()); err != nil {
						t.Fatal(err)
					}
				}
				go io.Copy(io.Discard, near)
				go io.WriteString(near, head)
				time.Sleep(headTimeout - time.Second)
				synctest.Wait()
				select {
				case <-ended:
					t.Fatal("the connection ended early")
				default:
				}
				time.Sleep(2 * time.Second)
				synctest.Wait()
				select {
				case <-ended:
					if head == "" {
						t.Error("the connection of a silent client ended")
					}
				default:
					if head != "" {
						t.Error("the connection did not end")
					}
				}
				near.Close()
				<-ended
			})
		})
	}
}

// Heads that clients begin and do not end hold a bounded memory, and delay no other request.
func TestSlowHeadsAreBounded(t *testing.T) {
	for name, head := range unfinishedHeads(t) {
		t.Run(name, func(t *testing.T) {
			r := newRig(t, serve(t, says("application")))
			before := testenv.Heap()
			var clients, sending sync.WaitGroup
			defer clients.Wait()
			for range 200 {
				near, far := net.Pipe() // a Write returns when the server has read all of it
				defer near.Close()
				clients.Go(func() { r.i.ServeConn(t.Context(), far, Flow{Protocol: "tcp", Dst: addrPort(t, r.addr)}) })
				clients.Go(func() { io.Copy(io.Discard, near) })
				sending.Go(func() { near.Write(head) }) // fails if the interceptor closes the connection
			}
			sending.Wait()
			for major := 1; major <= 2; major++ {
				if code, body := get(t, client(t, major), r.url("/"), "Cookie", string(bytes.Repeat([]byte("c"), 7000))); code != http.StatusOK || body != "application" {
					t.Errorf("a request of HTTP/%d gets %d %q", major, code, body)
				}
			}
			grown := (testenv.Heap() - before) >> 20
			t.Logf("200 unfinished heads take %d MiB", grown)
			if grown > 64 {
				t.Errorf("200 unfinished heads take %d MiB, want 64 at most", grown)
			}
		})
	}
}
