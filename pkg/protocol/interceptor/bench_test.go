package interceptor

import (
	"fmt"
	"io"
	"net"
	"net/http"
	"slices"
	"testing"
	"time"
)

// benchmark measures the application alone, the application behind the interceptor, and a target in its place. The
// connections of the target are not the kernel's.
func benchmark(b *testing.B, app string, f func(b *testing.B, addr string)) {
	b.Run("direct", func(b *testing.B) { f(b, app) })
	b.Run("intercepted", func(b *testing.B) {
		r := newRig(b, app)
		r.claim(Claim{Match: header(b, "x-user=me"), Target: &target{addr: app}})
		f(b, r.addr)
	})
	b.Run("target", func(b *testing.B) {
		r := newRig(b, app)
		r.claim(Claim{Target: &target{addr: app}})
		f(b, r.addr)
	})
	b.Run("recorded", func(b *testing.B) { benchmarkRecorded(b, app, 0, f) })
	b.Run("recorded-bodies", func(b *testing.B) { benchmarkRecorded(b, app, 16<<10, f) })
}

// One request after the other, on one connection.
func BenchmarkRequest(b *testing.B) {
	benchmark(b, serve(b, says("hello")), func(b *testing.B, addr string) {
		c := client(b, 1)
		url := "http://" + addr + "/"
		get(b, c, url)
		took := make([]time.Duration, 0, b.N)
		b.ReportAllocs()
		b.ResetTimer()
		for range b.N {
			start := time.Now()
			get(b, c, url)
			took = append(took, time.Since(start))
		}
		b.StopTimer()
		slices.Sort(took)
		b.ReportMetric(float64(took[len(took)/2].Nanoseconds())/1000, "p50-µs")
	})
}

// As many requests as possible, on several connections.
func BenchmarkRequests(b *testing.B) {
	for _, major := range []int{1, 2} {
		b.Run([]string{"", "http1", "http2"}[major], func(b *testing.B) {
			benchmark(b, serve(b, says("hello")), func(b *testing.B, addr string) {
				url := "http://" + addr + "/"
				b.ReportAllocs()
				b.SetParallelism(8)
				b.RunParallel(func(pb *testing.PB) {
					c := client(b, major)
					for pb.Next() {
						get(b, c, url)
					}
				})
			})
		})
	}
}

func BenchmarkDownload(b *testing.B) {
	const size = 64 << 20
	block := make([]byte, 1<<20)
	app := serve(b, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path == "/length" {
			w.Header().Set("Content-Length", fmt.Sprint(size))
		}
		for range size / len(block) {
			w.Write(block)
		}
	}))
	for _, path := range []string{"length", "chunks"} {
		b.Run(path, func(b *testing.B) {
			benchmark(b, app, func(b *testing.B, addr string) {
				c := client(b, 1)
				b.ReportAllocs()
				b.SetBytes(size)
				for b.Loop() {
					resp, err := c.Get("http://" + addr + "/" + path)
					if err != nil {
						b.Fatal(err)
					}
					if n, err := io.Copy(io.Discard, resp.Body); err != nil || n != size {
						b.Fatal(n, err)
					}
					resp.Body.Close()
				}
			})
		})
	}
}

func BenchmarkUpload(b *testing.B) {
	const size = 64 << 20
	app := serve(b, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) { io.Copy(io.Discard, r.Body) }))
	benchmark(b, app, func(b *testing.B, addr string) {
		c := client(b, 1)
		b.ReportAllocs()
		b.SetBytes(size)
		for b.Loop() {
			resp, err := c.Post("http://"+addr+"/", "application/octet-stream", io.LimitReader(zeros{}, size))
			if err != nil {
				b.Fatal(err)
			}
			resp.Body.Close()
		}
	})
}

// Bytes that are not HTTP.
func BenchmarkRaw(b *testing.B) {
	block := make([]byte, 1<<20)
	app := listen(b, func(c net.Conn) {
		c.Read(make([]byte, 1))
		for {
			if _, err := c.Write(block); err != nil {
				return
			}
		}
	})
	benchmark(b, app, func(b *testing.B, addr string) {
		c := dial(b, addr)
		c.SetDeadline(time.Time{})
		c.Write([]byte{0})
		b.ReportAllocs()
		b.SetBytes(int64(len(block)))
		for b.Loop() {
			if _, err := io.ReadFull(c, block); err != nil {
				b.Fatal(err)
			}
		}
		c.Close()
	})
}

type zeros struct{}

func (zeros) Read(p []byte) (int, error) { clear(p); return len(p), nil }
