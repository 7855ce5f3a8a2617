package dial

import (
	"context"
	"errors"
	"sync/atomic"

	"github.com/prometheus/client_golang/prometheus"

	"kubevpn/internal/process/metrics"
	"kubevpn/pkg/datapath/balancer"
	"kubevpn/pkg/wire/transport"
)

// codeCanceled follows the codes of transport: the laptop no longer waited for the dial.
const codeCanceled = transport.CodeFailed + 1

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
	metricDials = &metrics.Metric{Name: "kubevpn_manager_dials_total", Type: prometheus.CounterValue,
		Labels: []string{"protocol", "result"},
		Help:   "TCP connections, UDP sockets and ping sockets that flows of laptops needed."}
	metricDialing = &metrics.Metric{Name: "kubevpn_manager_dials_in_flight", Type: prometheus.GaugeValue,
		Help: "Dials that have no result yet. The limit of streams bounds them."}
	metricServices = &metrics.Metric{Name: "kubevpn_manager_balancer_services", Type: prometheus.GaugeValue,
		Help: "Services whose ClusterIPs the manager resolves."}
	metricPicks = &metrics.Metric{Name: "kubevpn_manager_balancer_picks_total", Type: prometheus.CounterValue,
		Labels: []string{"result"}, Help: "Choices of an endpoint for a flow."}
	metricRetries = &metrics.Metric{Name: "kubevpn_manager_balancer_retries_total", Type: prometheus.CounterValue,
		Help: "Dials of another endpoint, because one refused or its host was unreachable."}
)

// Metrics returns the metrics of dials.
func Metrics() []*metrics.Metric {
	return []*metrics.Metric{metricDials, metricDialing, metricServices, metricPicks, metricRetries}
}

// Collect emits the metrics of dials.
func (d *Dialer) Collect(emit metrics.Emit) {
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
	emit(metricServices, float64(d.Balancer.Len()))
}
