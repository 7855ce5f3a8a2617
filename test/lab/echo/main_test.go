package main

import (
	"bufio"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"syscall"
	"testing"
	"time"
)

// connect returns a connection whose other end handle serves.
func connect(t *testing.T, handle func(*net.TCPConn) error) *net.TCPConn {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	done := make(chan struct{})
	go func() {
		defer close(done)
		c, err := l.Accept()
		if err != nil {
			return
		}
		defer c.Close()
		_ = handle(c.(*net.TCPConn)) // the peer sees the error
	}()
	c, err := net.Dial("tcp", l.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	if err := c.SetDeadline(time.Now().Add(10 * time.Second)); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		l.Close()
		c.Close()
		<-done
	})
	return c.(*net.TCPConn)
}

// talk sends text, half-closes, and returns all that comes back.
func talk(t *testing.T, c *net.TCPConn, text string) (string, error) {
	t.Helper()
	if _, err := io.WriteString(c, text); err != nil {
		t.Fatal(err)
	}
	if err := c.CloseWrite(); err != nil {
		t.Fatal(err)
	}
	answer, err := io.ReadAll(c)
	return string(answer), err
}

func TestEchoReturnsWhatItReads(t *testing.T) {
	if got, err := talk(t, connect(t, echo), "hello"); got != "hello" || err != nil {
		t.Errorf("got %q, %v", got, err)
	}
}

func TestHalfCloseGetsAnAnswer(t *testing.T) {
	for _, test := range []struct {
		send, want string
		least      time.Duration
	}{
		{"", "0\n", 0},
		{"17 bytes, exactly", "17\n", 0},
		{"line\nmore", "9\n", 0},
		{"delay 200ms\nxyz", "15\n", 200 * time.Millisecond},
		{"delay soon\n", "", 0},
	} {
		start := time.Now()
		got, err := talk(t, connect(t, halfClose), test.send)
		if got != test.want || err != nil || time.Since(start) < test.least {
			t.Errorf("%q: got %q, %v after %s", test.send, got, err, time.Since(start))
		}
	}
}

func TestResetEndsTheConnection(t *testing.T) {
	c := connect(t, reset)
	if _, err := c.Write([]byte("x")); err != nil {
		t.Fatal(err)
	}
	if n, err := c.Read(make([]byte, 1)); n != 0 || !errors.Is(err, syscall.ECONNRESET) {
		t.Errorf("got %d, %v, want a reset", n, err)
	}
}

func TestSourceSendsZeros(t *testing.T) {
	c := connect(t, func(c *net.TCPConn) error { return source(c) })
	if n, err := io.CopyN(io.Discard, c, 1<<20); n != 1<<20 || err != nil {
		t.Errorf("got %d, %v", n, err)
	}
}

func TestHTTPDescribesTheRequest(t *testing.T) {
	server := httptest.NewServer(handler("host-1"))
	defer server.Close()
	request, err := http.NewRequest("PUT", server.URL+"/a/b?c=d", nil)
	if err != nil {
		t.Fatal(err)
	}
	request.Header.Set("X-Test", "yes")
	response, err := http.DefaultClient.Do(request)
	if err != nil {
		t.Fatal(err)
	}
	defer response.Body.Close()
	var got struct {
		Host, Remote, Method, Path, Query string
		Header                            http.Header
	}
	if err := json.NewDecoder(response.Body).Decode(&got); err != nil {
		t.Fatal(err)
	}
	if got.Host != "host-1" || !strings.HasPrefix(got.Remote, "127.0.0.1:") || got.Method != "PUT" || got.Path != "/a/b" || got.Query != "c=d" || got.Header.Get("X-Test") != "yes" {
		t.Errorf("got %+v", got)
	}
	for query, want := range map[string]string{"seconds=0": "host-1\n", "seconds=x": "seconds is not a number\n"} {
		response, err := http.Get(server.URL + "/slow?" + query)
		if err != nil {
			t.Fatal(err)
		}
		body, err := io.ReadAll(response.Body)
		response.Body.Close()
		if string(body) != want || err != nil {
			t.Errorf("%s: %q, %v", query, body, err)
		}
	}
}

func TestUpgradeCarriesBytes(t *testing.T) {
	server := httptest.NewServer(handler("host-1"))
	defer server.Close()
	c, err := net.Dial("tcp", server.Listener.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	fmt.Fprint(c, "GET /upgrade/echo HTTP/1.1\r\nHost: x\r\nConnection: Upgrade\r\nUpgrade: raw\r\n\r\n")
	r := bufio.NewReader(c)
	response, err := http.ReadResponse(r, nil)
	if err != nil || response.StatusCode != http.StatusSwitchingProtocols {
		t.Fatalf("%v, %v", response, err)
	}
	fmt.Fprint(c, "raw")
	got := make([]byte, 3)
	if _, err := io.ReadFull(r, got); err != nil || string(got) != "raw" {
		t.Errorf("%q, %v", got, err)
	}
}
