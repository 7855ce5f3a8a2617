//go:build linux

// Package browser runs Debian's Chromium without a screen, for tests of the page of `kubevpn ui`.
package browser

import (
	"context"
	"fmt"
	"os"
	goruntime "runtime"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/chromedp/cdproto/log"
	"github.com/chromedp/cdproto/runtime"
	"github.com/chromedp/chromedp"

	"kubevpn/internal/testenv"
)

// limit is the time after which a hanging browser ends, so that the test can report more than the timeout of its
// package.
const limit = 5 * time.Minute

// Tab is a tab of a browser. Its methods end the test if they fail.
type Tab struct {
	t   *testing.T
	ctx context.Context
}

// Start starts a browser that ends with the test, and opens the URL. An error in the page's scripts, or a violation of
// its Content-Security-Policy, fails the test.
func Start(t *testing.T, url string) *Tab {
	t.Helper()
	testenv.NeedPrograms(t, "chromium")
	dir, err := os.MkdirTemp("", "kubevpn-browser-")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { // its last processes still write for a moment
		if err := testenv.Poll(limit, func() error { return os.RemoveAll(dir) }); err != nil {
			t.Error(err)
		}
	})
	ctx, cancel := context.WithTimeout(t.Context(), limit)
	t.Cleanup(cancel)
	options := append(chromedp.DefaultExecAllocatorOptions[:], chromedp.ExecPath("chromium"),
		chromedp.WSURLReadTimeout(time.Minute), chromedp.UserDataDir(dir))
	if os.Geteuid() == 0 {
		options = append(options, chromedp.NoSandbox) // Chromium's sandbox refuses root
	}
	ctx, cancel = chromedp.NewExecAllocator(ctx, options...)
	t.Cleanup(cancel)
	ctx, cancel = chromedp.NewContext(ctx)
	t.Cleanup(cancel) // waits for the browser's end
	var mu sync.Mutex
	var faults []string
	chromedp.ListenTarget(ctx, func(event any) {
		mu.Lock()
		defer mu.Unlock()
		switch e := event.(type) {
		case *runtime.EventExceptionThrown:
			faults = append(faults, e.ExceptionDetails.Error())
		case *log.EventEntryAdded:
			// The page shows errors of the network when its daemon has ended, so they are no faults.
			if e.Entry.Level == log.LevelError && e.Entry.Source != log.SourceNetwork {
				faults = append(faults, e.Entry.Text)
			}
		}
	})
	t.Cleanup(func() {
		mu.Lock()
		defer mu.Unlock()
		if len(faults) > 0 {
			t.Errorf("the browser complains:\n%s", strings.Join(faults, "\n"))
		}
	})
	started := make(chan error)
	go func() {
		// chromedp has the kernel kill the browser at the end of the thread that started it (prctl(2),
		// PR_SET_PDEATHSIG), and other goroutines of a test end threads.
		goruntime.LockOSThread()
		defer goruntime.UnlockOSThread()
		started <- chromedp.Run(ctx)
		<-ctx.Done()
	}()
	if err := <-started; err != nil {
		t.Fatal(err)
	}
	b := &Tab{t: t, ctx: ctx}
	b.Run(chromedp.Navigate(url))
	return b
}

// Run runs actions.
func (b *Tab) Run(actions ...chromedp.Action) {
	b.t.Helper()
	if err := chromedp.Run(b.ctx, actions...); err != nil {
		b.t.Fatal(err)
	}
}

// Eval returns the value of an expression.
func Eval[T any](b *Tab, expression string) (value T) {
	b.t.Helper()
	b.Run(chromedp.Evaluate(expression, &value))
	return value
}

// Until waits until an expression is true, also in the document that follows this one.
func (b *Tab) Until(expression string) {
	b.t.Helper()
	if err := testenv.Poll(time.Minute, func() error {
		var ok bool
		if err := chromedp.Run(b.ctx, chromedp.Evaluate(expression, &ok)); err != nil || !ok {
			return fmt.Errorf("never %s (%v)", expression, err)
		}
		return nil
	}); err != nil {
		b.t.Fatalf("%v\n%s", err, Eval[string](b, "document.body.innerText"))
	}
}

// Shows waits until the visible text contains all of these.
func (b *Tab) Shows(texts ...string) {
	b.t.Helper()
	for _, text := range texts {
		b.Until(fmt.Sprintf("document.body.innerText.includes(%q)", text))
	}
}

// Gone waits until the visible text does not contain this.
func (b *Tab) Gone(text string) {
	b.t.Helper()
	b.Until(fmt.Sprintf("!document.body.innerText.includes(%q)", text))
}

// Click clicks the first visible button whose text begins with text.
func (b *Tab) Click(text string) {
	b.t.Helper()
	b.Run(chromedp.Click(fmt.Sprintf("//button[starts-with(., %q)]", text), chromedp.BySearch, chromedp.NodeVisible))
}

// View chooses a view of the page.
func (b *Tab) View(name string) {
	b.t.Helper()
	b.Run(chromedp.Click(`nav a[href="#`+name+`"]`, chromedp.ByQuery),
		chromedp.WaitVisible("#"+name+"-title", chromedp.ByQuery))
}
