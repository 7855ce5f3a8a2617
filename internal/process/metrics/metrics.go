// Package metrics serves the metrics of a program to Prometheus. When Prometheus asks, a Collector reads counters that
// the program keeps anyway: no packet costs more.
package metrics

import (
	"fmt"
	"math"
	"runtime/debug"
	runtimemetrics "runtime/metrics"

	"github.com/prometheus/client_golang/prometheus"

	"kubevpn/internal/process/version"
)

// Metric describes one metric. Its address identifies it.
type Metric struct {
	Name   string
	Help   string // a sentence; the reference has it too
	Type   prometheus.ValueType
	Labels []string
}

// Emit receives one value of a metric, with a value for each of its labels.
type Emit func(m *Metric, value float64, labels ...string)

// Collector reads the metrics of a program. Read calls emit with each value; it may be called concurrently.
type Collector struct {
	metrics []*Metric
	descs   map[*Metric]*prometheus.Desc
	read    func(emit Emit)
}

var _ prometheus.Collector = (*Collector)(nil)

// New returns a Collector of these metrics.
func New(list []*Metric, read func(emit Emit)) *Collector {
	c := &Collector{metrics: list, descs: make(map[*Metric]*prometheus.Desc, len(list)), read: read}
	for _, m := range list {
		c.descs[m] = prometheus.NewDesc(m.Name, m.Help, m.Labels, nil)
	}
	return c
}

// Describe implements prometheus.Collector.
func (c *Collector) Describe(out chan<- *prometheus.Desc) {
	for _, m := range c.metrics {
		out <- c.descs[m]
	}
}

// Collect implements prometheus.Collector.
func (c *Collector) Collect(out chan<- prometheus.Metric) {
	c.read(func(m *Metric, value float64, labels ...string) {
		value = math.Max(value, 0) // a counter that another goroutine is about to settle can be below 0
		one, err := prometheus.NewConstMetric(c.descs[m], m.Type, value, labels...)
		if err != nil {
			one = prometheus.NewInvalidMetric(c.descs[m], fmt.Errorf("metric %s: %w", m.Name, err))
		}
		out <- one
	})
}

// BuildInfo returns the metric that contains the version of the program, and a function that emits it.
func BuildInfo(prefix string) (m *Metric, emit func(Emit)) {
	m = &Metric{prefix + "_build_info", "The version, with the value 1.", prometheus.GaugeValue, []string{"version"}}
	return m, func(emit Emit) { emit(m, 1, version.String()) }
}

// Bounds is a pair of metrics: the use of each bounded resource, and its limit.
type Bounds struct{ Used, Limit *Metric }

// NewBounds returns the Bounds of a program. labels come before the label resource.
func NewBounds(prefix string, labels ...string) Bounds {
	labels = append(labels, "resource")
	return Bounds{
		&Metric{prefix + "_resource_used", "How much of a bounded resource is in use.", prometheus.GaugeValue, labels},
		&Metric{prefix + "_resource_limit", "How much of a bounded resource may be in use.", prometheus.GaugeValue,
			labels},
	}
}

// Emit emits the use and the limit of a resource, whose name is the last label.
func (b Bounds) Emit(emit Emit, used, limit float64, labels ...string) {
	emit(b.Used, used, labels...)
	emit(b.Limit, limit, labels...)
}

// EmitMemory emits the memory that Go manages, if it has a limit (GOMEMLIMIT).
func (b Bounds) EmitMemory(emit Emit, labels ...string) {
	limit := debug.SetMemoryLimit(-1)
	if limit == math.MaxInt64 {
		return
	}
	samples := []runtimemetrics.Sample{{Name: "/memory/classes/total:bytes"},
		{Name: "/memory/classes/heap/released:bytes"}}
	runtimemetrics.Read(samples)
	used := samples[0].Value.Uint64() - samples[1].Value.Uint64()
	b.Emit(emit, float64(used), float64(limit), append(labels, "memory_bytes")...)
}
