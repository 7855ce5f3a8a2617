package workload

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strings"
	"unicode/utf8"

	"github.com/spf13/cobra"

	"kubevpn/internal/api"
	"kubevpn/internal/config"
	"kubevpn/internal/inspect/exchanges"
	"kubevpn/internal/laptop/cli/command"
	"kubevpn/internal/laptop/cli/term"
)

type requestsOptions struct {
	f      *command.Factory
	req    api.RequestsRequest
	kube   command.ClusterFlags
	count  int
	output *term.Format
}

func newRequests(f *command.Factory) *cobra.Command {
	o := &requestsOptions{f: f, output: term.NewFormat("text", "json", "har", "curl")}
	cmd := &cobra.Command{
		Use:   "requests TYPE/NAME",
		Short: "Show the HTTP requests that an intercept of this machine matched",
		Long: "Show the HTTP requests that an intercept or a clone of this machine matched: method, path, status,\n" +
			"times, and where each went. With -f the agents record from now on, and the command prints each\n" +
			"request when its answer has ended. Without -f it prints the last ones, if the intercept keeps them:\n" +
			"see `kubevpn proxy --record`. Nothing is recorded otherwise. Only the owner of an intercept can\n" +
			"record, and only what its match covers. Secrets that kubevpn recognizes are hidden; see --redact.\n" +
			"-o curl prints commands that repeat the requests, -o har an HTTP Archive for a browser's tools.",
		Example: command.Examples(
			"Show requests as they come, until Ctrl-C", "kubevpn requests deployment/web -f",
			"With the first 16 KiB of each body", "kubevpn requests deployment/web -f --body",
			"Save the next 100 requests for the network panel of a browser",
			"kubevpn requests deployment/web -f --count 100 --body=64Ki -o har > web.har",
			"Print a command that repeats the next request", "kubevpn requests deployment/web -f --count 1 -o curl",
			"Keep the last 500 requests, and show them later",
			"kubevpn proxy deployment/web --headers x-user=me --record 500", "kubevpn requests deployment/web",
			"Print the paths that failed, for a script",
			"kubevpn requests deployment/web -o json | "+
				"jq -r '.exchange | select(.response.status >= 500) | .request.path'",
		),
		Args: command.OneArg("requires the name of one workload", "`kubevpn status` lists the intercepts"),
		RunE: func(cmd *cobra.Command, args []string) error {
			o.req.Workload = args[0]
			return o.run(cmd.Context())
		},
		ValidArgsFunction: f.CompleteFromStatus(func(status api.Status, args []string) []cobra.Completion {
			if len(args) > 0 {
				return nil
			}
			return interceptNames(status, args)
		}),
	}
	flags := cmd.Flags()
	flags.BoolVarP(&o.req.Follow, "follow", "f", false, "record, and print requests until Ctrl-C")
	body := addBody(cmd, &o.req.Body, "with -f: bytes of each body to record, such as 64Ki")
	body.NoOptDefVal = fmt.Sprintf("%dKi", api.DefaultRecordedBody>>10)
	flags.IntVar(&o.count, "count", 0, "end after so many requests (default: no limit)")
	config.AddFlags(cmd, config.KeyRedact)
	o.kube.AddClusterTo(cmd, f)
	flags.StringVarP(&o.req.Namespace, "namespace", "n", "", "namespace of the workload (default: any)")
	command.CompleteWith(cmd, "namespace", f.CompleteFromStatus(interceptNamespaces))
	o.output.AddTo(cmd)
	command.Pickable(cmd, f, "deployment/web", func(ctx context.Context, _ func(api.Event)) (string, []string, error) {
		status, err := f.Status(ctx)
		return "intercepts of this machine", interceptNames(status, nil), err
	})
	return cmd
}

// errEnough ends the command when --count requests were printed.
var errEnough = errors.New("enough requests")

func (o *requestsOptions) run(ctx context.Context) error {
	cfg, err := o.kube.Settings()
	if err != nil {
		return err
	}
	o.req.Redact = cfg.Redact
	if o.output.String() == "curl" && o.req.Body == 0 { // a command without its body repeats nothing
		o.req.Body = api.DefaultRecordedBody
	}
	if o.req.Connection, err = o.kube.ConnectionID(ctx); err != nil {
		return err
	}
	p := &recordPrinter{o: o, out: o.f.Out, har: exchanges.NewHAR(o.f.Out)}
	err = o.f.Daemon().Requests(ctx, o.req, func(r *api.Record) error {
		if err := p.record(r); err != nil || o.count == 0 || p.printed < o.count {
			return err
		}
		return errEnough
	})
	if errors.Is(err, errEnough) || o.req.Follow && ctx.Err() != nil {
		err = nil // the regular ends
	}
	return cmp.Or(err, p.close())
}

// recordPrinter prints records in the format of -o.
type recordPrinter struct {
	o       *requestsOptions
	out     io.Writer
	printed int
	dropped uint64
	har     *exchanges.HAR
	widths  [8]int // of the columns of text
}

func (p *recordPrinter) record(r *api.Record) error {
	p.dropped = max(p.dropped, r.Dropped)
	if r.Exchange != nil {
		p.printed++
	}
	if p.o.output.String() == "json" {
		r.TypeMeta = api.Type(api.KindRecord)
		return json.NewEncoder(p.out).Encode(r)
	}
	if r.Warning != "" {
		p.o.f.Note("! %s", api.OneLine(r.Warning))
	}
	if r.Pods > 0 {
		p.o.f.Note("recording the requests of %s in %s; Ctrl-C ends", p.o.req.Workload, api.Count(r.Pods, "pod"))
	}
	if r.Exchange == nil {
		return nil
	}
	switch p.o.output.String() {
	case "har":
		return p.har.Add(r.Exchange, "")
	case "curl":
		_, err := io.WriteString(p.out, exchanges.Curl(r.Exchange))
		return err
	}
	return p.text(r.Exchange)
}

// close ends the output.
func (p *recordPrinter) close() error {
	lost := ""
	if p.dropped > 0 {
		lost = fmt.Sprintf("%d requests were not recorded: there were too many at a time", p.dropped)
		p.o.f.Note("! %s", lost)
	}
	if p.o.output.String() == "har" {
		return p.har.Close(lost)
	}
	return nil
}

// text prints an exchange as one line, and its bodies below it.
func (p *recordPrinter) text(e *api.Exchange) error {
	rows := [][]string{textColumns(e)}
	if p.printed == 1 {
		rows = append([][]string{{"TIME", "METHOD", "STATUS", "WAIT", "TOOK", "TO", "MATCH", "POD", "PATH"}}, rows...)
	}
	for _, columns := range rows { // a column is as wide as in the rows before
		for n, text := range columns[:len(p.widths)] {
			p.widths[n] = max(p.widths[n], utf8.RuneCountInString(text))
		}
	}
	var b strings.Builder
	for _, columns := range rows {
		for n, text := range columns[:len(p.widths)] {
			fmt.Fprintf(&b, "%-*s  ", p.widths[n], text)
		}
		b.WriteString(columns[len(p.widths)] + "\n")
	}
	if p.o.req.Body > 0 {
		writeBody(&b, "  > ", e.Request.Body)
		if e.Response != nil {
			writeBody(&b, "  < ", e.Response.Body)
		}
	}
	_, err := io.WriteString(p.out, b.String())
	return err
}

// textColumns returns the columns of an exchange. Only the last one may be long.
func textColumns(e *api.Exchange) []string {
	status, to, path := "", e.To, e.Request.Path
	if r := e.Response; r != nil {
		status = fmt.Sprint(r.Status)
		for _, h := range []http.Header{r.Trailers, r.Headers} {
			if code := h.Get("Grpc-Status"); code != "" {
				status += " grpc:" + code
				break
			}
		}
	}
	if e.Mirrored {
		to += "+copy"
	}
	if e.Error != "" {
		path += "  (" + e.Error + ")"
	}
	columns := []string{e.Began.Local().Format("15:04:05.000"), e.Request.Method, status, term.Took(e.Wait),
		term.Took(e.Seconds), to, e.Match, e.Pod, path}
	return api.Texts(columns, func(text string) string { return term.Dash(strings.TrimSpace(term.Printable(text))) })
}

// isText reports whether a terminal can show data, whose last character may be cut.
func isText(data []byte) bool {
	return utf8.Valid(api.WholeRunes(data)) && !bytes.ContainsRune(data, 0)
}

// writeBody writes what was recorded of a body, each line behind prefix.
func writeBody(out *strings.Builder, prefix string, b api.ExchangeBody) {
	text, rest := string(b.Data), b.Size-int64(len(b.Data))
	if !isText(b.Data) {
		text, rest = "", b.Size
	}
	for line := range strings.Lines(text) {
		out.WriteString(prefix + strings.TrimRight(line, "\r\n") + "\n")
	}
	if rest > 0 {
		fmt.Fprintf(out, "%s(%d more bytes)\n", prefix, rest)
	}
}
