package podenv

import (
	"cmp"
	"fmt"
	"strings"

	corev1 "k8s.io/api/core/v1"
	quantity "k8s.io/apimachinery/pkg/api/resource"
	"k8s.io/kubectl/pkg/util/fieldpath"
	"k8s.io/kubectl/pkg/util/resource"

	"kubevpn/internal/api"
)

// field returns the value of a downward API field. Fields that only a running pod has are empty in others.
func field(pod *corev1.Pod, path string) (string, error) {
	switch path {
	case "spec.nodeName":
		return pod.Spec.NodeName, nil
	case "spec.serviceAccountName":
		return pod.Spec.ServiceAccountName, nil
	case "status.hostIP":
		return pod.Status.HostIP, nil
	case "status.hostIPs":
		ips := api.Texts(pod.Status.HostIPs, func(ip corev1.HostIP) string { return ip.IP })
		return strings.Join(ips, ","), nil
	case "status.podIP":
		return pod.Status.PodIP, nil
	case "status.podIPs":
		ips := api.Texts(pod.Status.PodIPs, func(ip corev1.PodIP) string { return ip.IP })
		return strings.Join(ips, ","), nil
	}
	return fieldpath.ExtractFieldPathAsString(pod, path)
}

// resource returns a limit or request of a container, which for files may be another one of the pod. The default of
// a limit is the pod's limit, or else what the node can allocate.
func (e *environment) resource(ref *corev1.ResourceFieldSelector) (string, error) {
	of := e.container
	if ref.ContainerName != "" {
		if of = containerOf(e.pod, ref.ContainerName); of == nil {
			return "", fmt.Errorf("the pod has no container %q", ref.ContainerName)
		}
	}
	name, isLimit := strings.CutPrefix(ref.Resource, "limits.")
	switch name := corev1.ResourceName(name); name {
	// other resources always have a limit
	case corev1.ResourceCPU, corev1.ResourceMemory, corev1.ResourceEphemeralStorage:
		if limit := of.Resources.Limits[name]; isLimit && limit.IsZero() {
			limit, err := e.defaultLimit(name)
			if err != nil {
				return "", fmt.Errorf("%s of container %s is not set: %w", ref.Resource, of.Name, err)
			}
			of = &corev1.Container{Name: of.Name,
				Resources: corev1.ResourceRequirements{Limits: corev1.ResourceList{name: limit}}}
		}
	}
	return resource.ExtractContainerResourceValue(ref, of)
}

// defaultLimit returns the limit of a container that sets none.
func (e *environment) defaultLimit(name corev1.ResourceName) (quantity.Quantity, error) {
	if r := e.pod.Spec.Resources; r != nil {
		if limit := r.Limits[name]; !limit.IsZero() {
			return limit, nil
		}
	}
	node, err := e.node(e.pod.Spec.NodeName)
	if err != nil {
		return quantity.Quantity{}, err
	}
	return node.Status.Allocatable[name], nil
}

// containerOf returns a container or init container of the pod, or nil.
func containerOf(pod *corev1.Pod, name string) *corev1.Container {
	named := func(c corev1.Container) bool { return c.Name == name }
	return cmp.Or(api.Find(pod.Spec.Containers, named), api.Find(pod.Spec.InitContainers, named))
}
