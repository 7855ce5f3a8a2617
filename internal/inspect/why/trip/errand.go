package trip

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"net/netip"
	"os"
	"os/signal"
	"sync"
	"syscall"
	"time"

	"github.com/spf13/cobra"

	"kubevpn/pkg/wakeup"
)

const (
	// maxErrand and maxReport limit an errand and a report, in bytes of JSON.
	maxErrand = 1 << 20
	maxReport = 1 << 20
	maxDials  = 64
	// maxTimeout limits the time of an errand whose sender is gone.
	maxTimeout = 10 * time.Minute
)

// Errand is a task for Run: to send a request, and to connect to addresses. Each part is optional. A program in a pod
// receives it as JSON.
type Errand struct {
	Method string      `json:"method,omitempty"`
	URL    string      `json:"url,omitempty"` // empty: no request
	Header http.Header `json:"header,omitempty"`

	Dial []netip.AddrPort `json:"dial,omitempty"` // to connect to, and to disconnect from at once

	Timeout time.Duration `json:"timeout,omitempty"` // of all together, in a pod
}

// NewErrand returns the errand that sends a request without a body.
func NewErrand(r *http.Request) Errand {
	return Errand{Method: r.Method, URL: r.URL.String(), Header: r.Header}
}

// Report is the result of an errand.
type Report struct {
	Result Result                  `json:"result"` // of the request
	Dials  map[netip.AddrPort]Step `json:"dials,omitempty"`
}

// Runner does an errand somewhere. It ends with ctx. The error says why it was not done.
type Runner func(ctx context.Context, e Errand) (Report, error)

// Run is the Runner of this process.
func Run(ctx context.Context, e Errand) (Report, error) {
	r := Report{Dials: map[netip.AddrPort]Step{}}
	if len(e.Dial) > maxDials {
		return r, fmt.Errorf("more than %d addresses", maxDials)
	}
	var mu sync.Mutex
	var all sync.WaitGroup
	for _, to := range e.Dial {
		all.Go(func() {
			s := Try(ctx, to.String())
			mu.Lock()
			defer mu.Unlock()
			r.Dials[to] = s
		})
	}
	defer all.Wait()
	if e.URL != "" {
		req, err := http.NewRequestWithContext(ctx, e.Method, e.URL, http.NoBody)
		if err != nil {
			return r, err
		}
		if req.Header = e.Header; e.Header.Get("Host") != "" {
			req.Host = e.Header.Get("Host")
		}
		r.Result = send(req)
	}
	all.Wait()
	return r, nil
}

// serve reads one errand, runs it, and writes the report.
func serve(ctx context.Context, in io.Reader, out io.Writer) error {
	var e Errand
	if err := json.NewDecoder(io.LimitReader(in, maxErrand)).Decode(&e); err != nil {
		return fmt.Errorf("cannot read the errand: %w", err)
	}
	if e.Timeout <= 0 || e.Timeout > maxTimeout {
		e.Timeout = maxTimeout
	}
	ctx, cancel := context.WithTimeout(ctx, e.Timeout)
	defer cancel()
	r, err := Run(ctx, e)
	if err != nil {
		return err
	}
	return json.NewEncoder(out).Encode(r)
}

// ReadReport reads what serve wrote, from a program that the reader does not trust. It reads at most one report.
func ReadReport(from io.Reader) (r Report, err error) {
	if err := json.NewDecoder(io.LimitReader(from, maxReport)).Decode(&r); err != nil {
		return Report{}, fmt.Errorf("cannot read the report: %w", err)
	}
	if len(r.Dials) > maxDials {
		return Report{}, fmt.Errorf("the report has more than %d addresses", maxDials)
	}
	return r, nil
}

// NewCommand returns `traffic trip`.
func NewCommand() *cobra.Command {
	var stay time.Duration
	cmd := &cobra.Command{
		Use:   "trip",
		Short: "Send a request from this pod for 'kubevpn why --from'",
		Long: `Reads an errand from standard input, as JSON: a request to send, or addresses to
connect to. Writes the result to standard output, as JSON.

With --stay it does nothing and ends after that time: it keeps the ephemeral
container in which errands run.`,
		Example: "  traffic trip --stay 10m",
		Args:    cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			ctx, stop := signal.NotifyContext(cmd.Context(), os.Interrupt, syscall.SIGTERM)
			defer stop()
			if stay > 0 {
				wakeup.Pause(ctx, stay)
				return nil
			}
			return serve(ctx, os.Stdin, os.Stdout)
		},
	}
	cmd.Flags().DurationVar(&stay, "stay", 0, "time to stay, without an errand")
	return cmd
}
