package inspect

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"net/url"
	"strconv"
	"strings"

	"github.com/spf13/cobra"

	"kubevpn/internal/api"
	"kubevpn/internal/laptop/cli/command"
	"kubevpn/internal/laptop/cli/daemonclient"
	"kubevpn/internal/laptop/cli/term"
)

type dnsOptions struct {
	f           *command.Factory
	output      *term.Format
	follow, all bool
}

func newDNS(f *command.Factory) *cobra.Command {
	o := &dnsOptions{f: f, output: term.NewFormat("table", "wide", "json", "yaml", term.JSONPath)}
	cmd := &cobra.Command{
		Use:   "dns",
		Short: "Show the DNS queries that went to the clusters, and who answered",
		Long: "Show the last queries that programs of this machine sent for names of the clusters: the name, who\n" +
			"answered (cluster DNS, its cache, or an answer that is older than its TTL), the answer, and how long\n" +
			"it took. The daemon remembers the last 256 of them, in memory, until the last connection ends. It\n" +
			"remembers no other queries: --all shows those that come while the command follows.",
		Example: command.Examples(
			"Show the last queries for names of the clusters", "kubevpn dns",
			"Also show new ones as they come, until Ctrl-C", "kubevpn dns -f",
			"Also show the names that this machine's other nameservers are asked for", "kubevpn dns -f --all",
			"Print the names that do not exist, for a script",
			"kubevpn dns -o jsonpath='{range .items[?(@.rcode==\"NXDOMAIN\")]}{.name}{\"\\n\"}{end}'",
		),
		RunE: func(cmd *cobra.Command, _ []string) error { return o.run(cmd.Context()) },
	}
	cmd.Flags().BoolVarP(&o.follow, "follow", "f", false, "show new queries until Ctrl-C")
	cmd.Flags().BoolVar(&o.all, "all", false, "with -f: also show new queries for other names")
	o.output.AddTo(cmd)
	return cmd
}

func (o *dnsOptions) run(ctx context.Context) error {
	if o.all && !o.follow {
		return api.Errorf(api.ExitUsage, "--all requires -f").
			WithHint("kubevpn remembers no queries for names outside of the clusters")
	}
	parameters := url.Values{
		api.ParamFollow: {strconv.FormatBool(o.follow)}, api.ParamAll: {strconv.FormatBool(o.all)},
	}
	list := api.DNSQueryList{TypeMeta: api.Type(api.KindDNSQueryList), Items: []api.DNSQuery{}}
	people := o.output.ForPeople()
	if people && o.follow {
		o.printHead(o.f.Out)
	}
	err := daemonclient.Follow(ctx, o.f.Daemon(), api.PathDNS+"?"+parameters.Encode(), func(q api.DNSQuery) error {
		switch {
		case !o.follow:
			list.Items = append(list.Items, q)
		case people:
			o.printRow(o.f.Out, q)
		default:
			q.TypeMeta = api.Type(api.KindDNSQuery)
			return o.output.PrintLine(o.f.Out, true, q)
		}
		return nil
	})
	if errors.Is(err, daemonclient.ErrNoDaemon) {
		fmt.Fprintln(o.f.Errout, "not connected")
		err = nil
	}
	switch {
	case err != nil || o.follow:
		return err
	case !people:
		return o.output.Print(o.f.Out, list)
	}
	o.printHead(o.f.Out)
	for _, q := range list.Items {
		o.printRow(o.f.Out, q)
	}
	return nil
}

// The table has columns of fixed width, because its rows come one by one. The last column may have any length.
const (
	dnsRow     = "%-12s  %-44s  %-5s  %-10s  %-8s  %8s  %s\n"
	dnsWideRow = "%-12s  %-44s  %-5s  %-10s  %-21s  %-12s  %-16s  %-7s  %-8s  %8s  %s\n"
)

func (o *dnsOptions) printHead(w io.Writer) {
	o.printCells(w, []string{"TIME", "NAME", "TYPE", "FROM", "SERVER", "CONNECTION", "DOMAIN", "NETWORK", "CODE",
		"TOOK", "ANSWER"})
}

func (o *dnsOptions) printCells(w io.Writer, c []string) {
	if o.output.Wide() {
		fmt.Fprintf(w, dnsWideRow, c[0], c[1], c[2], c[3], c[4], c[5], c[6], c[7], c[8], c[9], c[10])
		return
	}
	fmt.Fprintf(w, dnsRow, c[0], c[1], c[2], c[3], c[8], c[9], c[10])
}

func (o *dnsOptions) printRow(w io.Writer, q api.DNSQuery) {
	if q.Missed > 0 {
		fmt.Fprintf(w, "! %d queries are missing here: they came faster than kubevpn could show them\n", q.Missed)
	}
	server := ""
	if q.Server.IsValid() {
		server = q.Server.String()
	}
	o.printCells(w, term.OneLines([]string{q.Time.Local().Format("15:04:05.000"), cmp.Or(q.Name, "."), q.Type, q.From,
		server, q.Connection, q.Domain, q.Network, q.Rcode, fmt.Sprintf("%.1f ms", q.Seconds*1e3), answer(q)}))
}

// answer returns the records of an answer in one line.
func answer(q api.DNSQuery) string {
	text := strings.Join(q.Answers, ", ")
	if more := q.Records - len(q.Answers); more > 0 {
		text += fmt.Sprintf(", and %d more", more)
	}
	return text
}
