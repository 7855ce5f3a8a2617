package daemon

import (
	"context"
	"fmt"
	"net"
	"strconv"

	"github.com/prometheus/client_golang/prometheus"

	"kubevpn/internal/api"
	"kubevpn/internal/config"
	"kubevpn/internal/laptop/connection"
	"kubevpn/internal/process/metrics"
	"kubevpn/pkg/datapath/netstack"
)

const (
	counter = prometheus.CounterValue
	gauge   = prometheus.GaugeValue

	metricPrefix = "kubevpn_daemon"
)

var (
	metricConnections = &metrics.Metric{Name: metricPrefix + "_connections", Type: gauge, Labels: []string{"status"},
		Help: "Connections of this user."}
	metricStreams = &metrics.Metric{Name: metricPrefix + "_streams", Type: gauge, Labels: []string{"connection"},
		Help: "Streams that are open in the session."}
	metricSent = &metrics.Metric{Name: metricPrefix + "_sent_bytes_total", Type: counter,
		Labels: []string{"connection", "transport"}, Help: "Bytes to the traffic manager in this session."}
	metricReceived = &metrics.Metric{Name: metricPrefix + "_received_bytes_total", Type: counter,
		Labels: []string{"connection", "transport"}, Help: "Bytes from the traffic manager in this session."}
	metricDials = &metrics.Metric{Name: metricPrefix + "_dials_total", Type: counter,
		Labels: []string{"connection", "protocol", "result"},
		Help:   "Flows that programs began in the gvisor netstack, by what the program learned."}
	metricDropped = &metrics.Metric{Name: metricPrefix + "_dropped_packets_total", Type: counter,
		Labels: []string{"connection", "reason"}, Help: "Packets and datagrams that were dropped."}
	metricQueries = &metrics.Metric{Name: metricPrefix + "_dns_queries_total", Type: counter,
		Labels: []string{"answered_by", "rcode"}, Help: "Queries of programs for names of clusters."}
	metricIntercepted = &metrics.Metric{Name: metricPrefix + "_intercepted_requests_total", Type: counter,
		Labels: []string{"connection", "namespace", "workload", "destination", "mirror"},
		Help: "HTTP requests, other connections and UDP flows that an intercept of this machine sent to its " +
			"destination: laptop or clone."}
	metricBounds               = metrics.NewBounds(metricPrefix, "connection")
	metricBuildInfo, emitBuild = metrics.BuildInfo(metricPrefix)
)

// Metrics returns the metrics of the daemon.
func Metrics() []*metrics.Metric {
	return []*metrics.Metric{metricBuildInfo, metricConnections, metricStreams, metricSent, metricReceived, metricDials,
		metricDropped, metricQueries, metricIntercepted, metricBounds.Used, metricBounds.Limit}
}

// serveMetrics serves metrics where the request asks for it, until shutDown. Of several addresses, it uses the first.
func (cs *connections) serveMetrics(req api.ConnectRequest) error {
	at := req.Setting(string(config.KeyMetricsListen)).Value
	cs.mu.Lock()
	defer cs.mu.Unlock()
	switch {
	case at == "" || cs.isolated() || cs.shut || at == cs.metricsAt:
		return nil
	case cs.metricsAt != "":
		return fmt.Errorf("metrics are served at %s until `kubevpn quit`, and not at %s", cs.metricsAt, at)
	}
	if _, err := config.ParseLoopback(at, "the metrics"); err != nil {
		return fmt.Errorf("metrics are not served: %w", err)
	}
	l, err := net.Listen("tcp", at)
	if err != nil {
		return fmt.Errorf("metrics are not served: %w; use another port", err)
	}
	ctx, stop := context.WithCancel(context.Background())
	cs.metricsAt, cs.stopMetrics = at, stop
	cs.group.Go(func() {
		own := metrics.OnlyLoopback(metrics.Handler(cs.collector()))
		if err := metrics.Serve(ctx, "metrics", l, own); err != nil {
			cs.logger.Warn("metrics are no longer served", "err", err)
		}
	})
	cs.logger.Info("serving metrics", "address", at)
	return nil
}

// collector returns the Collector of the process. Connections and intercepts are those of this user, so the user alone
// makes the number of series grow.
func (cs *connections) collector() *metrics.Collector {
	return metrics.New(Metrics(), func(emit metrics.Emit) {
		emitBuild(emit)
		states := map[api.ConnectionStatus]int{api.StatusConnecting: 0, api.StatusConnected: 0,
			api.StatusReconnecting: 0, api.StatusDisconnecting: 0, api.StatusFailed: 0}
		for _, c := range cs.status() {
			states[c.Status]++
			for _, t := range c.Transports {
				emit(metricSent, float64(t.Sent), c.ID, t.Name)
				emit(metricReceived, float64(t.Received), c.ID, t.Name)
			}
		}
		for state, n := range states {
			emit(metricConnections, float64(n), string(state))
		}
		for id, c := range cs.working() {
			counters := c.Counters()
			collectConnection(emit, id, &counters)
		}
		for result, n := range cs.queries.results() {
			emit(metricQueries, float64(n), result.from, result.rcode)
		}
		cs.collectResolver(emit)
		for _, i := range cs.intercepts.status() {
			destination := api.ToLaptop
			if i.Clone != nil {
				destination = api.ToClone
			}
			emit(metricIntercepted, float64(i.Requests), i.Connection, i.Namespace, i.Workload, destination,
				strconv.FormatBool(i.Mirror))
		}
		metricBounds.EmitMemory(emit, "")
	})
}

// collectResolver emits the queries in flight.
func (cs *connections) collectResolver(emit metrics.Emit) {
	cs.mu.Lock()
	host := cs.host
	cs.mu.Unlock()
	if host == nil {
		return
	}
	inside, outside, limit := host.resolver.InFlight()
	metricBounds.Emit(emit, float64(inside), float64(limit), "", "dns_queries_to_clusters")
	metricBounds.Emit(emit, float64(outside), float64(limit), "", "dns_queries_to_nameservers")
}

func collectConnection(emit metrics.Emit, id string, c *connection.Counters) {
	emit(metricStreams, float64(c.Streams), id)
	for reason, n := range c.Dropped {
		emit(metricDropped, float64(n), id, reason)
	}
	s := &c.Netstack
	emit(metricDropped, float64(s.Malformed), id, "malformed")
	emit(metricDropped, float64(s.WriteErrors), id, "device")
	for protocol, f := range map[string]netstack.FlowStats{"tcp": s.TCP, "udp": s.UDP, "echo": s.Echo} {
		emit(metricDropped, float64(f.Dropped), id, protocol+"_limit")
		for result, n := range map[string]uint64{
			"connected": f.Total, "refused": f.Refused, "unreachable": f.Unreachable, "silent": f.Silent,
		} {
			emit(metricDials, float64(n), id, protocol, result)
		}
	}
	for resource, use := range map[string]netstack.Use{
		"tcp_flows": s.TCPFlows, "tcp_dials": s.HeldSYNs, "datagram_flows": s.DatagramFlows,
		"datagram_queue_bytes": s.QueuedBytes, "packet_queue_bytes": c.PacketQueue, "dns_cache": c.DNSCache,
		"hosts": c.Hosts,
	} {
		metricBounds.Emit(emit, float64(use.Used), float64(use.Limit), id, resource)
	}
}
