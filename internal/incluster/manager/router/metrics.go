package router

import (
	"github.com/prometheus/client_golang/prometheus"

	"kubevpn/internal/process/metrics"
)

var metricDropped = &metrics.Metric{Name: "kubevpn_manager_dropped_packets_total", Type: prometheus.CounterValue,
	Labels: []string{"reason"}, Help: "Packets of the system netstack that were dropped."}

// Metrics returns the metrics of packets.
func Metrics() []*metrics.Metric { return []*metrics.Metric{metricDropped} }

// Collect emits the metrics of packets.
func (r *Router) Collect(emit metrics.Emit) {
	s := r.stats()
	for reason, n := range map[string]uint64{
		"spoofed": s.spoofed, "malformed": s.malformed, "no_route": s.noRoute, "prohibited": s.prohibited,
		"device": s.unwritten, "queue_full": s.queueDrops,
	} {
		emit(metricDropped, float64(n), reason)
	}
}

// Queued returns the bytes in the queues of packet streams, and the number of laptops that have such queues.
func (r *Router) Queued() (bytes, laptops int) {
	peers := r.routes.Load().distinct()
	for p := range peers {
		bytes += p.sender.Stats().Queued
	}
	return bytes, len(peers)
}
