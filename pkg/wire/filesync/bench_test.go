package filesync

import (
	"context"
	"flag"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"runtime"
	"runtime/debug"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"
)

// over runs a Source and a container on one kind of connection until the test ends.
func over(b testing.TB, network, src, dst string) (*Source, chan Batch) {
	b.Helper()
	sent := make(chan Batch, 100)
	ctx, cancel := context.WithCancel(b.Context())
	var work sync.WaitGroup
	b.Cleanup(func() { cancel(); work.Wait() })
	s := NewSource(SourceConfig{Dir: src, Logger: discarding(), OnSync: func(b Batch) { sent <- b },
		Dial: func(context.Context) (net.Conn, string, error) {
			x, y := pair(b, network)
			return x, container(ctx, b, dst, y, &work, nil), nil
		}})
	work.Go(func() { s.Run(ctx) })
	return s, sent
}

// pair returns both ends of a connection.
func pair(t testing.TB, network string) (a, b net.Conn) {
	if network == "pipe" {
		return net.Pipe()
	}
	l, err := net.Listen(network, "127.0.0.1:0")
	must(t, err)
	defer l.Close()
	a, err = net.Dial(network, l.Addr().String())
	must(t, err)
	b, err = l.Accept()
	must(t, err)
	return a, b
}

// The first copy of many small files, like source code, and of a big file.
func BenchmarkInitialCopy(b *testing.B) {
	for _, n := range []int{1000, 10000} {
		b.Run(fmt.Sprintf("files=%d", n), func(b *testing.B) {
			src := b.TempDir()
			content := strings.Repeat("a line of code\n", 270)
			for i := range n {
				write(b, src, fmt.Sprintf("package%d/file%d.go", i/50, i), content)
			}
			copyOnce(b, src, int64(n*len(content)))
		})
	}
	b.Run("bytes=256M", func(b *testing.B) {
		src := b.TempDir()
		bigAt(b, filepath.Join(src, "big"), 256<<20)
		copyOnce(b, src, 256<<20)
	})
}

// bigAt creates a file with an old modification time.
func bigAt(t testing.TB, p string, size int64) {
	t.Helper()
	f, err := os.Create(p)
	must(t, err)
	must(t, f.Truncate(size))
	must(t, f.Close())
	must(t, os.Chtimes(p, time.Time{}, time.Unix(1700000000, 0)))
}

func copyOnce(b *testing.B, src string, bytes int64) {
	b.ReportAllocs()
	b.SetBytes(bytes)
	for b.Loop() {
		b.StopTimer()
		dst, err := os.MkdirTemp("", "filesync-bench-")
		must(b, err)
		b.StartTimer()
		sub := &sub{TB: b}
		_, sent := over(sub, "tcp", src, dst)
		batch := complete(sent)
		b.StopTimer()
		sub.cleanUp()
		must(b, os.RemoveAll(dst))
		if batch.Bytes != bytes {
			b.Fatalf("%+v", batch)
		}
		b.StartTimer()
	}
}

// complete sums up the batches until the target has everything: a file written within the last tick comes later.
func complete(sent chan Batch) Batch {
	var sum Batch
	for !sum.Complete {
		b := <-sent
		sum.Bytes, sum.Files, sum.Complete, sum.Failed = sum.Bytes+b.Bytes, sum.Files+b.Files, b.Complete, append(sum.Failed, b.Failed...)
	}
	return sum
}

// sub runs the cleanups before the benchmark ends.
type sub struct {
	testing.TB
	cleanups []func()
}

func (s *sub) Cleanup(f func()) { s.cleanups = append(s.cleanups, f) }

func (s *sub) cleanUp() {
	for _, f := range slices.Backward(s.cleanups) {
		f()
	}
}

// A new connection without any difference.
func BenchmarkReconnect(b *testing.B) {
	r := newRig(b, options{src: small(b, 20000)})
	b.ReportAllocs()
	for b.Loop() {
		r.breakOff()
		r.connect()
		if batch := r.complete(); batch.Files > 0 {
			b.Fatalf("%+v", batch)
		}
	}
}

// small returns a directory with n small files.
func small(t testing.TB, n int) string {
	t.Helper()
	src := t.TempDir()
	for i := range n {
		write(t, src, fmt.Sprintf("package%d/file%d.go", i/50, i), "package x\n")
	}
	return src
}

// The time from the write to the target's acknowledgement, among 1000 other files; most of it waits for a quiet
// moment.
func BenchmarkSave(b *testing.B) {
	for _, network := range []string{"pipe", "tcp"} {
		b.Run(network, func(b *testing.B) {
			src, dst := small(b, 1000), b.TempDir()
			_, sent := over(b, network, src, dst)
			complete(sent)
			var took []time.Duration
			b.ReportAllocs()
			for i := 0; b.Loop(); i++ {
				temp, began := filepath.Join(src, ".#new"), time.Now()
				must(b, os.WriteFile(temp, fmt.Appendf(nil, "version %d", i), 0o644))
				must(b, os.Rename(temp, filepath.Join(src, "package3/file150.go")))
				if batch := <-sent; batch.Files != 1 {
					b.Fatalf("%+v", batch)
				}
				took = append(took, time.Since(began))
			}
			slices.Sort(took)
			b.ReportMetric(float64(took[len(took)/2])/1e6, "ms-p50")
			b.ReportMetric(float64(took[len(took)*99/100])/1e6, "ms-p99")
			b.ReportMetric(float64(took[len(took)-1])/1e6, "ms-max")
		})
	}
}

var whole = flag.Bool("whole", false, "TestBig copies 1 GB and 100 000 files, as in make nightly")

// TestBig checks the memory that a big file, or many files, take.
func TestBig(t *testing.T) {
	if testing.Short() {
		t.Skip("it takes a while")
	}
	size, files := 128, 10_000
	if *whole {
		size, files = 1<<10, 100_000
	}
	measure := func(name string, limit uint64, src, dst string) {
		runtime.GC()
		debug.FreeOSMemory()
		var before runtime.MemStats
		runtime.ReadMemStats(&before)
		stop := make(chan struct{})
		var watching sync.WaitGroup
		var peak uint64
		watching.Go(func() {
			for {
				select {
				case <-stop:
					return
				case <-time.After(20 * time.Millisecond):
					var now runtime.MemStats
					runtime.ReadMemStats(&now)
					peak = max(peak, now.HeapInuse)
				}
			}
		})
		began := time.Now()
		sub := &sub{TB: t}
		s, sent := over(sub, "tcp", src, dst)
		batch := complete(sent)
		took := time.Since(began)
		close(stop)
		watching.Wait()
		grown := peak - min(peak, before.HeapInuse)
		t.Logf("%s: %+v in %v, heap at most %d MB more; %+v", name, batch, took, grown>>20, s.Status())
		if len(batch.Failed) > 0 || grown > limit {
			t.Errorf("%s: more than %d MB, or failures", name, limit>>20)
		}
		sub.cleanUp()
	}
	src, dst := t.TempDir(), t.TempDir()
	bigAt(t, filepath.Join(src, "big"), int64(size)<<20)
	measure(fmt.Sprintf("%d MB", size), 32<<20, src, dst)
	if info, err := os.Stat(filepath.Join(dst, "big")); err != nil || info.Size() != int64(size)<<20 {
		t.Error(info, err)
	}
	must(t, os.Remove(filepath.Join(dst, "big")))

	measure(fmt.Sprintf("%d files", files), uint64(files)*256<<20/100_000, small(t, files), t.TempDir())
}
