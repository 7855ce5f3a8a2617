package clone

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"strings"

	batchv1 "k8s.io/api/batch/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/intstr"
	"k8s.io/apimachinery/pkg/util/validation"

	"kubevpn/internal/api"
	"kubevpn/internal/kube/client"
	"kubevpn/internal/kube/workloads"
	"kubevpn/pkg/wakeup"
)

// noService is the reason for which a clone has no Service; empty if it has one. This is no error: the addresses of
// the pods work.
type noService string

// service returns the Service of the clone. It has the ports of the Services of the workload and of its pods, so that
// http://web-ann works like http://web. Without ports it is headless: its name resolves to the pods.
func service(job *batchv1.Job, ports []workloads.Port) *corev1.Service {
	s := &corev1.Service{
		ObjectMeta: metav1.ObjectMeta{Name: job.Name, Namespace: job.Namespace, Labels: job.Labels,
			Annotations: job.Annotations},
		Spec: corev1.ServiceSpec{Selector: map[string]string{labelClone: job.Name},
			IPFamilyPolicy: new(corev1.IPFamilyPolicyPreferDualStack)},
	}
	add := func(p workloads.Port, port int32, name string) {
		protocol := corev1.Protocol(strings.ToUpper(p.Protocol))
		taken := func(o corev1.ServicePort) bool { return o.Port == port && o.Protocol == protocol }
		if slices.ContainsFunc(s.Spec.Ports, taken) {
			return
		}
		if name == "" || slices.ContainsFunc(s.Spec.Ports, func(o corev1.ServicePort) bool { return o.Name == name }) {
			name = fmt.Sprintf("%s-%d", p.Protocol, port)
		}
		s.Spec.Ports = append(s.Spec.Ports,
			corev1.ServicePort{Name: name, Protocol: protocol, Port: port, TargetPort: intstr.FromInt32(int32(p.Port))})
	}
	for _, p := range ports { // a Service's port wins over a pod's port of the same number
		for _, of := range p.Services {
			add(p, of.Port, of.Name)
		}
	}
	for _, p := range ports {
		add(p, int32(p.Port), p.Name)
	}
	slices.SortFunc(s.Spec.Ports, func(a, b corev1.ServicePort) int {
		return cmp.Or(cmp.Compare(a.Port, b.Port), cmp.Compare(a.Protocol, b.Protocol))
	})
	if len(s.Spec.Ports) == 0 {
		s.Spec.ClusterIP = corev1.ClusterIPNone
	}
	return s
}

// hostPorts returns the ports of a Service for the status.
func hostPorts(s *corev1.Service) []api.ClonePort {
	var all []api.ClonePort
	for _, p := range s.Spec.Ports {
		all = append(all, api.ClonePort{Protocol: strings.ToLower(string(p.Protocol)), Port: uint16(p.Port),
			Target: uint16(p.TargetPort.IntVal)})
	}
	return all
}

func ownerReference(job *batchv1.Job) metav1.OwnerReference {
	return metav1.OwnerReference{APIVersion: batchv1.SchemeGroupVersion.String(), Kind: "Job", Name: job.Name,
		UID: job.UID}
}

// name creates the Service of the clone. The Job owns it, so Kubernetes deletes it with the Job.
func (c *Clone) name(ctx context.Context, s *corev1.Service, owner *batchv1.Job) (noService, error) {
	if errs := validation.IsDNS1035Label(s.Name); len(errs) > 0 {
		return noService("its name is not valid for a Service: " + strings.Join(errs, "; ")), nil
	}
	s.OwnerReferences = []metav1.OwnerReference{ownerReference(owner)}
	services := c.kube.CoreV1().Services(s.Namespace)
	// given turns a missing permission, a quota or a policy into a reason.
	given := func(verb string, err error) (noService, error) {
		if _, _, denied := client.Denial(err); denied {
			return noService("you may not " + verb + " Services in the namespace " + s.Namespace), nil
		} else if apierrors.IsForbidden(err) {
			return noService("the cluster does not admit its Service: " + api.CleanLine(err.Error())), nil
		}
		return "", err
	}
	for {
		_, err := services.Create(ctx, s, metav1.CreateOptions{})
		if !apierrors.IsAlreadyExists(err) {
			return given("create", err)
		}
		// The Service of an earlier Job of the same name is not garbage collected yet. It keeps its address.
		there, err := services.Get(ctx, s.Name, metav1.GetOptions{})
		if apierrors.IsNotFound(err) {
			continue
		}
		if err != nil {
			return given("get", err)
		}
		_, otherName := c.advice()
		if there.Labels[labelManagedBy] != managedBy || there.Labels[labelClone] != s.Name {
			return "", api.Errorf(api.ExitConflict,
				"the namespace %s already has a Service %s that belongs to no clone", s.Namespace, s.Name).
				WithHint("%s", otherName)
		}
		there.OwnerReferences, there.Annotations, there.Spec.Ports = s.OwnerReferences, s.Annotations, s.Spec.Ports
		_, err = services.Update(ctx, there, metav1.UpdateOptions{})
		if !apierrors.IsConflict(err) && !apierrors.IsNotFound(err) {
			return given("update", err)
		}
		if !wakeup.Pause(ctx, conflictPause) {
			return "", ctx.Err()
		}
	}
}
