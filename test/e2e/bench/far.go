//go:build linux

package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"

	"kubevpn/internal/testenv"
	"kubevpn/test/lab"
)

// farLine is a line, and the congestion control of every TCP sender but kubevpn on the laptop, which asks for BBR.
type farLine struct {
	lab.Line
	congestion string
}

const bbr, cubic = "bbr", "cubic"

// String returns "60ms, 100 Mb/s, CUBIC".
func (l farLine) String() string { return l.Line.String() + ", " + strings.ToUpper(l.congestion) }

// fewLines returns the lines that -only far measures.
func fewLines() []farLine {
	lines := []farLine{
		{lab.Line{RTT: 60 * time.Millisecond, Rate: 100e6}, bbr},
		{lab.Line{RTT: 60 * time.Millisecond, Rate: 100e6}, cubic},
		{lab.Line{RTT: 150 * time.Millisecond, Rate: 50e6}, bbr},
		{lab.Line{RTT: 40 * time.Millisecond, Rate: 200e6, Loss: 0.001}, bbr},
	}
	for _, line := range []lab.Line{
		{RTT: 60 * time.Millisecond, Rate: 100e6, Loss: 0.01},
		{RTT: 40 * time.Millisecond, Rate: 200e6, Loss: 0.05},
		{RTT: 40 * time.Millisecond, Rate: 200e6, Loss: 0.1},
	} {
		for _, line.Burst = range []float64{0, 5} {
			lines = append(lines, farLine{line, bbr}, farLine{line, cubic})
		}
	}
	return lines
}

// allLines returns the lines that -only grid measures.
func allLines() []farLine {
	var lines []farLine
	for _, rtt := range []time.Duration{20, 60, 150} {
		for _, rate := range []float64{50e6, 200e6} {
			for _, loss := range []float64{0, 0.001, 0.01} {
				lines = append(lines, farLine{lab.Line{RTT: rtt * time.Millisecond, Rate: rate, Loss: loss}, bbr})
			}
		}
	}
	return lines
}

// farPaths are the columns of the tables of far lines.
var farPaths = []path{kernel, portForward, gvisorProxy}

const (
	besideDown    = "the same beside 2 downloads"
	besideUp      = "the same beside 2 uploads"
	besideTail    = "99 % of these are shorter than"
	quicRow       = "QUIC (HTTP/3) down, 1 flow"
	roundTripsRow = "connect: round trips"
)

func milliseconds(m measured) float64 { return m.P50us / 1e3 }

var farMeasurements = []measurement{
	{"down, 1 flow", "MB/s", "down", sourcePort, 1, bytesPerSecond, nil},
	{"down, 8 flows", "MB/s", "down", sourcePort, 8, bytesPerSecond, nil},
	{"up, 1 flow", "MB/s", "up", sinkPort, 1, bytesPerSecond, nil},
	{rttRow, "ms", "rtt", echoPort, 1, milliseconds, nil},
	{besideDown, "ms", "rtt", echoPort, 1, milliseconds, &load{"down", sourcePort, 2}},
	{besideUp, "ms", "rtt", echoPort, 1, milliseconds, &load{"up", sinkPort, 2}},
	{"new connections, 16 at a time", "/s", "connect", echoPort, 16, perSecond, nil},
	{quicRow, "MB/s", "http3-down", securePort, 1, bytesPerSecond, nil},
}

// brief reports whether the line is a row of the table of many lines, with few measurements, instead of a table.
func (l farLine) brief() bool { return l.congestion == cubic || l.Loss >= 0.01 }

// briefMeasurements are the columns of the table of many lines.
var briefMeasurements = []string{"down, 1 flow", "down, 8 flows", "up, 1 flow", besideDown, besideTail}

// takes reports whether a measurement is made on the line by a path. QUIC to a pod shows the upper limit for QUIC as a
// transport.
func (l farLine) takes(m measurement, p path) bool {
	switch {
	case l.brief():
		return p != portForward && slices.Contains(briefMeasurements, m.row)
	case m.row == quicRow:
		return p == kernel
	}
	return true
}

// far measures kubevpn by api-proxy with gvisor over lines between the laptop and the cluster, beside plain TCP and
// `kubectl port-forward` over the same line.
type far struct {
	*bench
	lines []farLine
	match *regexp.Regexp // of the rows to measure: "60ms, 100 Mb/s, BBR: up, 1 flow"
}

// measures reports whether anything on the line is to be measured.
func (b *far) measures(line farLine) bool {
	return slices.ContainsFunc(farMeasurements, func(m measurement) bool {
		return line.takes(m, kernel) && b.match.MatchString(onLine(line, m.row))
	})
}

func (b *far) run(ctx context.Context) (*farReport, error) {
	lines := slices.DeleteFunc(b.lines, func(line farLine) bool { return !b.measures(line) })
	commit, err := exec.CommandContext(ctx, "git", "describe", "--always", "--dirty").Output()
	if err != nil {
		return nil, fmt.Errorf("git describe: %w", err)
	}
	r := &farReport{newReport(thisMachine(), b.each), lines, b.rounds, strings.TrimSpace(string(commit))}
	return r, b.onLab(ctx, func(ctx context.Context) (err error) {
		restore, err := allow(bbr, cubic)
		if err != nil {
			return err
		}
		defer func() { err = errors.Join(err, restore()) }()
		if b.match.MatchString(roundTripsRow) {
			if err := b.measureConnect(ctx, r.report); err != nil {
				return err
			}
		}
		for _, line := range lines {
			if err := b.measureLine(ctx, r, line); err != nil {
				return fmt.Errorf("%s: %w", line, err)
			}
		}
		return nil
	})
}

// over measures on a line.
func (b *far) over(ctx context.Context, line farLine, measure func(context.Context) error) (err error) {
	stop, err := b.Stretch(line.Line)
	if err != nil {
		return err
	}
	defer func() {
		if e := stop(); err == nil {
			err = e
		}
	}()
	// The kernel's path uses the line too.
	via := b.Config().Families()[0].LineNet.Addr().Next()
	cmd, err := b.Command(ctx, "laptop", "ip", "route", "replace", b.twin.String(), "via", via.String())
	if err != nil {
		return err
	}
	if out, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("ip route: %w: %s", err, out)
	}
	if err := b.control(ctx, line.congestion); err != nil {
		return err
	}
	return measure(ctx)
}

// allow lets network namespaces other than the machine's own use congestion controls, until restore is called.
func allow(controls ...string) (restore func() error, err error) {
	const file = "/proc/sys/net/ipv4/tcp_allowed_congestion_control"
	before, err := os.ReadFile(file)
	if err != nil {
		return nil, err
	}
	all := strings.Join(append(controls, string(before)), " ")
	return func() error { return os.WriteFile(file, before, 0) }, os.WriteFile(file, []byte(all), 0)
}

// control sets the congestion control of new connections of the laptop, the nodes and both pods.
func (b *far) control(ctx context.Context, congestion string) error {
	set := []string{"sysctl", "-qw", "net.ipv4.tcp_congestion_control=" + congestion}
	cmds := []*exec.Cmd{b.inPod(ctx, b.pod, set...), b.inPod(ctx, b.twin, set...)}
	for _, place := range []string{"laptop", "node1", "node2", "node3"} {
		cmd, err := b.Command(ctx, place, set...)
		if err != nil {
			return err
		}
		cmds = append(cmds, cmd)
	}
	for _, cmd := range cmds {
		if out, err := cmd.CombinedOutput(); err != nil {
			return fmt.Errorf("%s: %w: %s", strings.Join(set, " "), err, out)
		}
	}
	return nil
}

// measureConnect counts the round trips of `kubevpn connect` while the daemon, the helper and the manager run. It
// compares the time on a line of 200 ms with the time on a line of 20 ms.
func (b *far) measureConnect(ctx context.Context, r *report) error {
	const near, distant = 20 * time.Millisecond, 200 * time.Millisecond
	for _, rtt := range []time.Duration{near, distant} {
		err := b.over(ctx, farLine{lab.Line{RTT: rtt, Rate: 1e9}, bbr}, func(ctx context.Context) error {
			for i := range b.rounds + 3 {
				start := time.Now()
				if out, err := b.connect(ctx, "--netstack", "gvisor"); err != nil {
					return fmt.Errorf("kubevpn connect: %w\n%s", err, out)
				}
				if i > 0 { // the first one may start the daemon and install the manager
					r.add(roundTripsRow+rtt.String(), all, time.Since(start).Seconds())
				}
				if out, err := b.disconnect(ctx); err != nil {
					return fmt.Errorf("kubevpn disconnect: %w\n%s", err, out)
				}
			}
			return nil
		})
		if err != nil {
			return err
		}
	}
	longer := r.median(roundTripsRow+distant.String(), all) - r.median(roundTripsRow+near.String(), all)
	r.add(roundTripsRow, all, longer/(distant-near).Seconds())
	say("%s: %.1f", roundTripsRow, r.median(roundTripsRow, all))
	return nil
}

// measureLine makes all measurements on one line, by every path in each round.
func (b *far) measureLine(ctx context.Context, r *farReport, line farLine) error {
	return b.over(ctx, line, func(ctx context.Context) error {
		if err := b.connectOver(ctx, line); err != nil {
			return err
		}
		stop, err := b.openPaths(ctx)
		if err != nil {
			return err
		}
		defer stop()
		unserve, err := b.servePods(ctx)
		if err != nil {
			return err
		}
		defer unserve()
		for range b.rounds {
			for _, m := range farMeasurements {
				row := m
				row.row = onLine(line, m.row)
				if !b.match.MatchString(row.row) {
					continue
				}
				for _, p := range farPaths {
					if !line.takes(m, p) {
						continue
					}
					if err := b.settle(ctx); err != nil {
						return fmt.Errorf("before %s, %s: %w", m.row, p, err)
					}
					got, err := b.measureOne(ctx, r.report, row, p)
					if err != nil {
						return fmt.Errorf("%s, %s: %w", m.row, p, err)
					}
					if m.row == besideDown {
						r.add(onLine(line, besideTail), p, got.P99us/1e3)
					}
					say("%s: %s, %s: %.1f (99 %%: %.1f)", line, m.row, p, m.value(got), got.P99us/1e3)
				}
			}
		}
		return nil
	})
}

// connectOver connects over the line. With CUBIC, a conn may stand still when a line loses so many packets that connect
// finds the transport at fault.
func (b *far) connectOver(ctx context.Context, line farLine) error {
	for tries := 1; ; tries++ {
		err := b.connectBy(ctx, "gvisor", "api-proxy")
		if err == nil || line.Loss < 0.1 || tries == 5 {
			return err
		}
		say("%s: connecting again: %v", line, err)
	}
}

// settle waits until the line is quiet. Data that the previous measurement left in the buffers of kubectl and of the
// API server crosses the line for seconds.
func (b *far) settle(ctx context.Context) error {
	const (
		watched = 200 * time.Millisecond
		quiet   = 50e3 // bytes a second
	)
	began, before := time.Time{}, 0
	return testenv.Poll(time.Minute, func() error {
		if time.Since(began) < watched {
			return errors.New("the line has not been watched")
		}
		carried, err := b.carried(ctx)
		if err != nil {
			return err
		}
		rate := float64(carried-before) / time.Since(began).Seconds()
		if first := began.IsZero(); !first && rate < quiet {
			return nil
		}
		began, before = time.Now(), carried
		return fmt.Errorf("the line carries %.0f bytes a second while no measurement runs", rate)
	})
}

// carried returns how many bytes the line has carried both ways.
func (b *far) carried(ctx context.Context) (int, error) {
	cmd, err := b.Command(ctx, "router", "sh", "-c", "cat /sys/class/net/line0/statistics/[rt]x_bytes")
	if err != nil {
		return 0, err
	}
	out, err := cmd.CombinedOutput()
	if err != nil {
		return 0, fmt.Errorf("reading how much the line has carried: %w: %s", err, out)
	}
	sum := 0
	for text := range strings.FieldsSeq(string(out)) {
		n, err := strconv.Atoi(text)
		if err != nil {
			return 0, err
		}
		sum += n
	}
	return sum, nil
}

// onLine is a row of the report for one line.
func onLine(line farLine, row string) string { return line.String() + ": " + row }

// farReport has a table for each line, and one of many lines.
type farReport struct {
	*report
	lines  []farLine
	rounds int
	commit string
}

func (r *farReport) render() string {
	var b strings.Builder
	fmt.Fprintf(&b, "Measured on %s, at commit %s.\n%s, each measurement of %v. ", r.machine, r.commit,
		medians(r.rounds), r.each)
	fmt.Fprintf(&b, "`kubevpn connect` with its daemon and manager running takes %s round trips.\n",
		r.shown("%.1f", roundTripsRow, all))
	for _, line := range r.lines {
		if !line.brief() {
			fmt.Fprintf(&b, "\n%s:\n\n", line)
			r.table(&b, line)
		}
	}
	fmt.Fprintf(&b, "\nOther lines, %s first, then %s:\n\n", kernel, gvisorProxy)
	r.briefTable(&b)
	return b.String()
}

func (r *farReport) table(b *strings.Builder, line farLine) {
	head := []string{""}
	for _, p := range farPaths {
		head = append(head, string(p))
	}
	header(b, head)
	for _, m := range farMeasurements {
		row := onLine(line, m.row)
		cells := []string{fmt.Sprintf("%s (%s)", m.row, m.unit)}
		for _, p := range farPaths {
			cells = append(cells, r.shown("%.1f", row, p))
		}
		tableLine(b, cells)
	}
}

func (r *farReport) briefTable(b *strings.Builder) {
	header(b, []string{"line, loss", "down, 1 flow (MB/s)", "down, 8 flows", "up, 1 flow",
		rttRow + ", beside 2 downloads (ms)", besideTail})
	for _, line := range r.lines {
		if !line.brief() {
			continue
		}
		cells := []string{strings.Replace(line.String(), " loss", "", 1)}
		for _, m := range briefMeasurements {
			row, format := onLine(line, m), "%.1f"
			if m == besideDown || m == besideTail {
				format = "%.0f"
			}
			cells = append(cells, r.shown(format, row, kernel)+"; "+r.shown(format, row, gvisorProxy))
		}
		tableLine(b, cells)
	}
}

// farPlots have a group of bars for each line.
func (r *farReport) plots() []chart {
	return []chart{
		{name: "far-throughput", title: "Throughput of one download", axis: "MB/s", format: "%.1f",
			rows: r.lineNames(), paths: farPaths,
			upper: func(line string) string { return line + ", BBR: down, 1 flow" }},
		{name: "far-latency", title: "Round trip of 1 byte beside 2 downloads", axis: "ms", format: "%.0f",
			rows: r.lineNames(), paths: farPaths,
			upper: func(line string) string { return line + ", BBR: " + besideDown }},
	}
}

// lineNames are the lines of the plots.
func (r *farReport) lineNames() []string {
	var names []string
	for _, line := range r.lines {
		if line.congestion == bbr && line.Burst == 0 {
			names = append(names, line.Line.String())
		}
	}
	return names
}

func (r *farReport) write(file string) error {
	if err := r.replace(file, farBegin, farEnd, r.render()); err != nil {
		return err
	}
	return r.draw(file, r.plots())
}
