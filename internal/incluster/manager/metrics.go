package manager

import (
	"context"
	"errors"
	"sync/atomic"

	"github.com/prometheus/client_golang/prometheus"

	"kubevpn/internal/process/metrics"
	"kubevpn/pkg/datapath/balancer"
	"kubevpn/pkg/datapath/packetlink"
	"kubevpn/pkg/wire/authlistener"
	"kubevpn/pkg/wire/transport"
)

const (
	counter = prometheus.CounterValue
	gauge   = prometheus.GaugeValue

	// codeCanceled follows the codes of transport: the laptop no longer waited for the dial.
	codeCanceled = transport.CodeFailed + 1
	metricPrefix = "kubevpn_manager"
)

// dialResults are the values of the label result, by code.
var dialResults = [codeCanceled + 1]string{
	transport.CodeOK: "connected", transport.CodeRefused: "refused",
	transport.CodeHostUnreachable: "host_unreachable", transport.CodeNetUnreachable: "net_unreachable",
	transport.CodeTimeout: "timeout", transport.CodeProhibited: "prohibited", transport.CodeFailed: "failed",
	codeCanceled: "canceled",
}

// pickResults are the values of the label result, by verdict.
var pickResults = [...]string{
	balancer.NotService: "not_a_service", balancer.Chosen: "endpoint", balancer.Refused: "no_endpoint",
	balancer.Dropped: "no_local_endpoint",
}

// dialCounts counts dials and the choices of endpoints. The zero dialCounts is ready to use.
type dialCounts struct {
	inFlight       atomic.Int64
	tcp, udp, echo [codeCanceled + 1]atomic.Uint64
	picks          [len(pickResults)]atomic.Uint64
	retries        atomic.Uint64 // another endpoint, because one refused or its host was gone
}

// began counts a dial that begins. The caller calls ended with its result.
func (c *dialCounts) began(p transport.Proto) (ended func(error)) {
	c.inFlight.Add(1)
	return func(err error) {
		c.inFlight.Add(-1)
		code := min(transport.CodeOf(err), transport.CodeFailed)
		if errors.Is(err, context.Canceled) {
			code = codeCanceled
		}
		c.of(p)[code].Add(1)
	}
}

// of returns the counts of a protocol.
func (c *dialCounts) of(p transport.Proto) *[codeCanceled + 1]atomic.Uint64 {
	switch p {
	case transport.ProtoTCP:
		return &c.tcp
	case transport.ProtoUDP:
		return &c.udp
	}
	return &c.echo
}

var (
	metricSessions = &metrics.Metric{Name: metricPrefix + "_sessions", Type: gauge,
		Help: "Laptops that are connected now."}
	metricSent = &metrics.Metric{Name: metricPrefix + "_sent_bytes_total", Type: counter,
		Help: "Bytes to laptops, frames included."}
	metricReceived = &metrics.Metric{Name: metricPrefix + "_received_bytes_total", Type: counter,
		Help: "Bytes from laptops, frames included."}
	metricDials = &metrics.Metric{Name: metricPrefix + "_dials_total", Type: counter,
		Labels: []string{"protocol", "result"},
		Help:   "TCP connections, UDP sockets and ping sockets that flows of laptops needed."}
	metricDialing = &metrics.Metric{Name: metricPrefix + "_dials_in_flight", Type: gauge,
		Help: "Dials that have no result yet. The limit of streams bounds them."}
	metricServices = &metrics.Metric{Name: metricPrefix + "_balancer_services", Type: gauge,
		Help: "Services whose ClusterIPs the manager resolves."}
	metricPicks = &metrics.Metric{Name: metricPrefix + "_balancer_picks_total", Type: counter,
		Labels: []string{"result"}, Help: "Choices of an endpoint for a flow."}
	metricRetries = &metrics.Metric{Name: metricPrefix + "_balancer_retries_total", Type: counter,
		Help: "Dials of another endpoint, because one refused or its host was unreachable."}
	metricDropped = &metrics.Metric{Name: metricPrefix + "_dropped_packets_total", Type: counter,
		Labels: []string{"reason"}, Help: "Packets of the system netstack that were dropped."}
	metricRejected = &metrics.Metric{Name: metricPrefix + "_rejected_conns_total", Type: counter,
		Labels: []string{"reason"}, Help: "Conns that the proxy port rejected."}
	metricBounds               = metrics.NewBounds(metricPrefix)
	metricBuildInfo, emitBuild = metrics.BuildInfo(metricPrefix)
)

// Metrics returns the metrics of the traffic manager.
func Metrics() []*metrics.Metric {
	return []*metrics.Metric{metricBuildInfo, metricSessions, metricSent, metricReceived, metricDials, metricDialing,
		metricServices, metricPicks, metricRetries, metricDropped, metricRejected, metricBounds.Used,
		metricBounds.Limit}
}

// collector returns the Collector of the manager. Its labels have fixed values, so that neither the cluster nor laptops
// can make the number of series grow.
func (m *Manager) collector() *metrics.Collector {
	return metrics.New(Metrics(), func(emit metrics.Emit) {
		emitBuild(emit)
		sessions, total := m.publisher.traffic()
		emit(metricSessions, float64(m.publisher.laptops()))
		emit(metricSent, float64(total.Sent))
		emit(metricReceived, float64(total.Received))
		m.dialer.collect(emit)
		m.router.collect(emit)
		streams, buffered := m.budget.Used()
		metricBounds.Emit(emit, float64(sessions), maxSessions, "sessions")
		metricBounds.Emit(emit, float64(streams), maxStreams, "streams")
		metricBounds.Emit(emit, float64(buffered), maxBuffered, "buffered_bytes")
		metricBounds.EmitMemory(emit)
		if m.proxy != nil {
			metricBounds.Emit(emit, float64(m.proxy.Pending()), authlistener.MaxPending, "pending_conns")
			for _, reason := range proxyReasons {
				emit(metricRejected, float64(m.proxy.Rejected(reason)), string(reason))
			}
		}
	})
}

func (d *dialer) collect(emit metrics.Emit) {
	c := &d.counts
	emit(metricDialing, float64(c.inFlight.Load()))
	for _, p := range []transport.Proto{transport.ProtoTCP, transport.ProtoUDP, transport.ProtoEcho} {
		for code, result := range dialResults {
			emit(metricDials, float64(c.of(p)[code].Load()), p.String(), result)
		}
	}
	for verdict, result := range pickResults {
		emit(metricPicks, float64(c.picks[verdict].Load()), result)
	}
	emit(metricRetries, float64(c.retries.Load()))
	emit(metricServices, float64(d.balancer.Len()))
}

func (r *router) collect(emit metrics.Emit) {
	s := r.stats()
	for reason, n := range map[string]uint64{
		"spoofed": s.spoofed, "malformed": s.malformed, "no_route": s.noRoute, "prohibited": s.prohibited,
		"device": s.unwritten, "queue_full": s.queueDrops,
	} {
		emit(metricDropped, float64(n), reason)
	}
	queued, laptops := r.queued()
	metricBounds.Emit(emit, float64(queued), float64(laptops*packetlink.Streams*packetlink.DefaultLimit),
		"packet_queue_bytes")
}

// queued returns the bytes in the queues of packet streams, and the number of laptops that have such queues.
func (r *router) queued() (bytes, laptops int) {
	peers := r.routes.Load().distinct()
	for p := range peers {
		bytes += p.sender.Stats().Queued
	}
	return bytes, len(peers)
}
