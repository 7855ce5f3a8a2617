package install

import (
	"context"
	"fmt"
	"net/netip"
	"slices"
	"strconv"
	"strings"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"

	"kubevpn/internal/api"
)

// directName is the name of the Service by which laptops reach the proxy port without the API server, for the transport
// direct. It exists only if an admin asks for it.
const directName = ManagerName + "-direct"

// The values of Options.Expose. Empty: an existing Service stays as it is.
const (
	ExposeNone         = "none" // removes the Service
	ExposeNodePort     = "nodeport"
	ExposeLoadBalancer = "loadbalancer"
)

// Exposures returns the values of Options.Expose.
func Exposures() []string { return []string{ExposeNodePort, ExposeLoadBalancer, ExposeNone} }

// directObjects returns the Service for Options.Expose, or none.
func directObjects(o Options) []runtime.Object {
	if o.Expose != ExposeNodePort && o.Expose != ExposeLoadBalancer {
		return nil
	}
	return objects(o, "Service")
}

// expose creates, changes or removes the Service of the transport direct, if Options.Expose asks for it.
func (e *ensurer) expose(ctx context.Context) error {
	if e.o.Expose == "" {
		return nil
	}
	if e.release != nil {
		value := e.o.Expose
		if value == ExposeNone {
			value = ""
		}
		return e.release.refuse(e.release.command("upgrade", "CHART", "--reset-then-reuse-values", "--set",
			"expose="+value))
	}
	ns, services := e.o.namespace(), e.kube.CoreV1().Services(e.o.namespace())
	if e.o.Expose == ExposeNone {
		err := services.Delete(ctx, directName, metav1.DeleteOptions{})
		if apierrors.IsNotFound(err) {
			return nil
		}
		if err != nil {
			return fmt.Errorf("deleting the Service %s/%s: %w", ns, directName, err)
		}
		e.result.Exposed = fmt.Sprintf("The Service %s/%s has been removed.", ns, directName)
		return nil
	}
	if missing := lacking(ctx, e.kube, toApply("", "services", ns)); len(missing) > 0 {
		return e.mayNot(ctx, ns, "expose it", missing)
	}
	if err := e.o.applyAll(ctx, e.kube, directObjects(e.o)); err != nil {
		return err
	}
	s, err := services.Get(ctx, directName, metav1.GetOptions{})
	if err != nil {
		return fmt.Errorf("reading the Service %s/%s back: %w", ns, directName, err)
	}
	e.result.Exposed = describeExposed(s)
	return nil
}

// describeExposed returns a sentence about the Service.
func describeExposed(s *corev1.Service) string {
	var at []string
	for _, p := range s.Spec.Ports {
		if p.NodePort != 0 {
			at = append(at, "node port "+strconv.Itoa(int(p.NodePort)))
		}
	}
	for _, i := range s.Status.LoadBalancer.Ingress {
		for _, host := range []string{i.IP, i.Hostname} {
			if host != "" {
				at = append(at, "load balancer "+host)
			}
		}
	}
	if s.Spec.Type == corev1.ServiceTypeLoadBalancer && len(s.Status.LoadBalancer.Ingress) == 0 {
		at = append(at, "a load balancer that has no address yet")
	}
	return fmt.Sprintf("The Service %s/%s exposes it: %s.", s.Namespace, s.Name, strings.Join(at, ", "))
}

// checkExpose returns an error if the value of Options.Expose is not one of Exposures, or does not fit the ranges.
func (o Options) checkExpose() error {
	for _, r := range o.ExposeRanges {
		if p, err := netip.ParsePrefix(r); err != nil || p.Masked() != p || o.Expose != ExposeLoadBalancer {
			return api.Errorf(api.ExitUsage, "--expose-source-ranges: %q is invalid: must be a network such as "+
				"203.0.113.0/24, with --expose %s", r, ExposeLoadBalancer)
		}
	}
	if o.Expose == "" || slices.Contains(Exposures(), o.Expose) {
		return nil
	}
	return api.Errorf(api.ExitUsage, "--expose: %q is invalid: must be one of %s", o.Expose,
		strings.Join(Exposures(), ", "))
}
