package podenv

import (
	"strings"

	corev1 "k8s.io/api/core/v1"
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

// resource is a limit or a request of a container of the pod: of another one than ours for files. Without a limit the kubelet
// says what the node has to give, which is not to be known without the right to read nodes: then it is 0.
func (r *Reader) resource(ref *corev1.ResourceFieldSelector) (string, error) {
	of := r.container
	for i := range r.pod.Spec.Containers {
		if c := &r.pod.Spec.Containers[i]; c.Name == ref.ContainerName {
			of = c
		}
	}
	return resource.ExtractContainerResourceValue(ref, of)
}
