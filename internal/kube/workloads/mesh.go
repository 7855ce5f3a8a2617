package workloads

import (
	"slices"

	corev1 "k8s.io/api/core/v1"
)

// meshes are service meshes by the names of the containers that they add to pods.
var meshes = map[string]string{
	"istio-proxy": "Istio", "linkerd-proxy": "Linkerd", "kuma-sidecar": "Kuma", "consul-dataplane": "Consul",
	"osm-envoy": "Open Service Mesh",
}

// ambient is the annotation of a pod whose connections go through a proxy on its node.
const ambient = "ambient.istio.io/redirection"

// Mesh returns the service mesh of a pod, and its container that receives the connections: "" for Istio in ambient
// mode, whose proxy is on the node. Without a mesh, both are empty.
func Mesh(p *corev1.Pod) (mesh, container string) {
	for _, c := range slices.Concat(p.Spec.Containers, p.Spec.InitContainers) {
		if mesh, ok := meshes[c.Name]; ok {
			return mesh, c.Name
		}
	}
	if p.Annotations[ambient] == "enabled" {
		return "Istio in ambient mode", ""
	}
	return "", ""
}
