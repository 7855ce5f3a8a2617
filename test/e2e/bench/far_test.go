//go:build linux

package main

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"kubevpn/test/lab"
)

func TestFarTablesHaveALineForEachMeasurement(t *testing.T) {
	line := farLine{lab.Line{RTT: 60 * time.Millisecond, Rate: 100e6, Loss: 0.001}, bbr}
	other := farLine{lab.Line{RTT: 40 * time.Millisecond, Rate: 200e6, Loss: 0.05, Burst: 5}, cubic}
	r := &farReport{report: newReport(machine{"2026-01-02", "Abacus 3000", 2, 25.3e9, "6.1.0"}, 4*time.Second),
		lines: []farLine{line, other}, rounds: 1, commit: "abc1234-dirty"}
	for i, m := range farMeasurements {
		for j, p := range farPaths {
			r.add(onLine(line, m.row), p, float64(10*(i+1)+j))
			if other.takes(m, p) {
				r.add(onLine(other, m.row), p, float64(10*(i+1)+j))
			}
		}
	}
	r.add(onLine(other, besideTail), kernel, 300.4)
	r.add(roundTripsRow, all, 9.4)
	tables := r.render()
	for _, want := range []string{
		"takes 9.4 round trips",
		"\n60ms, 100 Mb/s, 0.1 % loss, BBR:\n",
		"| the same beside 2 downloads (ms) | 50.0 | 51.0 | 52.0 |\n",
		"at commit abc1234-dirty",
		"\n| 40ms, 200 Mb/s, 5 % in bursts of 5, CUBIC | 10.0; 12.0 | 20.0; 22.0 | 30.0; 32.0 | 50; 52 | 300; – |\n",
	} {
		if !strings.Contains(tables, want) {
			t.Errorf("%q is missing in\n%s", want, tables)
		}
	}
	file := filepath.Join(t.TempDir(), "figures.md")
	if err := os.WriteFile(file, []byte(farBegin+farEnd), 0o644); err != nil {
		t.Fatal(err)
	}
	if err := r.write(file); err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{"far-throughput.svg", "far-latency.svg"} {
		if _, err := os.Stat(filepath.Join(filepath.Dir(file), "figures", name)); err != nil {
			t.Error(err)
		}
	}
}
