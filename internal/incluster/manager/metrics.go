package manager

import (
	"slices"

	"github.com/prometheus/client_golang/prometheus"

	"kubevpn/internal/incluster/dial"
	"kubevpn/internal/incluster/manager/router"
	"kubevpn/internal/incluster/manager/session"
	"kubevpn/internal/process/metrics"
	"kubevpn/pkg/datapath/packetlink"
	"kubevpn/pkg/wire/authlistener"
)

const (
	counter      = prometheus.CounterValue
	gauge        = prometheus.GaugeValue
	metricPrefix = "kubevpn_manager"
)

var (
	metricSessions = &metrics.Metric{Name: metricPrefix + "_sessions", Type: gauge,
		Help: "Laptops that are connected now."}
	metricSent = &metrics.Metric{Name: metricPrefix + "_sent_bytes_total", Type: counter,
		Help: "Bytes to laptops, frames included."}
	metricReceived = &metrics.Metric{Name: metricPrefix + "_received_bytes_total", Type: counter,
		Help: "Bytes from laptops, frames included."}
	metricRejected = &metrics.Metric{Name: metricPrefix + "_rejected_conns_total", Type: counter,
		Labels: []string{"reason"}, Help: "Conns that the proxy port rejected."}
	metricBounds               = metrics.NewBounds(metricPrefix)
	metricBuildInfo, emitBuild = metrics.BuildInfo(metricPrefix)
)

// Metrics returns the metrics of the traffic manager.
func Metrics() []*metrics.Metric {
	return slices.Concat([]*metrics.Metric{metricBuildInfo, metricSessions, metricSent, metricReceived}, dial.Metrics(),
		router.Metrics(), []*metrics.Metric{metricRejected, metricBounds.Used, metricBounds.Limit})
}

// collector returns the Collector of the manager. Its labels have fixed values, so that neither the cluster nor laptops
// can make the number of series grow.
func (m *Manager) collector() *metrics.Collector {
	return metrics.New(Metrics(), func(emit metrics.Emit) {
		emitBuild(emit)
		sessions, total := m.sessions.Traffic()
		emit(metricSessions, float64(m.sessions.Laptops()))
		emit(metricSent, float64(total.Sent))
		emit(metricReceived, float64(total.Received))
		m.dialer.Collect(emit)
		m.router.Collect(emit)
		queued, laptops := m.router.Queued()
		metricBounds.Emit(emit, float64(queued), float64(laptops*packetlink.Streams*packetlink.DefaultLimit),
			"packet_queue_bytes")
		streams, buffered := m.budget.Used()
		metricBounds.Emit(emit, float64(sessions), maxSessions, "sessions")
		metricBounds.Emit(emit, float64(streams), maxStreams, "streams")
		metricBounds.Emit(emit, float64(buffered), maxBuffered, "buffered_bytes")
		metricBounds.EmitMemory(emit)
		if m.proxy != nil {
			metricBounds.Emit(emit, float64(m.proxy.Pending()), authlistener.MaxPending, "pending_conns")
			for _, reason := range session.ProxyReasons {
				emit(metricRejected, float64(m.proxy.Rejected(reason)), string(reason))
			}
		}
	})
}
