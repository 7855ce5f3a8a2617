//go:build unix

package cli

import (
	"encoding/json"
	"fmt"
	"net/http"
	"strings"

	appsv1 "k8s.io/api/apps/v1"
	batchv1 "k8s.io/api/batch/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"kubevpn/internal/api"
)

// fakeList answers the lists of the namespaces default, strict and empty. In strict, the user may list Deployments only.
// It reports whether the request is a list.
func fakeList(w http.ResponseWriter, r *http.Request) bool {
	_, rest, found := strings.Cut(r.URL.Path, "/namespaces/")
	namespace, resource, _ := strings.Cut(rest, "/")
	if r.URL.Path == "/apis/batch/v1/jobs" {
		namespace, resource, found = "default", "jobs", true
	}
	strict := namespace == "strict"
	if !found || namespace != "default" && namespace != "empty" && !strict || r.Method != http.MethodGet {
		return false
	}
	w.Header().Set("Content-Type", "application/json")
	if strict && resource != "deployments" {
		w.WriteHeader(http.StatusForbidden)
		message := fmt.Sprintf(`User "ann" cannot list resource "%s" in API group "" in the namespace "strict"`, resource)
		json.NewEncoder(w).Encode(metav1.Status{TypeMeta: metav1.TypeMeta{Kind: "Status", APIVersion: "v1"}, Status: "Failure",
			Reason: metav1.StatusReasonForbidden, Code: http.StatusForbidden, Message: message})
		return true
	}
	web := map[string]string{"app": "web"}
	meta := metav1.ObjectMeta{Namespace: namespace, Name: "web", Labels: web}
	object := any(map[string]any{"kind": "List", "items": []any{}})
	if namespace == "empty" {
		resource = "none"
	}
	switch resource {
	case "":
		object = corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: namespace}}
	case "deployments":
		object = appsv1.DeploymentList{Items: []appsv1.Deployment{{ObjectMeta: meta, Spec: appsv1.DeploymentSpec{
			Selector: &metav1.LabelSelector{MatchLabels: web},
			Template: corev1.PodTemplateSpec{ObjectMeta: metav1.ObjectMeta{Labels: web},
				Spec: corev1.PodSpec{Containers: []corev1.Container{{Name: "app", Ports: []corev1.ContainerPort{{ContainerPort: 8080}}}}}}}}}}
	case "statefulsets":
		meta.Name = "d\x1b[2Jb"
		object = appsv1.StatefulSetList{Items: []appsv1.StatefulSet{{ObjectMeta: meta, Spec: appsv1.StatefulSetSpec{
			Selector: &metav1.LabelSelector{MatchLabels: map[string]string{"app": "db"}}}}}}
	case "services":
		object = corev1.ServiceList{Items: []corev1.Service{{ObjectMeta: meta, Spec: corev1.ServiceSpec{Selector: web,
			Ports: []corev1.ServicePort{{Port: 8080, Protocol: corev1.ProtocolTCP}}}}, {ObjectMeta: metav1.ObjectMeta{Namespace: namespace,
			Name: "dns"}, Spec: corev1.ServiceSpec{Ports: []corev1.ServicePort{{Port: 443, Protocol: corev1.ProtocolTCP}, {Port: 53, Protocol: corev1.ProtocolUDP}}}}}}
	case "pods":
		pod := corev1.Pod{ObjectMeta: meta}
		pod.OwnerReferences = []metav1.OwnerReference{{Kind: "ReplicaSet", Name: "web-1", Controller: new(true)}}
		pod.Spec.EphemeralContainers = []corev1.EphemeralContainer{{EphemeralContainerCommon: corev1.EphemeralContainerCommon{
			Name: api.AgentPrefix + "1", Env: []corev1.EnvVar{{Name: api.AgentNameVariable, Value: "bob@\x1b[31m\u202edesk"}}}}}
		object = corev1.PodList{Items: []corev1.Pod{pod}}
	case "jobs":
		object = batchv1.JobList{Items: []batchv1.Job{{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "web-ann",
			Annotations: map[string]string{"kubevpn.dev/workload": "default/deployment/web", "kubevpn.dev/owner": "ann@laptop"}}}}}
	}
	json.NewEncoder(w).Encode(object)
	return true
}
