package workload

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"strings"
	"sync"
	"time"

	"github.com/spf13/cobra"
	"k8s.io/apimachinery/pkg/util/wait"

	"kubevpn/internal/api"
	"kubevpn/internal/config"
	"kubevpn/internal/inspect/diff"
	"kubevpn/internal/inspect/exchanges"
	"kubevpn/internal/laptop/cli/command"
	"kubevpn/internal/laptop/cli/term"
	"kubevpn/pkg/wakeup"
)

type diffOptions struct {
	proxyOptions
	body     int
	ignored  diff.Ignored
	unsafe   bool
	detect   bool
	requests int
	duration time.Duration
	har      string
	program  []string
}

func newDiff(f *command.Factory) *cobra.Command {
	o := &diffOptions{proxyOptions: proxyOptions{f: f, output: term.NewFormat("text", "json", "yaml")}, body: 64 << 10}
	cmd := &cobra.Command{
		Use:   "diff TYPE/NAME [flags] [-- COMMAND...]",
		Short: "Compare the answers of a program on this machine with those of a workload",
		Long: "Send the requests that a workload receives to a program on this machine as well, and compare its\n" +
			"answers with those of the workload: status, headers, and bodies as JSON or text. Clients get the\n" +
			"answers of the workload, as always: its pods answer first, and this machine sends the recorded request\n" +
			"again. The program is COMMAND, which ends with this command, or already listens at the port of the\n" +
			"container.\n\n" +
			"Only GET, HEAD and OPTIONS requests are sent, each twice, to find what varies from request to request,\n" +
			"such as a time. The program gets the requests as clients sent them, with their credentials.\n\n" +
			"The exit code is 0 if no answer differs, 100 if some do, and 101 if no request was compared. Ctrl-C\n" +
			"ends the comparison and prints the result.",
		Example: command.Examples(
			"Compare the answers to all requests until Ctrl-C", "kubevpn diff deployment/web -- ./server",
			"To your requests, with a program that runs already",
			"kubevpn diff deployment/web --headers x-user=me --port 8080",
			"With a program that listens on another port", "kubevpn diff deployment/web --port 3000:8080 -- npm start",
			"Without a field, the IDs of a list, all fields of one name, and a header",
			"kubevpn diff deploy/web --ignore $.timestamp --ignore '$.items[*].id' --ignore '$..etag' --ignore Server "+
				"-- ./server",
			"In CI: end after 500 requests or 5 minutes, and keep what differs",
			"kubevpn diff deployment/web --requests 500 --for 5m --har diff.har -o json -- ./server > diff.json",
		),
		Args: func(cmd *cobra.Command, args []string) error {
			if cmd.ArgsLenAtDash() == len(args) {
				return api.Errorf(api.ExitUsage, "`kubevpn diff` requires a command after --").
					WithHint("for example: `kubevpn diff deployment/web -- ./server`")
			}
			return oneWorkload("write the command after --")(cmd, args)
		},
		RunE: func(cmd *cobra.Command, args []string) error {
			o.workloads, o.program = args[:1], args[1:]
			// Standard output has the result alone, in each format.
			return f.Report(cmd.Context(), nil, o.run)
		},
		ValidArgsFunction: o.flags.CompleteWorkloads,
	}
	o.addTo(cmd)
	o.flags.PickWorkload(cmd)
	return cmd
}

// addTo defines the flags.
func (o *diffOptions) addTo(cmd *cobra.Command) {
	o.spec.addTarget(cmd)
	command.CompleteWith(cmd, "container", o.flags.CompleteContainers)
	o.flags.AddTo(cmd, o.f, config.KeyMode, config.KeyRequireMatch, config.KeyRedact)
	flags := cmd.Flags()
	flags.Func("ignore",
		"place that is not compared: a JSON path such as $.timestamp, $.items[*].id or $..id, or the name of a header;"+
			" may be repeated", o.ignored.Parse)
	flags.BoolVar(&o.unsafe, "unsafe", false,
		"also send requests other than GET, HEAD and OPTIONS, which may change something: each once, in their order")
	flags.BoolVar(&o.detect, "detect", true,
		"ignore what differs between two answers of the same version; sends each request twice")
	addBody(cmd, &o.body, "bytes of each body to compare").DefValue = "64Ki"
	flags.IntVar(&o.requests, "requests", 0, "end after so many requests (default: no limit)")
	flags.DurationVar(&o.duration, "for", 0, "end after this time, such as 5m (default: no limit)")
	flags.StringVar(&o.har, "har", "", "file that gets both answers to each request that differs, as an HTTP Archive")
	o.output.AddTo(cmd)
}

// run holds an intercept that records, and compares meanwhile.
func (o *diffOptions) run(ctx context.Context, on func(api.Event), quiet func()) error {
	if o.requests < 0 || o.duration < 0 {
		return api.Errorf(api.ExitUsage, "--requests and --for must not be negative")
	}
	req, err := o.request(ctx, on, true)
	if err != nil {
		return err
	}
	req.Attached, req.Spec.Mirror, req.Spec.Observe = true, true, true
	holding, release := context.WithCancel(ctx)
	defer release()
	held, ended := make(chan *api.Intercept, 1), make(chan error, 1)
	go func() {
		defer close(ended)
		var last *api.Intercept
		ended <- o.intercept(holding, req, func(e api.Event) {
			on(e)
			last = cmp.Or(e.Intercept, last)
			if e.Held {
				held <- last
			}
		}, quiet)
	}()
	select {
	case err := <-ended:
		return err
	case i := <-held:
		d := &diffRun{o: o, intercept: i, quiet: quiet}
		err := d.run(ctx, ended)
		release()
		<-ended
		return err
	}
}

// diffRun compares the answers to the requests of one intercept.
type diffRun struct {
	o         *diffOptions
	intercept *api.Intercept
	quiet     func()

	results  *diff.Results
	comparer *diff.Comparer
	har      *harFile
	dropped  uint64 // by agents and the daemon
	warned   bool   // that requests are dropped
}

// run compares until ctx, the intercept or the program ends, or there were enough requests, and prints the result.
func (d *diffRun) run(outer context.Context, ended <-chan error) (err error) {
	ctx, cancel := context.WithCancelCause(outer)
	defer cancel(nil)
	program := diff.NewProgram(d.intercept.Ports, d.o.body)
	stop, err := d.start(ctx, program, cancel)
	if err != nil {
		return err
	}
	defer stop()
	d.results = diff.NewResults(d.o.flags.Config.Redact, func(g api.DiffGroup) { d.o.f.Note("%s", groupText(g)) })
	if d.har, err = d.o.openHAR(); err != nil {
		return err
	}
	d.comparer = diff.New(diff.Config{
		Send: program.Send, Results: d.results, Ignored: &d.o.ignored, Unsafe: d.o.unsafe, NoDetect: !d.o.detect,
		Requests: d.o.requests, Differ: d.har.add,
	})
	go func() {
		select {
		case err := <-ended:
			cancel(cmp.Or(err, error(api.Errorf(api.ExitLost, "the intercept ended"))))
		case <-ctx.Done():
		}
	}()
	failure := d.compare(ctx, cancel)
	if outer.Err() != nil {
		failure = nil // Ctrl-C is a regular end
	}
	stop()
	return cmp.Or(d.har.close(), d.report(failure))
}

// compare returns why the comparison failed, or nil at its regular end.
func (d *diffRun) compare(ctx context.Context, cancel context.CancelCauseFunc) error {
	limited, end := context.WithCancel(ctx)
	if d.o.duration > 0 {
		limited, end = context.WithTimeout(ctx, d.o.duration)
	}
	var following sync.WaitGroup
	following.Go(func() {
		err := d.o.f.Daemon().Requests(limited, api.RequestsRequest{
			Connection: d.intercept.Connection, Workload: d.intercept.ID, Follow: true, Body: d.o.body,
			Redact: []string{api.ShowAll}, // real values are compared, and hidden where they are shown
		}, d.record)
		if limited.Err() == nil {
			cancel(cmp.Or(err, error(api.Errorf(api.ExitLost, "the recording ended"))))
		}
	})
	following.Go(func() { d.progress(limited) })
	d.comparer.Run(limited)
	end()
	following.Wait()
	return context.Cause(ctx)
}

// record takes a record of the daemon.
func (d *diffRun) record(r *api.Record) error {
	d.dropped = max(d.dropped, r.Dropped)
	if r.Warning != "" {
		d.o.f.Note("! %s", api.OneLine(r.Warning))
	}
	if r.Pods > 0 {
		d.o.f.Note("comparing the answers of %s in %s with those of this machine; Ctrl-C ends", d.intercept.Workload,
			api.Count(r.Pods, "pod"))
	}
	if r.Exchange != nil {
		d.comparer.Offer(r.Exchange)
	}
	if !d.warned && d.dropped+d.comparer.Dropped() > 0 {
		d.warned = true
		d.o.f.Note("! requests are dropped, because there are too many at a time")
	}
	return nil
}

const progressInterval = 5 * time.Second

// progress prints on a terminal how many requests were compared, whenever there are more.
func (d *diffRun) progress(ctx context.Context) {
	if term.File(d.o.f.Errout) == nil {
		return
	}
	for last := 0; wakeup.Pause(ctx, progressInterval); {
		requests, differ := d.results.Counts()
		if requests != last {
			d.o.f.Note("%s, %d differ", api.Count(requests, "request"), differ)
		}
		last = requests
	}
}

// report prints the result, and returns the error that sets the exit code.
func (d *diffRun) report(failure error) error {
	result := d.results.Summary()
	result.TypeMeta = api.Type(api.KindDiff)
	result.Namespace, result.Workload = d.intercept.Namespace, d.intercept.Workload
	result.Dropped = d.dropped + d.comparer.Dropped()
	var err error
	if d.o.output.ForPeople() {
		_, err = io.WriteString(d.o.f.Out, diffText(&result))
	} else {
		err = d.o.output.Print(d.o.f.Out, result)
	}
	switch {
	case failure != nil || err != nil:
		return cmp.Or(failure, err)
	case result.Requests == 0:
		return api.Errorf(api.ExitNotCompared, "no request was compared").
			WithHint("send requests that match %s to %s; `kubevpn requests %s -f` shows those that arrive",
				d.intercept.Match, d.intercept.Workload, d.intercept.Workload)
	case result.Differ > 0:
		return command.ExitCode(api.ExitDiffer)
	}
	return nil
}

// groupText returns a line such as "GET /price: body $.total 10.5 -> 10.50".
func groupText(g api.DiffGroup) string {
	text := g.Route + ": " + g.Where
	if len(g.Examples) == 0 {
		return term.Printable(text)
	}
	e := g.Examples[0]
	text += " " + e.From + " -> " + e.To
	if !strings.HasSuffix(g.Route, " "+e.Path) {
		text += "  (" + e.Path + ")"
	}
	return term.Printable(text)
}

// diffText returns the result for people.
func diffText(r *api.Diff) string {
	var b strings.Builder
	if r.Differ == 0 {
		fmt.Fprintf(&b, "%s, none differ\n", api.Count(r.Requests, "request"))
	} else {
		fmt.Fprintf(&b, "%s, %d differ:\n", api.Count(r.Requests, "request"), r.Differ)
	}
	width := len(fmt.Sprint(r.Differ))
	for _, g := range r.Differences {
		fmt.Fprintf(&b, "  %*d  %s\n", width, g.Requests, groupText(g))
	}
	for _, i := range r.Ignored {
		fmt.Fprintf(&b, "ignored: %s: %s (%s)\n", term.Printable(i.Route+": "+i.Where), i.Reason,
			api.Count(i.Times, "time"))
	}
	for _, s := range r.NotCompared {
		hint := ""
		if s.Reason == diff.NotSafe {
			hint = "; --unsafe sends them, too"
		}
		fmt.Fprintf(&b, "not compared: %s: %s%s\n", api.Count(s.Requests, "request"), s.Reason, hint)
	}
	if r.Incomplete > 0 {
		fmt.Fprintf(&b, "compared in part: %s with a body longer than --body\n", api.Count(r.Incomplete, "request"))
	}
	if r.Dropped > 0 {
		fmt.Fprintf(&b, "dropped: %d requests; there were too many at a time\n", r.Dropped)
	}
	return b.String()
}

// harFile is the file of --har. Without one, its methods do nothing.
type harFile struct {
	file   *os.File
	har    *exchanges.HAR
	redact []string
	pairs  int
	left   int // pairs that are not in the file
	err    error
}

// maxPairs bounds the file of --har.
const maxPairs = 1000

func (o *diffOptions) openHAR() (*harFile, error) {
	if o.har == "" {
		return new(harFile), nil
	}
	f, err := os.OpenFile(o.har, os.O_CREATE|os.O_TRUNC|os.O_WRONLY, 0o600)
	if err != nil {
		return nil, api.Errorf(api.ExitUsage, "--har: %w", err)
	}
	return &harFile{file: f, har: exchanges.NewHAR(f), redact: o.flags.Config.Redact}, nil
}

// add writes both exchanges of a request.
func (h *harFile) add(from, to *api.Exchange, all []diff.Difference) {
	switch {
	case h.file == nil || h.err != nil:
		return
	case h.pairs >= maxPairs:
		h.left++
		return
	}
	h.pairs++
	texts := api.Texts(all, func(d diff.Difference) string { return d.Where + " " + d.From + " -> " + d.To })
	for _, e := range []*api.Exchange{from, to} {
		shown := *e
		shown.Redact(h.redact)
		h.err = cmp.Or(h.err, h.har.Add(&shown, strings.Join(texts, "\n")))
	}
}

func (h *harFile) close() error {
	if h.file == nil {
		return nil
	}
	comment := ""
	if h.left > 0 {
		comment = fmt.Sprintf("%d more requests differ", h.left)
	}
	if err := cmp.Or(h.err, h.har.Close(comment), h.file.Close()); err != nil {
		return fmt.Errorf("--har: %w", err)
	}
	return nil
}

// programEnd is how long the program has to end by itself.
const programEnd = 5 * time.Second

// start starts the command, and waits until it listens. Without a command, a program must listen already. stop ends the
// command with its process group. If it ends earlier, start calls cancel.
func (d *diffRun) start(ctx context.Context, p *diff.Program, cancel context.CancelCauseFunc) (stop func(),
	err error) {
	place := p.Listens(ctx)
	switch {
	case len(d.o.program) == 0 && place == "":
		return nil, api.Errorf(api.ExitLocalPort, "no program listens on %s", d.ports()).
			WithHint("start it, or let this command start it: `kubevpn diff %s -- ./server`; if it listens on another "+
				"port, add --port LOCAL:CONTAINER", d.intercept.Workload)
	case len(d.o.program) == 0:
		return func() {}, nil
	case place != "":
		return nil, api.Errorf(api.ExitLocalPort, "another program already listens on %s", place).
			WithHint("stop it, or compare with it: omit the command after --")
	}
	running, end := context.WithCancel(ctx)
	cmd := exec.CommandContext(running, d.o.program[0], d.o.program[1:]...)
	cmd.Env, cmd.Stdout, cmd.Stderr = d.o.f.Environ, os.Stderr, os.Stderr // the result alone is on standard output
	cmd.Cancel = func() error { return endGroup(cmd, false) }
	cmd.WaitDelay = programEnd
	ownGroup(cmd)
	d.quiet()
	if err := cmd.Start(); err != nil {
		end()
		return nil, api.Errorf(api.ExitUsage, "cannot start %s: %w", d.o.program[0], err).
			WithHint("Check the command after --. A program outside of PATH needs its path.")
	}
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		err := cmd.Wait()
		_ = endGroup(cmd, true) // what is left of it
		if running.Err() == nil {
			if err == nil {
				err = errors.New("exit status 0")
			}
			cancel(api.Errorf(api.ExitLocalPort, "%s ended: %w", d.o.program[0], err).
				WithHint("the program must run until the comparison ends"))
		}
	}()
	stop = sync.OnceFunc(func() {
		end()
		<-ended
	})
	d.o.f.Note("waiting until %s listens on %s", d.o.program[0], d.ports())
	listens := func(ctx context.Context) (bool, error) { return p.Listens(ctx) != "", nil }
	if err := wait.PollUntilContextTimeout(ctx, 20*time.Millisecond, programStart, true, listens); err != nil {
		stop()
		if ctx.Err() != nil {
			return nil, context.Cause(ctx)
		}
		return nil, api.Errorf(api.ExitLocalPort, "%s does not listen on %s after %v", d.o.program[0], d.ports(),
			programStart).
			WithHint("if it listens on another port, add --port LOCAL:CONTAINER")
	}
	return stop, nil
}

// programStart is how long the program may take until it listens: it may have to be compiled first.
const programStart = 5 * time.Minute

// ports returns text like "port 8080 of this machine or 172.17.0.5:9090".
func (d *diffRun) ports() string {
	return strings.Join(api.Texts(d.intercept.Ports, api.PortMap.Where), " or ")
}
