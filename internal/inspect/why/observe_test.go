package why

import (
	"context"
	"errors"
	"io"
	"net/http"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"

	"kubevpn/internal/api"
	"kubevpn/internal/inspect/why/trip"
)

// silentAPI is an API server that answers only requests whose path has an answer.
type silentAPI map[string]string

func (s silentAPI) RoundTrip(r *http.Request) (*http.Response, error) {
	if text, ok := s[r.URL.Path]; ok {
		return &http.Response{StatusCode: http.StatusOK, Header: http.Header{"Content-Type": {"application/json"}},
			Body: io.NopCloser(strings.NewReader(text)), Request: r}, nil
	}
	<-r.Context().Done()
	return nil, r.Context().Err()
}

const (
	serviceWeb = `{"apiVersion": "v1", "kind": "Service", "metadata": {"name": "web", "namespace": "shop"},
		"spec": {"clusterIP": "10.96.0.80", "clusterIPs": ["10.96.0.80"], "selector": {"app": "web"}, "ports": [{"port": 80}]}}`
	slicesOfWeb = `{"apiVersion": "discovery.k8s.io/v1", "kind": "EndpointSliceList", "items": [{"ports": [{"port": 8080}],
		"endpoints": [{"addresses": ["10.244.1.7"], "conditions": {"ready": true}}]}]}`
)

// TestExplanationComesInTimeWhateverHangs proves the bound by construction: the clock is synctest's, and moves only
// while everything waits.
func TestExplanationComesInTimeWhateverHangs(t *testing.T) {
	for name, tt := range map[string]struct {
		api     silentAPI
		fromPod bool
		code    api.ExitCode
		skipped []string
	}{
		"everything": {code: api.ExitNameMissing,
			skipped: []string{"route", "balancer", "policy", "dial", "agent", "program", "answer"}},
		"everything, from a pod": {fromPod: true, code: api.ExitUnexpected,
			skipped: []string{"connection", "name", "route", "balancer", "policy", "dial", "agent", "program", "answer"}},
		"what comes after the Service": {code: api.ExitNameMissing, api: silentAPI{"/api/v1/namespaces/shop/services/web": serviceWeb},
			skipped: []string{"route", "balancer", "policy", "dial", "agent", "program", "answer"}},
		"what comes after the endpoints, from a pod": {fromPod: true, code: api.ExitUnexpected, api: silentAPI{
			"/api/v1/namespaces/shop/services/web": serviceWeb, "/apis/discovery.k8s.io/v1/namespaces/shop/endpointslices": slicesOfWeb},
			skipped: []string{"connection", "name", "route", "policy", "dial", "agent", "program", "answer"}},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				o := newObserver(hanging(t, tt.api))
				o.here = func(ctx context.Context, e trip.Errand) (trip.Report, error) {
					<-ctx.Done()
					r := trip.Report{Result: trip.Result{Lookup: silence}, Dials: map[netip.AddrPort]trip.Step{}}
					for _, to := range e.Dial {
						r.Dials[to] = silence
					}
					return r, nil
				}
				o.lookup = func(ctx context.Context, _, _ string) ([]netip.Addr, []string, trip.Step) {
					<-ctx.Done()
					return nil, nil, silence
				}
				if tt.fromPod {
					o.Pod = &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Name: "other-1", Namespace: "other"}}
					o.Source = o.Pod
					o.Run = func(ctx context.Context, _ trip.Errand) (trip.Report, error) {
						<-ctx.Done()
						return trip.Report{}, errors.New("no answer in time")
					}
				}
				began := time.Now()
				e := o.explain(t.Context())
				if took := time.Since(began); took > Timeout {
					t.Errorf("it took %v", took)
				}
				var skipped []string
				for _, h := range e.Findings {
					if h.Verdict == api.VerdictSkipped {
						skipped = append(skipped, h.Name)
					}
				}
				if !slices.Equal(skipped, tt.skipped) || e.Failed() == nil || e.Failed().Code != tt.code {
					t.Errorf("skipped are %v\n%s", skipped, describe(e))
				}
			})
		})
	}
}

// dualStack is an API server with the Service web and the pod web-1, which have two addresses each. As a real one, it
// selects by the first address only. It has no other objects.
type dualStack struct{}

func (dualStack) RoundTrip(r *http.Request) (*http.Response, error) {
	selector, text := r.URL.Query().Get("fieldSelector"), `{"kind": "List", "apiVersion": "v1", "items": []}`
	switch r.URL.Path {
	case "/api/v1/services":
		if text = `{"kind": "ServiceList", "apiVersion": "v1", "items": []}`; selector == "" || selector == "spec.clusterIP=10.96.0.80" {
			text = `{"kind": "ServiceList", "apiVersion": "v1", "items": [{"metadata": {"name": "web", "namespace": "shop"},
				"spec": {"clusterIP": "10.96.0.80", "clusterIPs": ["10.96.0.80", "fd00:96::80"]}}]}`
		}
	case "/api/v1/pods":
		if text = `{"kind": "PodList", "apiVersion": "v1", "items": []}`; selector == "" || selector == "status.podIP=10.244.1.7" {
			text = `{"kind": "PodList", "apiVersion": "v1", "items": [
				{"metadata": {"name": "web-1", "namespace": "shop"}, "status": {"phase": "Running", "podIP": "10.244.1.7", "podIPs": [{"ip": "10.244.1.7"}, {"ip": "fd00:244::7"}]}},
				{"metadata": {"name": "old-1", "namespace": "shop"}, "status": {"phase": "Failed", "podIP": "10.244.1.7", "podIPs": [{"ip": "10.244.1.7"}, {"ip": "fd00:244::7"}]}},
				{"metadata": {"name": "node-1", "namespace": "shop"}, "spec": {"hostNetwork": true}, "status": {"phase": "Running", "podIP": "192.0.2.1", "podIPs": [{"ip": "192.0.2.1"}]}}]}`
		}
	}
	return &http.Response{StatusCode: http.StatusOK, Header: http.Header{"Content-Type": {"application/json"}},
		Body: io.NopCloser(strings.NewReader(text)), Request: r}, nil
}

func TestEachAddressOfAServiceOrPodIsFound(t *testing.T) {
	for address, want := range map[string]string{
		"10.96.0.80": "Service web", "fd00:96::80": "Service web", "10.244.1.7": "pod web-1", "fd00:244::7": "pod web-1", "192.0.2.1": "", "203.0.113.1": "",
	} {
		cfg := hanging(t, nil)
		kube, err := kubernetes.NewForConfigAndClient(&rest.Config{Host: "http://cluster.example", QPS: -1}, &http.Client{Transport: dualStack{}})
		if err != nil {
			t.Fatal(err)
		}
		cfg.Kube = kube
		o := newObserver(cfg)
		o.readAddress(t.Context(), netip.MustParseAddr(address))
		got := ""
		if f := &o.facts; f.Service != nil {
			got = "Service " + f.Service.Name
		} else if len(f.Pods) == 1 {
			got = "pod " + f.Pods[0].Name
		}
		if got != want || len(o.facts.Missing) > 0 {
			t.Errorf("%s is %q, want %q; missing: %v", address, got, want, o.facts.Missing)
		}
	}
}

// hanging returns a Config whose agents do not answer, and whose API server answers only what it is given.
func hanging(t *testing.T, answers silentAPI) Config {
	t.Helper()
	kube, err := kubernetes.NewForConfigAndClient(&rest.Config{Host: "http://cluster.example", QPS: -1},
		&http.Client{Transport: answers})
	if err != nil {
		t.Fatal(err)
	}
	request, err := http.NewRequest(http.MethodGet, "http://web.shop/", http.NoBody)
	if err != nil {
		t.Fatal(err)
	}
	return Config{
		Kube: kube, Timeout: Timeout, Request: request,
		Connection: api.Connection{ManagerNamespace: "kubevpn", ManagerPod: "manager", Device: "kubevpn0",
			DNS: api.DNSStatus{Domain: "cluster.local", Servers: []netip.Addr{netip.MustParseAddr("10.244.0.2")}}},
		Trace: func(ctx context.Context) ([]api.InterceptTrace, error) {
			<-ctx.Done()
			return nil, ctx.Err()
		},
	}
}
