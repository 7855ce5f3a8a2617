package testenv

import (
	"bytes"
	"context"
	"fmt"
	"net"
	"net/http"
	"runtime"
	"strconv"
	"sync"
	"testing"
	"time"

	"kubevpn/pkg/wakeup"
)

// ShortLines returns n bytes of different header lines, which take the most memory for each byte.
func ShortLines(n int) []byte {
	var b bytes.Buffer
	for i := 0; b.Len() < n; i++ {
		b.WriteString(strconv.FormatInt(int64(i), 36) + ":\r\n")
	}
	return b.Bytes()[:n]
}

// Heap returns the bytes of the heap that are in use.
func Heap() int64 {
	runtime.GC()
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return int64(m.HeapAlloc)
}

// Flood holds 400 conns to a server of this process: half of the clients are silent, and dial again when the server
// closes their conn; the others send begin, of an HTTP request or a handshake, and 256 KiB of header lines. Meanwhile
// ask, a client that behaves well, must succeed, and the heap may grow by 32 MiB.
func Flood(t *testing.T, address string, begin string, ask func() error) {
	t.Helper()
	const clients, limit = 200, 32 << 20
	sends := append([]byte(begin), ShortLines(256<<10)...)
	before := Heap()
	ctx, cancel := context.WithCancel(t.Context())
	var silent, sending sync.WaitGroup
	defer silent.Wait()
	defer cancel()
	dial := func() net.Conn {
		conn, err := net.Dial("tcp", address)
		if err != nil {
			t.Error(err)
			cancel()
			return nil
		}
		context.AfterFunc(ctx, func() { conn.Close() })
		return conn
	}
	for range clients {
		first := dial()
		silent.Go(func() {
			for conn := first; conn != nil && ctx.Err() == nil; conn = dial() {
				_, _ = conn.Read(make([]byte, 1)) // until the server closes it
				wakeup.Pause(ctx, 100*time.Millisecond)
			}
		})
		if conn := dial(); conn != nil {
			sending.Go(func() { _, _ = conn.Write(sends) }) // it fails when the server closes the conn
		}
	}
	sending.Wait()
	Eventually(t, 20*time.Second, ask)
	if grown := Heap() - before; grown > limit {
		t.Errorf("%d clients take %d MiB", 2*clients, grown>>20)
	}
}

// Get returns an ask for Flood: a GET of a URL that must answer with 200.
func Get(url string, header ...string) func() error {
	return func() error {
		r, err := http.NewRequest(http.MethodGet, url, http.NoBody)
		if err != nil {
			return err
		}
		for n := 0; n < len(header); n += 2 {
			r.Header.Set(header[n], header[n+1])
		}
		transport := &http.Transport{DisableKeepAlives: true}
		c := http.Client{Transport: transport, Timeout: 10 * time.Second}
		resp, err := c.Do(r)
		if err != nil {
			return err
		}
		resp.Body.Close()
		if resp.StatusCode != http.StatusOK {
			return fmt.Errorf("%s: %s", url, resp.Status)
		}
		return nil
	}
}
