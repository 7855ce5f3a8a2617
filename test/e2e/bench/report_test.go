//go:build linux

package main

import (
	"bytes"
	"encoding/xml"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
)

// sample is a report of three rounds whose medians are known: 100, 200, 300... in the order of the paths, twice as much in
// the second row, and so on.
func sample() *report {
	r := newReport(machine{"2026-01-02", "Abacus 3000", 2, 25.3e9, "6.1.0"}, 2*time.Second)
	for i, m := range measurements {
		for j, p := range paths {
			if p == upgraded && m.kind == "connect" {
				continue
			}
			v := float64((i + 1) * (j + 1) * 100)
			for _, v := range []float64{v, 10 * v, v / 10} {
				r.add(m.row, p, v)
			}
			if !m.bulk() {
				continue
			}
			r.add(processorRow(m.row), p, v/100)
			r.add(laptopRow(m.row), p, v/400)
			if m.flows > 1 && p.ours() {
				r.add(memoryRow(m.row, p), laptopSide, v/10)
				r.add(memoryRow(m.row, p), managerSide, v/20)
			}
		}
	}
	r.add(restRow, laptopSide, 70.4)
	r.add(restRow, managerSide, 28.8)
	r.add(againRow, laptopSide, 75.2)
	r.add(againRow, managerSide, 30.1)
	r.add(againRow, all, 121)
	r.add(gatewayRow, managerSide, 21.4)
	r.add(firstRow, all, 0.61)
	r.add(twentyRow, all, 2.4)
	for i, p := range []path{asItIs, passedOn, taken} {
		r.add(requestRow, p, []float64{120, 240, 900}[i])
		r.add(downloadRow, p, []float64{900, 700, 250}[i])
	}
	r.add(idleFlowRow, laptopSide, 15.33)
	r.add(idleFlowRow, managerSide, 13.05)
	r.add("connect, manager to be installed", all, 1.3)
	for i, p := range datagramPaths {
		for _, m := range secureMeasurements {
			v := float64(200)
			if strings.HasPrefix(m.kind, "http3") {
				v = 100 - 10*float64(i)
			}
			r.add(m.row, p, v)
		}
	}
	for _, kind := range datagramMeasurements {
		row := datagramRow(kind)
		for i, p := range datagramPaths {
			for range 2 {
				r.add(row, p, float64(i)/10)
				r.add(receivedRow(row), p, datagramRate-float64(i))
				r.add(busyRow(row), p, 1+float64(i)/10)
			}
		}
	}
	return r
}

const sampleTables = "Measured on 2026-01-02 on 2 cores of Abacus 3000, 25 GB of memory, Linux 6.1.0.\n" +
	"Medians of 3 rounds, each measurement of 2s.\n" + `
| | kernel, routed | ` + "`kubectl port-forward`" + ` | raw upgrade | gvisor, port-forward | system, port-forward | gvisor, api-proxy | system, api-proxy | gvisor, direct | system, direct |
|---|---|---|---|---|---|---|---|---|---|
| down, 1 flow (MB/s) | 100 | 200 | 300 | 400 | 500 | 600 | 700 | 800 | 900 |
| down, 8 flows (MB/s) | 200 | 400 | 600 | 800 | 1000 | 1200 | 1400 | 1600 | 1800 |
| up, 1 flow (MB/s) | 300 | 600 | 900 | 1200 | 1500 | 1800 | 2100 | 2400 | 2700 |
| up, 8 flows (MB/s) | 400 | 800 | 1200 | 1600 | 2000 | 2400 | 2800 | 3200 | 3600 |
| round trip of 1 byte, median (µs) | 500 | 1000 | 1500 | 2000 | 2500 | 3000 | 3500 | 4000 | 4500 |
| the same beside an upload (µs) | 600 | 1200 | 1800 | 2400 | 3000 | 3600 | 4200 | 4800 | 5400 |
| new connections, 16 at a time (/s) | 700 | 1400 | – | 2800 | 3500 | 4200 | 4900 | 5600 | 6300 |
| new connections, 128 at a time (/s) | 800 | 1600 | – | 3200 | 4000 | 4800 | 5600 | 6400 | 7200 |
| down, 1 flow: processor time per GB (s) | 1.0 | 2.0 | 3.0 | 4.0 | 5.0 | 6.0 | 7.0 | 8.0 | 9.0 |
| down, 8 flows: processor time per GB (s) | 2.0 | 4.0 | 6.0 | 8.0 | 10.0 | 12.0 | 14.0 | 16.0 | 18.0 |
| up, 1 flow: processor time per GB (s) | 3.0 | 6.0 | 9.0 | 12.0 | 15.0 | 18.0 | 21.0 | 24.0 | 27.0 |
| up, 8 flows: processor time per GB (s) | 4.0 | 8.0 | 12.0 | 16.0 | 20.0 | 24.0 | 28.0 | 32.0 | 36.0 |

| resident memory | daemon and helper | traffic manager |
|---|---|---|
| connected, nothing done | 70 MB | 29 MB |
| at rest again, after all of this, within 121 s | 75 MB | 30 MB |
| and the traffic gateway, since the system netstack was asked for | – | 21 MB |
| an idle flow | 15.3 kB | 13.1 kB |

| resident memory at most (MB) | gvisor, port-forward | system, port-forward | gvisor, api-proxy | system, api-proxy | gvisor, direct | system, direct |
|---|---|---|---|---|---|---|
| down, 8 flows: daemon and helper | 80 | 100 | 120 | 140 | 160 | 180 |
| down, 8 flows: traffic manager | 40 | 50 | 60 | 70 | 80 | 90 |
| up, 8 flows: daemon and helper | 160 | 200 | 240 | 280 | 320 | 360 |
| up, 8 flows: traffic manager | 80 | 100 | 120 | 140 | 160 | 180 |

| | |
|---|---|
| connect, manager to be installed | 1.30 s |
| connect, manager running | – |
| proxy, 1 pod: from the command to the laptop's first answer | 0.61 s |
| proxy, 20 pods: from the command until each pod's requests come | 2.40 s |

| | as it is | passed on by the agent | answered by the laptop |
|---|---|---|---|
| a request to the application, median (µs) | 120 | 240 | 900 |
| a download from the application (MB/s) | 900 | 700 | 250 |
`

const sampleDatagrams = "Measured on 2026-01-02 on 2 cores of Abacus 3000, 25 GB of memory, Linux 6.1.0.\n" +
	"Medians of 2 rounds, each measurement of 2s.\n" + `
| datagrams of 1200 bytes | kernel, routed | gvisor, port-forward | system, port-forward | gvisor, api-proxy | system, api-proxy | gvisor, direct | system, direct |
|---|---|---|---|---|---|---|---|
| UDP down, 500 Mb/s (lost, %) | 0.00 | 0.10 | 0.20 | 0.30 | 0.40 | 0.50 | 0.60 |
| UDP up, 500 Mb/s (lost, %) | 0.00 | 0.10 | 0.20 | 0.30 | 0.40 | 0.50 | 0.60 |
| UDP down, 500 Mb/s: received (Mb/s) | 500 | 499 | 498 | 497 | 496 | 495 | 494 |
| UDP up, 500 Mb/s: received (Mb/s) | 500 | 499 | 498 | 497 | 496 | 495 | 494 |
| UDP down, 500 Mb/s: processors busy (number) | 1.00 | 1.10 | 1.20 | 1.30 | 1.40 | 1.50 | 1.60 |
| UDP up, 500 Mb/s: processors busy (number) | 1.00 | 1.10 | 1.20 | 1.30 | 1.40 | 1.50 | 1.60 |
| HTTP/2 down (MB/s) | 200 | 200 | 200 | 200 | 200 | 200 | 200 |
| HTTP/3 down (MB/s) | 100 | 90 | 80 | 70 | 60 | 50 | 40 |
| HTTP/2 up (MB/s) | 200 | 200 | 200 | 200 | 200 | 200 | 200 |
| HTTP/3 up (MB/s) | 100 | 90 | 80 | 70 | 60 | 50 | 40 |
`

func TestRequestTableIsRendered(t *testing.T) {
	r := newReport(machine{"2026-01-02", "Abacus 3000", 2, 25.3e9, "6.1.0"}, 2*time.Second)
	for _, p := range append([]path{portForward}, requestPaths...) {
		r.add(redisRow, p, 1000)
		r.add(redisRow, p, 1000)
	}
	got := r.renderRequests()
	for _, want := range []string{
		"Medians of 2 rounds", "| " + redisRow + " | 1000 | 1000 | 1000 | 1000 | 1000 | 1000 | 1000 |\n",
		"| `wrk -c 32` | – |",
	} {
		if !strings.Contains(got, want) {
			t.Errorf("no %q in\n%s", want, got)
		}
	}
}

func TestTablesAreRendered(t *testing.T) {
	if d := cmp.Diff(sampleTables, sample().render()); d != "" {
		t.Errorf("(-want +got):\n%s", d)
	}
}

func TestWriteReplacesTheTables(t *testing.T) {
	file := filepath.Join(t.TempDir(), "figures.md")
	if err := os.WriteFile(file, []byte("before\n"+tableBegin+"old\n"+tableEnd+
		"between\n"+datagramsBegin+datagramsEnd+"after\n"), 0o644); err != nil {
		t.Fatal(err)
	}
	for range 2 {
		if err := sample().write(file); err != nil {
			t.Fatal(err)
		}
		got, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		if d := cmp.Diff("before\n"+tableBegin+sampleTables+tableEnd+"between\n"+datagramsBegin+sampleDatagrams+datagramsEnd+
			"after\n", string(got)); d != "" {
			t.Errorf("(-want +got):\n%s", d)
		}
	}
	for _, name := range []string{"throughput", "latency", "processor"} {
		if _, err := os.Stat(filepath.Join(filepath.Dir(file), "figures", name+".svg")); err != nil {
			t.Error(err)
		}
	}
	if err := os.WriteFile(file, []byte("no marks\n"), 0o644); err != nil {
		t.Fatal(err)
	}
	if err := sample().write(file); err == nil {
		t.Error("a document without marks was written")
	}
}

func TestPlotsHaveABarForEachValue(t *testing.T) {
	// A bar of each color in each group, and one in the legend for each path.
	for name, want := range map[string]map[string]int{
		"throughput": {"#333333": 0, "#888888": 5, "#BBBBBB": 5, "#D95F0E": 5, "#FE9929": 5, "#08519C": 5, "#6BAED6": 5, "#006D2C": 5, "#74C476": 5},
		"latency":    {"#333333": 3, "#888888": 3, "#BBBBBB": 3, "#D95F0E": 3, "#FE9929": 3, "#08519C": 3, "#6BAED6": 3, "#006D2C": 3, "#74C476": 3},
		"processor": {
			"#333333": 5, "#888888": 5, "#BBBBBB": 5, "#D95F0E": 5, "#FE9929": 5, "#08519C": 5, "#6BAED6": 5, "#006D2C": 5, "#74C476": 5,
			"#999999": 4, "#C4C4C4": 4, "#DDDDDD": 4, "#ECAF87": 4, "#FFCC94": 4, "#84A8CE": 4, "#B5D7EB": 4, "#80B696": 4, "#BAE2BB": 4,
		},
	} {
		t.Run(name, func(t *testing.T) {
			c := chartNamed(t, name)
			svg, err := c.draw(sample())
			if err != nil {
				t.Fatal(err)
			}
			again, err := c.draw(sample())
			if err != nil || !bytes.Equal(svg, again) {
				t.Errorf("the same values give another plot, %v", err)
			}
			if all, good := bytes.Count(svg, []byte("font-family:")), bytes.Count(svg, []byte("font-family:Liberation Sans,Arial,sans-serif;")); all == 0 || all != good {
				t.Errorf("%d of %d texts are in a font that everybody has", good, all)
			}
			fills, words := read(t, svg)
			for color, n := range want {
				if fills[color] != n {
					t.Errorf("%d areas are %s, want %d", fills[color], color, n)
				}
				delete(fills, color)
			}
			for color, n := range fills {
				t.Errorf("%d areas are %s, want none", n, color)
			}
			for _, want := range append([]string{"2 cores of Abacus 3000", "gvisor, api-proxy", c.axis}, c.rows...) {
				if !strings.Contains(words, want) {
					t.Errorf("the plot does not say %q", want)
				}
			}
		})
	}
}

// TestBarHeightsAreProportional checks that heights follow the values, and that figures match the tables.
func TestBarHeightsAreProportional(t *testing.T) {
	r := newReport(machine{}, time.Second)
	for i, m := range measurements[:4] {
		v := float64(100 * (i + 1))
		r.add(m.row, gvisorProxy, v)
		r.add(processorRow(m.row), gvisorProxy, v)
		r.add(laptopRow(m.row), gvisorProxy, v/4)
	}
	svg, err := chartNamed(t, "throughput").draw(r)
	if err != nil {
		t.Fatal(err)
	}
	whole := bars(t, svg, "#08519C")
	if svg, err = chartNamed(t, "processor").draw(r); err != nil {
		t.Fatal(err)
	}
	lower, upper := bars(t, svg, "#08519C"), bars(t, svg, "#84A8CE")
	if len(whole) != 5 || len(lower) != 5 || len(upper) != 4 { // the fifth is the legend's
		t.Fatalf("bars: %v, %v, %v", whole, lower, upper)
	}
	about := func(got, want float64) bool { return 0.999*want < got && got < 1.001*want }
	for i := range upper {
		if got, want := whole[i].height()/whole[0].height(), float64(i+1); !about(got, want) {
			t.Errorf("bar %d is %.3f times as high as the first, want %.0f", i, got, want)
		}
		if got := upper[i].height() / lower[i].height(); !about(got, 3) || !about(upper[i].bottom, lower[i].top) {
			t.Errorf("bar %d of two parts is %v on %v", i, upper[i], lower[i])
		}
	}
	if svg, err = chartNamed(t, "throughput").draw(r); err != nil {
		t.Fatal(err)
	}
	if _, words := read(t, svg); !strings.Contains(words, "\n300\n") || !strings.Contains(words, "\n–\n") {
		t.Errorf("no figure 300, or none for what was not measured, in %q", words)
	}
}

// TestLatencyAxisHasPowersOfTen checks that ten times the latency is one step higher.
func TestLatencyAxisHasPowersOfTen(t *testing.T) {
	r := newReport(machine{}, time.Second)
	r.add(rttRow, gvisorProxy, 10)
	r.add(loadedRow, gvisorProxy, 10000)
	svg, err := chartNamed(t, "latency").draw(r)
	if err != nil {
		t.Fatal(err)
	}
	b := bars(t, svg, "#08519C")
	if got := b[1].height() / b[0].height(); got < 3.99 || got > 4.01 {
		t.Errorf("10 and 10000 are %.2f times as high, want 4", got)
	}
	if _, words := read(t, svg); !strings.Contains(words, "\n1\n10\n100\n1000\n10000\n") {
		t.Errorf("the axis in %q", words)
	}
}

func chartNamed(t *testing.T, name string) chart {
	t.Helper()
	for _, c := range plots {
		if c.name == name {
			return c
		}
	}
	t.Fatalf("there is no plot %s", name)
	panic("unreachable")
}

// read counts the SVG's filled areas by color, and gives its text, a line for each element.
func read(t *testing.T, svg []byte) (fills map[string]int, words string) {
	t.Helper()
	fills, words = map[string]int{}, "\n"
	walk(t, svg, func(e xml.StartElement) {
		if color, ok := fill(e); ok {
			fills[color]++
		}
	}, func(text string) {
		if text = strings.TrimSpace(text); text != "" {
			words += text + "\n"
		}
	})
	return fills, words
}

type bar struct{ bottom, top float64 }

func (b bar) height() float64 { return b.top - b.bottom }

func bars(t *testing.T, svg []byte, color string) (all []bar) {
	t.Helper()
	walk(t, svg, func(e xml.StartElement) {
		if c, ok := fill(e); !ok || c != color {
			return
		}
		var x float64
		var b bar
		if _, err := fmt.Sscanf(attribute(e, "d"), "M%f,%fL%f,%f", &x, &b.bottom, &x, &b.top); err != nil {
			t.Fatalf("the area %q: %v", attribute(e, "d"), err)
		}
		all = append(all, b)
	}, func(string) {})
	return all
}

// fill returns the color of a filled area other than the background.
func fill(e xml.StartElement) (string, bool) {
	if e.Name.Local != "path" {
		return "", false
	}
	for style := range strings.SplitSeq(attribute(e, "style"), ";") {
		if color, ok := strings.CutPrefix(style, "fill:"); ok && color != "none" && color != "#FFFFFF" {
			return color, true
		}
	}
	return "", false
}

func attribute(e xml.StartElement, name string) string {
	for _, a := range e.Attr {
		if a.Name.Local == name {
			return a.Value
		}
	}
	return ""
}

func walk(t *testing.T, svg []byte, element func(xml.StartElement), text func(string)) {
	t.Helper()
	dec := xml.NewDecoder(bytes.NewReader(svg))
	for {
		token, err := dec.Token()
		switch {
		case errors.Is(err, io.EOF):
			return
		case err != nil:
			t.Fatalf("the plot is not well-formed: %v", err)
		}
		switch e := token.(type) {
		case xml.StartElement:
			element(e)
		case xml.CharData:
			text(string(e))
		}
	}
}

func TestProcessTimeCountsWork(t *testing.T) {
	before := processTime(os.Getpid())
	for deadline := time.Now().Add(10 * time.Second); processTime(os.Getpid()) < before+50*time.Millisecond; {
		if time.Now().After(deadline) {
			t.Fatal("ten seconds of work do not count")
		}
	}
	if got := processTime(-1); got != 0 {
		t.Errorf("a process that does not exist has run for %v", got)
	}
}
