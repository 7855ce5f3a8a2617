package interceptor

import (
	"context"
	"crypto/tls"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"slices"
	"testing"
)

// serveTLS starts a server that speaks TLS, and returns its address and certificate.
func serveTLS(tb testing.TB, name string, http2 bool) (string, tls.Certificate) {
	tb.Helper()
	s := httptest.NewUnstartedServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		fmt.Fprintf(w, "%s %s %s", name, r.Proto, r.TLS.ServerName)
	}))
	s.EnableHTTP2 = http2
	s.StartTLS()
	tb.Cleanup(s.Close)
	return s.Listener.Addr().String(), s.TLS.Certificates[0]
}

func tlsClient(tb testing.TB, addr string, http2 bool) *http.Client {
	tr := &http.Transport{Protocols: new(http.Protocols), TLSClientConfig: &tls.Config{InsecureSkipVerify: true}}
	tr.Protocols.SetHTTP1(true)
	tr.Protocols.SetHTTP2(http2)
	tr.DialContext = func(ctx context.Context, _, _ string) (net.Conn, error) {
		return new(net.Dialer).DialContext(ctx, "tcp", addr)
	}
	tb.Cleanup(tr.CloseIdleConnections)
	return &http.Client{Transport: tr}
}

func TestTLSRequestsAreMatched(t *testing.T) {
	for _, tt := range []struct{ client, app bool }{{true, true}, {true, false}, {false, true}, {false, false}} {
		t.Run(fmt.Sprintf("http2-client-%v-application-%v", tt.client, tt.app), func(t *testing.T) {
			app, certificate := serveTLS(t, "app", tt.app)
			laptop, _ := serveTLS(t, "laptop", tt.app)
			proto := "HTTP/1.1"
			if tt.client && tt.app {
				proto = "HTTP/2.0"
			}
			r := newRig(t, app)
			mine := Claim{Match: header(t, "x-user=me"), Target: &target{addr: laptop}}
			const url = "https://example.com/"

			r.claim(mine)
			if _, got := get(t, tlsClient(t, r.addr, tt.client), url, "X-User", "me"); got != "app "+proto+" example.com" {
				t.Errorf("without the key it was answered with %q", got)
			}
			r.mu.Lock()
			if !slices.Equal(r.notes, []string{noteTLS}) {
				t.Errorf("the notes are %q", r.notes)
			}
			r.mu.Unlock()

			mine.TLS = &tls.Config{Certificates: []tls.Certificate{certificate}}
			r.claim(mine)
			before := r.appDials.Load()
			c := tlsClient(t, r.addr, tt.client)
			for range 3 {
				if _, got := get(t, c, url, "X-User", "me"); got != "laptop "+proto+" example.com" {
					t.Errorf("with the key it was answered with %q", got)
				}
				if _, got := get(t, c, url); got != "app "+proto+" example.com" {
					t.Errorf("with the key, somebody else was answered with %q", got)
				}
			}
			if n := r.appDials.Load() - before; n != 1 {
				t.Errorf("the application saw %d connections for one", n)
			}

			r.claim(Claim{Target: &target{addr: laptop}})
			if _, got := get(t, tlsClient(t, r.addr, tt.client), url); got != "laptop "+proto+" example.com" {
				t.Errorf("a claim of everything was answered with %q", got)
			}
		})
	}
}

func TestOtherProtocolsInsideTLSAreForwarded(t *testing.T) {
	_, certificate := serveTLS(t, "", false)
	for _, protocols := range [][]string{nil, {"mqtt"}} {
		l, err := tls.Listen("tcp", "127.0.0.1:0", &tls.Config{Certificates: []tls.Certificate{certificate}, NextProtos: protocols})
		if err != nil {
			t.Fatal(err)
		}
		ended := make(chan struct{})
		go func() {
			defer close(ended)
			c, err := l.Accept()
			if err != nil {
				return
			}
			defer c.Close()
			got, err := io.ReadAll(c)
			if err != nil {
				t.Error(err)
			}
			fmt.Fprintf(c, "%s in %s", got, c.(*tls.Conn).ConnectionState().NegotiatedProtocol)
		}()
		r := newRig(t, l.Addr().String())
		r.claim(Claim{Match: header(t, "x-user=me"), Target: new(target), TLS: &tls.Config{Certificates: []tls.Certificate{certificate}}})
		c := tls.Client(dial(t, r.addr), &tls.Config{InsecureSkipVerify: true, NextProtos: protocols})
		if _, err := c.Write([]byte("\x10bytes")); err != nil {
			t.Fatal(err)
		}
		if err := c.CloseWrite(); err != nil {
			t.Fatal(err)
		}
		got, err := io.ReadAll(c)
		want := "\x10bytes in "
		if len(protocols) > 0 {
			want += protocols[0]
		}
		if err != nil || string(got) != want {
			t.Errorf("with %v it was answered with %q, %v", protocols, got, err)
		}
		c.Close()
		l.Close()
		<-ended
	}
}
