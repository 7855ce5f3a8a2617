package podenv

import (
	"fmt"
	"strings"

	corev1 "k8s.io/api/core/v1"
	quantity "k8s.io/apimachinery/pkg/api/resource"
	"k8s.io/kubectl/pkg/util/fieldpath"
	"k8s.io/kubectl/pkg/util/resource"
)

// field is a field of the downward API. What only a pod that runs has is empty in one that does not.
func field(pod *corev1.Pod, path string) (string, error) {
	switch path {
	case "spec.nodeName":
		return pod.Spec.NodeName, nil
	case "spec.serviceAccountName":
		return pod.Spec.ServiceAccountName, nil
	case "status.hostIP":
		return pod.Status.HostIP, nil
	case "status.hostIPs":
		var ips []string
		for _, ip := range pod.Status.HostIPs {
			ips = append(ips, ip.IP)
		}
		return strings.Join(ips, ","), nil
	case "status.podIP":
		return pod.Status.PodIP, nil
	case "status.podIPs":
		var ips []string
		for _, ip := range pod.Status.PodIPs {
			ips = append(ips, ip.IP)
		}
		return strings.Join(ips, ","), nil
	}
	return fieldpath.ExtractFieldPathAsString(pod, path)
}

// resource is a limit or a request of a container of the pod: of another one than ours for files. A limit that is not set is
// what the pod has, or else what its node has to give.
func (e *environment) resource(ref *corev1.ResourceFieldSelector) (string, error) {
	of := e.container
	if ref.ContainerName != "" {
		if of = containerOf(e.pod, ref.ContainerName); of == nil {
			return "", fmt.Errorf("the pod has no container %q", ref.ContainerName)
		}
	}
	name, isLimit := strings.CutPrefix(ref.Resource, "limits.")
	switch name := corev1.ResourceName(name); name {
	case corev1.ResourceCPU, corev1.ResourceMemory, corev1.ResourceEphemeralStorage: // others have a limit wherever they are
		if limit := of.Resources.Limits[name]; isLimit && limit.IsZero() {
			most, err := e.most(name)
			if err != nil {
				return "", fmt.Errorf("%s of container %s is not set: %w", ref.Resource, of.Name, err)
			}
			of = &corev1.Container{Name: of.Name, Resources: corev1.ResourceRequirements{Limits: corev1.ResourceList{name: most}}}
		}
	}
	return resource.ExtractContainerResourceValue(ref, of)
}

// most is what a container without a limit can have.
func (e *environment) most(name corev1.ResourceName) (quantity.Quantity, error) {
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

// containerOf is a container of the pod, also one of those that begin before the others.
func containerOf(pod *corev1.Pod, name string) *corev1.Container {
	for _, list := range [][]corev1.Container{pod.Spec.Containers, pod.Spec.InitContainers} {
		for n := range list {
			if list[n].Name == name {
				return &list[n]
			}
		}
	}
	return nil
}
