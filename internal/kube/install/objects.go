package install

import (
	"cmp"
	_ "embed"
	"encoding/json"
	"slices"
	"strings"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/kubernetes/scheme"
	"sigs.k8s.io/yaml"

	"kubevpn/internal/api"
	"kubevpn/internal/kube/client"
	"kubevpn/internal/process/version"
)

const (
	// DefaultNamespace is where the traffic manager lives unless the user says otherwise.
	DefaultNamespace = "kubevpn"
	// ManagerName is the name of the Deployment and of what belongs to it.
	ManagerName = "kubevpn-traffic-manager"
	// userRoleName is the Role in the manager's namespace that an admin binds to those who may connect.
	userRoleName = ManagerName + "-user"
	// containerName is the only container of the manager's pod.
	containerName = "manager"

	fieldManager = "kubevpn"

	labelName      = "app.kubernetes.io/name"
	labelComponent = "app.kubernetes.io/component"
	labelManagedBy = "app.kubernetes.io/managed-by"
	labelVersion   = "app.kubernetes.io/version"
	// labelNamespace ties cluster-wide objects to the manager's namespace.
	labelNamespace = "kubevpn/namespace"
	// annotationCreated marks a namespace that kubevpn has created, and may delete.
	annotationCreated = "kubevpn/created"
	// annotationRestarted replaces the pods when it changes.
	annotationRestarted = "kubevpn/restarted"
)

// Options configures Ensure and Manifest.
type Options struct {
	// Namespace of the traffic manager. Empty: DefaultNamespace, or FallbackNamespace if the user lacks rights there.
	Namespace         string
	FallbackNamespace string // the user's current namespace
	Image             string // reference of the traffic manager's image
	Upgrade           bool   // replace a manager that runs another image
	// Keep lets the manager stay. Else one that Ensure installs into the fallback, without rights, is temporary.
	Keep     bool
	Progress func(api.Event) // may be nil
	// Consent is the user's consent. Ensure fails with api.ExitConsent if it does not include an existing manager, or
	// an existing namespace without a manager that the user did not name. Nil: Ensure needs no consent.
	Consent *api.Consent
	// Expose is ExposeNodePort or ExposeLoadBalancer to create a Service for the transport direct, or ExposeNone to
	// remove it. Empty: nothing changes.
	Expose string
	// ExposeRanges are the networks whose hosts may use the load balancer of Expose. Empty: those of its provider.
	ExposeRanges []string
	Objects      api.Objects // what policies demand of the objects
	// APIServers are addresses ("host:port") of the API server that pods reach without kube-proxy. Ensure sets it.
	APIServers []string

	owner []metav1.OwnerReference // of what is applied; nil: nobody owns it
}

func (o Options) namespace() string { return cmp.Or(o.Namespace, DefaultNamespace) }

// namespaces returns the namespaces in which the manager can be, the preferred one first.
func (o Options) namespaces() []string {
	if o.Namespace != "" || o.FallbackNamespace == "" || o.FallbackNamespace == DefaultNamespace {
		return []string{o.namespace()}
	}
	return []string{DefaultNamespace, o.FallbackNamespace}
}

// selectorLabels find the manager's pods. They can never change: a Deployment's selector is immutable.
func selectorLabels() map[string]string {
	return map[string]string{labelName: "kubevpn", labelComponent: "traffic-manager"}
}

// labelValue converts s to a valid label value.
func labelValue(s string) string {
	s = strings.Map(func(r rune) rune {
		if r >= 'a' && r <= 'z' || r >= 'A' && r <= 'Z' || r >= '0' && r <= '9' || strings.ContainsRune("-_.", r) {
			return r
		}
		return '-'
	}, s)
	return strings.Trim(s[:min(len(s), 63)], "-_.")
}

// clusterName returns the name of the manager's cluster-wide objects. A cluster may have several managers.
func clusterName(namespace string) string { return ManagerName + "-" + namespace }

// namespaceObject returns the namespace that kubevpn creates. It enforces the "restricted" Pod Security level.
func namespaceObject(name string) *corev1.Namespace {
	labels := selectorLabels()
	labels[labelManagedBy], labels[labelVersion] = "kubevpn", labelValue(version.String())
	labels[client.PodSecurityLabel] = "restricted"
	return &corev1.Namespace{
		TypeMeta: metav1.TypeMeta{APIVersion: "v1", Kind: "Namespace"},
		ObjectMeta: metav1.ObjectMeta{Name: name, Labels: labels,
			Annotations: map[string]string{annotationCreated: "true"}},
	}
}

// baseObjects returns the objects that every manager needs, in the order of their creation.
func baseObjects(o Options) []runtime.Object { return objects(o, "ServiceAccount", "Deployment") }

// rightsObjects returns the objects that an admin adds: the manager's rights, and the Role for its users.
func rightsObjects(o Options) []runtime.Object {
	return objects(o, "ClusterRole", "ClusterRoleBinding", "Role")
}

func deployment(o Options) *appsv1.Deployment {
	return objects(o, "Deployment")[0].(*appsv1.Deployment)
}

// manifest has the objects that the Helm chart makes for the namespace "manager-namespace". `make docs` writes it.
//
//go:embed manifest.yaml
var manifest string

// objects returns the manager's objects of these kinds.
func objects(o Options, kinds ...string) []runtime.Object {
	quoted := func(s string) string { // within a string of JSON
		text, _ := json.Marshal(s)
		return string(text[1 : len(text)-1])
	}
	values := strings.NewReplacer("manager-namespace", quoted(o.namespace()), "manager-image", quoted(o.Image),
		"manager-version", labelValue(version.String()))
	var all []runtime.Object
	for _, kind := range kinds {
		for document := range strings.SplitSeq(manifest, "\n---\n") {
			if !strings.Contains(document, "\nkind: "+kind+"\n") {
				continue
			}
			text, err := yaml.YAMLToJSON([]byte(document))
			if err != nil {
				panic(err) // the file is part of the program
			}
			obj, err := runtime.Decode(scheme.Codecs.UniversalDeserializer(), []byte(values.Replace(string(text))))
			if err != nil {
				panic(err)
			}
			all = append(all, o.complete(obj))
		}
	}
	return all
}

// complete adds to an object what has no place in the manifest.
func (o Options) complete(obj runtime.Object) runtime.Object {
	switch obj := obj.(type) {
	case *appsv1.Deployment:
		if len(o.APIServers) > 0 { // without kube-proxy, pods cannot reach the API server's ClusterIP
			c := &obj.Spec.Template.Spec.Containers[0]
			c.Env = append(c.Env, corev1.EnvVar{Name: "KUBEVPN_APISERVERS",
				Value: strings.Join(slices.Sorted(slices.Values(o.APIServers)), ",")})
		}
	case *corev1.Service:
		obj.Spec.LoadBalancerSourceRanges = o.ExposeRanges
		if o.Expose == ExposeLoadBalancer {
			obj.Spec.Type = corev1.ServiceTypeLoadBalancer
		}
	}
	return obj
}
