package inspect

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"net/url"
	"strconv"
	"time"

	"github.com/dustin/go-humanize"
	"github.com/spf13/cobra"

	"kubevpn/internal/api"
	"kubevpn/internal/laptop/cli/command"
	"kubevpn/internal/laptop/cli/daemonclient"
	"kubevpn/internal/laptop/cli/term"
)

type flowsOptions struct {
	f      *command.Factory
	output *term.Format
	follow bool
	limit  int
}

func newFlows(f *command.Factory) *cobra.Command {
	o := &flowsOptions{f: f, output: term.NewFormat("table", "wide", "json", "yaml", term.JSONPath)}
	cmd := &cobra.Command{
		Use:   "flows",
		Short: "Show what passes the tunnels now",
		Long: "Show the flows through the tunnels of this machine, the fastest first: the program, the port that it\n" +
			"uses, the destination with the name of its Service or pod, the bytes, the rate, and who keeps the\n" +
			"bytes waiting. The command measures the rates for one second. The round trip is to the traffic\n" +
			"manager in the gvisor netstack, and to the destination in the system netstack.\n" +
			"`kubevpn flows` shows the connections of the daemon only, and records nothing.",
		Example: command.Examples(
			"Show the fastest flows", "kubevpn flows",
			"Follow them, also with transports and links", "kubevpn flows -f -o wide",
			"Print a line of JSON for each second", "kubevpn flows -f -o json --limit 0",
			"Print the programs whose flows stall, for a script",
			"kubevpn flows --limit 0 -o jsonpath='{range .items[?(@.stall)]}{.program} {.stall}{\"\\n\"}{end}'",
		),
		RunE: func(cmd *cobra.Command, _ []string) error { return o.run(cmd.Context()) },
	}
	cmd.Flags().BoolVarP(&o.follow, "follow", "f", false, "show the flows each second until Ctrl-C")
	cmd.Flags().IntVar(&o.limit, "limit", 50, "show at most this many flows; 0 shows all")
	o.output.AddTo(cmd)
	return cmd
}

func (o *flowsOptions) run(ctx context.Context) error {
	if o.limit < 0 {
		return api.Errorf(api.ExitUsage, "--limit must not be negative").WithHint("use 0 to show all flows")
	}
	parameters := url.Values{api.ParamLimit: {strconv.Itoa(o.limit)}, api.ParamFollow: {strconv.FormatBool(o.follow)}}
	screen := o.f.Screen(o.follow && o.output.ForPeople())
	show := func(list api.FlowList) error {
		list.TypeMeta = api.Type(api.KindFlowList)
		list.Items = append([]api.Flow{}, list.Items...) // never null
		return screen.Draw(func(w io.Writer) error { return o.print(w, list) })
	}
	err := daemonclient.Follow(ctx, o.f.Daemon(), api.PathFlows+"?"+parameters.Encode(), show)
	if errors.Is(err, daemonclient.ErrNoDaemon) {
		fmt.Fprintln(o.f.Errout, "not connected")
		if err = nil; !o.output.ForPeople() {
			err = show(api.FlowList{})
		}
	}
	return err
}

func (o *flowsOptions) print(w io.Writer, list api.FlowList) error {
	if !o.output.ForPeople() {
		return o.output.PrintLine(w, o.follow, list)
	}
	t := term.NewTable(w, o.output.Wide())
	t.Row([]string{"PROGRAM", "PROTOCOL", "SOURCE PORT", "DESTINATION", "NAME", "SENT", "RECEIVED", "RATE",
		"ROUND TRIP", "STALL"}, []string{"CONNECTION", "TRANSPORT", "LINK", "AGE", "RETRANSMITS"})
	for _, f := range list.Items {
		t.Row(term.OneLines(flowCells(f)), term.OneLines(wideFlowCells(f, list.Time)))
	}
	if err := t.Flush(); err != nil {
		return err
	}
	fmt.Fprintln(w, totalOf(list))
	for _, warning := range list.Warnings {
		fmt.Fprintf(w, "! %s\n", warning)
	}
	return nil
}

func flowCells(f api.Flow) []string {
	program, sent, received, rate := f.Program, "", "", ""
	if f.PID != 0 {
		program = fmt.Sprintf("%s (%d)", f.Program, f.PID)
	}
	if f.Counted {
		sent, received = humanize.Bytes(f.Sent), humanize.Bytes(f.Received)
		rate = humanize.Bytes(uint64(f.SentRate+f.ReceivedRate)) + "/s"
	}
	trip := roundTrip(f.Seconds)
	if f.Transport == api.Shortcut {
		trip = f.Transport
	}
	return []string{program, f.Protocol, port(f.Source.Port()), destination(f), objectName(f.Name), sent, received,
		rate, trip, stall(f)}
}

func wideFlowCells(f api.Flow, now time.Time) []string {
	link, retransmits := "", ""
	if f.Link != nil {
		link = strconv.Itoa(*f.Link)
	}
	if f.RoundTripTo == api.RoundTripDestination {
		retransmits = fmt.Sprint(f.Retransmits)
	}
	return []string{f.Connection, f.Transport, link, term.Age(f.Since, now), retransmits}
}

// port returns a port, or nothing for a protocol without ports.
func port(n uint16) string {
	if n == 0 {
		return ""
	}
	return strconv.Itoa(int(n))
}

func destination(f api.Flow) string {
	if f.Destination.Port() == 0 {
		return f.Destination.Addr().String()
	}
	return f.Destination.String()
}

func objectName(n api.ObjectName) string {
	switch {
	case n.Name == "":
		return ""
	case n.Namespace == "":
		return n.Kind + " " + n.Name
	}
	return n.Kind + " " + n.Namespace + "/" + n.Name
}

func roundTrip(seconds float64) string {
	if seconds == 0 {
		return ""
	}
	return fmt.Sprintf("%.1f ms", seconds*1e3)
}

// stall returns who keeps the bytes of a flow waiting, and for how long.
func stall(f api.Flow) string {
	if f.Stall == "" {
		return ""
	}
	text := map[api.Stall]string{
		api.StallProgram: "program does not read", api.StallDestination: "destination does not read",
		api.StallConnecting: "destination does not answer", api.StallTunnel: "tunnel is interrupted",
	}[f.Stall]
	return fmt.Sprintf("%s, %.0f s", cmp.Or(text, string(f.Stall)), f.StallSeconds)
}

// totalOf returns the line below the table.
func totalOf(list api.FlowList) string {
	if list.Total.Flows == 0 {
		return "no flows"
	}
	line := fmt.Sprintf("%d flows", list.Total.Flows)
	if shown := len(list.Items); shown < list.Total.Flows {
		line += fmt.Sprintf(", %d shown", shown)
	}
	if list.Total.Stalled > 0 {
		line += fmt.Sprintf(", %d stalled", list.Total.Stalled)
	}
	return line + fmt.Sprintf(": %s/s sent, %s/s received", humanize.Bytes(uint64(list.Total.SentRate)),
		humanize.Bytes(uint64(list.Total.ReceivedRate)))
}
