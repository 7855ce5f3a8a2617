package clone

import (
	"log/slog"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	corev1 "k8s.io/api/core/v1"
	networkingv1 "k8s.io/api/networking/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/util/intstr"

	"kubevpn/internal/api"
)

// makes makes the clone a pod of its own.
func makes(c *Clone) {
	c.cfg.Workload, c.lease = "service/hook", madeLease
	c.cfg.Make = func(image string) (Made, error) {
		return Made{
			Template:    corev1.PodTemplateSpec{Spec: corev1.PodSpec{Containers: []corev1.Container{{Name: "agent", Image: image}}}},
			Ports:       []corev1.ServicePort{{Name: "port-80", Port: 80, TargetPort: intstr.FromString("http")}},
			Annotations: map[string]string{"note": "x"},
		}, nil
	}
}

var hook = api.CloneSpec{Name: "hook", Expose: true}

func TestMadeServiceIsLeased(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld()
		r := w.run(t, hook, makes)
		synctest.Wait()
		j := r.job(t, "hook")
		if j == nil || *j.Spec.ActiveDeadlineSeconds != 90 || j.Spec.Template.Spec.Containers[0].Image != "kubevpn:1" || j.Annotations[annotationWorkload] != "shop/service/hook" {
			t.Fatalf("%+v", j)
		}
		s, err := w.kube.CoreV1().Services("shop").Get(t.Context(), "hook", metav1.GetOptions{})
		if err != nil || len(s.OwnerReferences) != 1 || s.Annotations["note"] != "x" || s.Spec.Ports[0].TargetPort.StrVal != "http" ||
			s.Spec.Selector[labelClone] != j.Spec.Template.Labels[labelClone] {
			t.Errorf("%v, %+v", err, s)
		}
		unready := pod("hook-1", corev1.PodRunning)
		unready.Status.Conditions = nil // the laptop's program does not listen yet
		r.have(unready)
		<-r.Begun()
		if got := r.Status().Host; got != "hook.shop" {
			t.Errorf("host %q", got)
		}
		time.Sleep(5 * time.Minute)
		synctest.Wait()
		if j := r.job(t, "hook"); *j.Spec.ActiveDeadlineSeconds != 300+90 {
			t.Errorf("after five minutes the lease is %d s", *j.Spec.ActiveDeadlineSeconds)
		}
		r.end()
		if j := r.job(t, "hook"); j != nil {
			t.Errorf("left: %+v", j)
		}
	})
}

func TestMadeNeedsItsService(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newWorld(&corev1.Service{ObjectMeta: metav1.ObjectMeta{Name: "hook", Namespace: "shop"}}).run(t, hook, makes)
		r.fails(api.ExitConflict, "the namespace shop already has a Service hook that belongs to no clone")
		if j := r.job(t, "hook"); j != nil {
			t.Errorf("left: %+v", j)
		}
		r = newWorld().run(t, api.CloneSpec{Name: "8080", Expose: true}, makes)
		if err := <-r.ended; api.AsError(err).Code != api.ExitUsage {
			t.Error(err)
		}
		outside := hook
		outside.Host = "hook.example.com"
		r = newWorld().run(t, outside, makes)
		r.fails(api.ExitWorkload, "no Gateway admits routes for hook.example.com from this namespace, and the cluster has no IngressClass")
		if j := r.job(t, "hook"); j != nil {
			t.Errorf("left: %+v", j)
		}
	})
}

// gatewayOf returns a Gateway with one listener.
func gatewayOf(namespace, name, protocol, hostname, from string) *unstructured.Unstructured {
	l := map[string]any{"name": "web", "protocol": protocol}
	if hostname != "" {
		l["hostname"] = hostname
	}
	if from != "" {
		l["allowedRoutes"] = map[string]any{"namespaces": map[string]any{"from": from}}
	}
	return &unstructured.Unstructured{Object: map[string]any{
		"apiVersion": "gateway.networking.k8s.io/v1", "kind": "Gateway", "metadata": map[string]any{"namespace": namespace, "name": name},
		"spec": map[string]any{"listeners": []any{l}},
	}}
}

func TestRouteIsOfTheGatewayThatAdmitsTheHost(t *testing.T) {
	for name, tt := range map[string]struct {
		gateway *unstructured.Unstructured
		want    string
	}{
		"all":            {gatewayOf("infra", "public", "HTTPS", "*.example.com", "All"), "infra/public"},
		"any-host":       {gatewayOf("infra", "public", "HTTP", "", "All"), "infra/public"},
		"same-namespace": {gatewayOf("shop", "own", "HTTP", "hook.example.com", ""), "shop/own"},
		"others":         {gatewayOf("infra", "public", "HTTP", "", "Same"), ""},
		"selector":       {gatewayOf("infra", "public", "HTTP", "", "Selector"), ""},
		"other-host":     {gatewayOf("infra", "public", "HTTP", "*.example.org", "All"), ""},
		"tcp":            {gatewayOf("infra", "public", "TCP", "", "All"), ""},
	} {
		t.Run(name, func(t *testing.T) {
			w := newWorld(&networkingv1.IngressClass{ObjectMeta: metav1.ObjectMeta{Name: "nginx"}})
			if err := w.dynamic.Tracker().Create(gateways, tt.gateway, tt.gateway.GetNamespace()); err != nil {
				t.Fatal(err)
			}
			c := New(Config{Cluster: w, Namespace: "shop", Spec: hook, Logger: slog.New(slog.DiscardHandler)})
			own := &corev1.Service{ObjectMeta: metav1.ObjectMeta{Name: "hook", Namespace: "shop"}, Spec: corev1.ServiceSpec{Ports: []corev1.ServicePort{{Port: 80}}}}
			d, err := c.chooseRoute(t.Context(), own, "hook.example.com")
			want := "class nginx"
			if tt.want != "" {
				want = "Gateway " + tt.want
			}
			if err != nil || d.by != want || strings.HasPrefix(want, "Gateway") != (d.kind == "HTTPRoute") {
				t.Errorf("%+v, %v; want %s", d, err, want)
			}
		})
	}
}
