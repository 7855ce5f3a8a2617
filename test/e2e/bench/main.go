//go:build linux

// Bench measures kubevpn end to end on a real cluster of test/lab. It compares kubevpn with the kernel's routed path,
// `kubectl port-forward` and a raw upgraded connection through the API server to the same pod, in the same run, one
// after the other, round by round. It writes the medians as tables into docs/performance.md, and plots into
// docs/performance. It has no pass criteria: the laptop, the cluster and the measurement share the machine's cores, so
// only the ratios are comparable.
//
//	bench ─┬─ lab: three nodes, kube-proxy iptables
//	       ├─ laptop: kubevpn connect, by each transport with each netstack; kubectl port-forward
//	       └─ laptop: this program again, as the client of the echo server in a pod
//
//	go run -C test ./e2e/bench [-only far] [-rounds 5] [-seconds 1.5] [-out ../docs/performance.md]
//
// With -only far it measures over lines that are slow, far or lossy (lab.Line) between the laptop and the cluster.
package main

import (
	"context"
	"encoding/json"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"regexp"
	"time"
)

func main() { os.Exit(run()) }

func run() int {
	client := flag.String("client", "", "one measurement, as JSON (used by the program itself)")
	rounds := flag.Int("rounds", 5, "number of rounds")
	seconds := flag.Float64("seconds", 1.5, "how long one measurement of speed takes")
	out := flag.String("out", "../docs/performance.md",
		"the file whose tables are written; the plots go into the folder of that name, without .md")
	only := flag.String("only", "", "measure only this: datagrams; requests; recording; diff; far or grid, lines "+
		"that are slow, far or lossy, of which grid takes an hour; or intercepts, which writes no file")
	match := flag.String("match", "", "with -only far or grid: measure only the rows that this regular expression "+
		"matches, as in \"60ms, 100 Mb/s, BBR: up, 1 flow\"")
	serve := flag.Int("serve", 0, "the port at which to serve the measurements in a pod (used by the program itself)")
	name := flag.String("lab", "", "measure on this lab instead of a new one")
	flag.Parse()

	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt)
	defer stop()
	err := func() error {
		if *client != "" {
			return serveClient(*client)
		}
		switch *serve {
		case 0:
		case securePort:
			return serveSecure(fmt.Sprintf(":%d", *serve))
		default:
			return serveDatagrams(fmt.Sprintf(":%d", *serve))
		}
		rows, err := regexp.Compile(*match)
		if err != nil {
			return err
		}
		b := &bench{rounds: *rounds, each: time.Duration(*seconds * float64(time.Second)), labName: *name,
			only: *only}
		switch *only {
		case "far":
			return publish(ctx, &far{b, fewLines(), rows}, *out)
		case "grid":
			return publish(ctx, &far{b, allLines(), rows}, *out)
		case "datagrams":
			return publish(ctx, part{b, datagramsBegin, datagramsEnd, (*report).renderDatagrams}, *out)
		case "requests":
			return publish(ctx, part{b, requestsBegin, requestsEnd, (*report).renderRequests}, *out)
		case "recording":
			return publish(ctx, part{b, recordingBegin, recordingEnd, (*report).renderRecording}, *out)
		case "diff":
			return publish(ctx, part{b, diffBegin, diffEnd, (*report).renderDiff}, *out)
		case "intercepts":
			return publish(ctx, b, "")
		}
		return publish(ctx, b, *out)
	}()
	if err != nil {
		fmt.Fprintln(os.Stderr, "bench:", err)
		return 1
	}
	return 0
}

// tables is the result of a measurement.
type tables interface {
	render() string
	write(file string) error
}

// publish measures, prints the tables and, unless file is empty, writes them.
func publish[T tables](ctx context.Context, b interface {
	run(context.Context) (T, error)
}, file string) error {
	t, err := b.run(ctx)
	if err != nil {
		return err
	}
	fmt.Println(t.render())
	if file == "" {
		return nil
	}
	return t.write(file)
}

// part is a bench that publishes one of its tables.
type part struct {
	*bench
	begin, end string // the lines around the table
	table      func(*report) string
}

type partReport struct {
	*report
	part
}

func (p part) run(ctx context.Context) (partReport, error) {
	r, err := p.bench.run(ctx)
	return partReport{r, p}, err
}

func (r partReport) render() string          { return r.table(r.report) }
func (r partReport) write(file string) error { return r.replace(file, r.begin, r.end, r.render()) }

// serveClient makes one measurement and prints the result as a line of JSON.
func serveClient(spec string) error {
	var w work
	if err := json.Unmarshal([]byte(spec), &w); err != nil {
		return err
	}
	m, err := w.do(os.Stdout, os.Stdin)
	if err != nil {
		return fmt.Errorf("%s %s x%d: %w", w.Kind, w.Target, w.Flows, err)
	}
	return json.NewEncoder(os.Stdout).Encode(m)
}
