//go:build linux

package browser

import (
	"fmt"
	"net/http"
	"net/http/httptest"
	"os"
	"runtime"
	"testing"

	"github.com/chromedp/chromedp"

	"kubevpn/internal/testenv"
)

// TestBrowserOutlivesTheThreadsOfATest checks that a browser stays while the threads end that could have started it.
func TestBrowserOutlivesTheThreadsOfATest(t *testing.T) {
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		_, _ = w.Write([]byte("<p>still here"))
	}))
	defer server.Close()
	b := Start(t, server.URL)
	const threads = 200 // more than the test process has
	locked, end := make(chan struct{}), make(chan struct{})
	for range threads {
		go func() {
			runtime.LockOSThread() // never unlocked, so the thread ends with the goroutine
			locked <- struct{}{}
			<-end
		}()
	}
	for range threads {
		<-locked
	}
	close(end)
	if err := testenv.Poll(limit, func() error {
		if tasks, err := os.ReadDir("/proc/self/task"); err != nil || len(tasks) >= threads {
			return fmt.Errorf("%d threads, %v", len(tasks), err)
		}
		return nil
	}); err != nil {
		t.Fatal(err)
	}
	b.Run(chromedp.Reload())
	b.Shows("still here")
}
