package interceptor

import (
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"strings"
	"testing"
)

// stuck is a target that never answers.
type stuck struct{ target }

func (s *stuck) Dial(ctx context.Context, f Flow) (net.Conn, error) {
	s.dials.Add(1)
	<-ctx.Done()
	return nil, ctx.Err()
}

func TestMirrorGetsACopy(t *testing.T) {
	forEachProtocol(t, func(t *testing.T, major int) {
		type seen struct{ method, uri, user, body string }
		copied := make(chan seen, 10)
		laptop := serve(t, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			body, err := io.ReadAll(r.Body)
			if err != nil {
				t.Error(err)
			}
			copied <- seen{r.Method, r.RequestURI, r.Header.Get("X-User"), string(body)}
			io.WriteString(w, "dropped")
		}))
		r := newRig(t, serve(t, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			body, err := io.ReadAll(r.Body)
			if err != nil {
				t.Error(err)
			}
			w.Write(body)
		})))
		stats := new(Stats)
		r.claim(Claim{ID: "me", Match: header(t, "x-user=me"), Target: &target{addr: serve(t, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			if _, err := io.Copy(io.Discard, r.Body); err != nil {
				t.Error(err)
			}
			io.WriteString(w, "mine")
		}))}},
			Claim{ID: "mirror", Mirror: true, Target: &target{addr: laptop}, Stats: stats})
		c := client(t, major)
		for _, tt := range []struct{ user, body, want string }{{"you", "hello", "hello"}, {"me", "12", "mine"}, {"you", strings.Repeat("x", 100<<10), strings.Repeat("x", 100<<10)}} {
			req, err := http.NewRequest(http.MethodPut, r.url("/a%2Fb?c"), io.MultiReader(strings.NewReader(tt.body)))
			if err != nil {
				t.Fatal(err)
			}
			req.Header.Set("X-User", tt.user)
			resp, err := c.Do(req)
			if err != nil {
				t.Fatal(err)
			}
			got, err := io.ReadAll(resp.Body)
			resp.Body.Close()
			if err != nil || string(got) != tt.want {
				t.Errorf("%s was answered with %d bytes, want %d: %v", tt.user, len(got), len(tt.want), err)
			}
			if got, want := <-copied, (seen{"PUT", "/a%2Fb?c", tt.user, tt.body}); got != want {
				t.Errorf("the mirror got %.60q, want %.60q", got, want)
			}
		}
		get(t, c, r.url("/"))
		if got := <-copied; got.method != "GET" || got.body != "" {
			t.Errorf("the mirror got %q", got)
		}
		get(t, c, r.url("/"), "User-Agent", "kube-probe/1.37")
		c.CloseIdleConnections()
		r.conns.Wait()
		if stats.Requests() != 4 || stats.LastError() != nil {
			t.Errorf("%d copies: %v", stats.Requests(), stats.LastError())
		}
	})
}

func TestMirrorGetsRawConnections(t *testing.T) {
	copied := make(chan string, 1)
	r := newRig(t, echoServer(t, "app"))
	r.claim(Claim{Mirror: true, Target: &target{addr: listen(t, func(c net.Conn) {
		got, err := io.ReadAll(c)
		if err != nil {
			t.Error(err)
		}
		copied <- string(got)
	})}})
	if got := half(t, r.addr, "\x01bytes"); got != "app:\x01bytes" {
		t.Errorf("answered with %q", got)
	}
	if got := <-copied; got != "\x01bytes" {
		t.Errorf("the mirror got %q", got)
	}
}

func TestMirrorGetsUpgradedConnections(t *testing.T) {
	copied := make(chan string, 1)
	r := newRig(t, listen(t, func(c net.Conn) {
		b := make([]byte, 4096)
		c.Read(b)
		io.WriteString(c, "HTTP/1.1 101 Switching Protocols\r\nUpgrade: raw\r\nConnection: Upgrade\r\n\r\n")
		io.Copy(c, c)
	}))
	r.claim(Claim{Mirror: true, Target: &target{addr: listen(t, func(c net.Conn) {
		got, err := io.ReadAll(c)
		if err != nil {
			t.Error(err)
		}
		copied <- string(got)
	})}})
	const head = "GET / HTTP/1.1\r\nHost: a\r\nConnection: Upgrade\r\nUpgrade: raw\r\n\r\n"
	if got := half(t, r.addr, head+"bytes"); !strings.HasSuffix(got, "\r\n\r\nbytes") {
		t.Errorf("answered with %q", got)
	}
	if got := <-copied; got != head+"bytes" {
		t.Errorf("the mirror got %q", got)
	}
}

// A mirror that is unreachable, reads nothing or is missing never delays the original.
func TestMirrorNeverDelays(t *testing.T) {
	full := listen(t, func(c net.Conn) { // accepts the connection and reads one byte
		b := make([]byte, 1)
		c.Read(b)
		<-t.Context().Done()
	})
	forEachProtocol(t, func(t *testing.T, major int) {
		for name, mirror := range map[string]Target{"stuck": new(stuck), "full": &target{addr: full}, "refused": &target{addr: "127.0.0.1:1"}} {
			r := newRig(t, serve(t, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
				n, err := io.Copy(io.Discard, r.Body)
				if err != nil {
					t.Error(err)
				}
				fmt.Fprint(w, n)
			})))
			stats := new(Stats)
			r.claim(Claim{Mirror: true, Target: mirror, Stats: stats})
			c := client(t, major)
			for range maxCopies + 1 {
				get(t, c, r.url("/"))
			}
			const size = 8 << 20 // more than the backlog and the buffers of sockets
			resp, err := c.Post(r.url("/"), "", io.LimitReader(zeros{}, size))
			if err != nil {
				t.Fatal(err)
			}
			got, err := io.ReadAll(resp.Body)
			resp.Body.Close()
			if err != nil || string(got) != fmt.Sprint(size) {
				t.Errorf("%s: %s bytes arrived, %v", name, got, err)
			}
			r.stop()
			r.conns.Wait()
			if stats.LastError() == nil {
				t.Errorf("%s: no copy has failed", name)
			}
		}
	})
}
