package install

import (
	"cmp"
	"slices"
	"strings"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/util/intstr"

	"kubevpn/internal/api"
	"kubevpn/internal/cluster"
	"kubevpn/internal/version"
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

	// nonroot is the user of the manager's container. Any but 0 works.
	nonroot = 65532
)

// Options configures Ensure and Manifest.
type Options struct {
	// Namespace of the traffic manager. Empty: DefaultNamespace, or FallbackNamespace if the user lacks rights there.
	Namespace         string
	FallbackNamespace string          // the user's current namespace
	Image             string          // reference of the traffic manager's image
	Upgrade           bool            // replace a manager that runs another image
	Progress          func(api.Event) // may be nil
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
}

func (o Options) namespace() string { return cmp.Or(o.Namespace, DefaultNamespace) }

// namespaces returns the namespaces in which the manager can be, the preferred one first.
func (o Options) namespaces() []string {
	if o.Namespace != "" || o.FallbackNamespace == "" || o.FallbackNamespace == DefaultNamespace {
		return []string{o.namespace()}
	}
	return []string{DefaultNamespace, o.FallbackNamespace}
}

func (o Options) tell(step, format string, args ...any) {
	if o.Progress != nil {
		o.Progress(event(step, format, args...))
	}
}

// selectorLabels find the manager's pods. They can never change: a Deployment's selector is immutable.
func selectorLabels() map[string]string {
	return map[string]string{labelName: "kubevpn", labelComponent: "traffic-manager"}
}

func labels() map[string]string {
	m := selectorLabels()
	m[labelManagedBy] = "kubevpn"
	m[labelVersion] = labelValue(version.String())
	return m
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

func meta(namespace, name string) metav1.ObjectMeta {
	return metav1.ObjectMeta{Namespace: namespace, Name: name, Labels: labels()}
}

// clusterName returns the name of the manager's cluster-wide objects. A cluster may have several managers.
func clusterName(namespace string) string { return ManagerName + "-" + namespace }

func clusterMeta(namespace string) metav1.ObjectMeta {
	m := meta("", clusterName(namespace))
	m.Labels[labelNamespace] = namespace
	return m
}

// namespaceObject returns the namespace that kubevpn creates. It enforces the "restricted" Pod Security level.
func namespaceObject(name string) *corev1.Namespace {
	m := meta("", name)
	m.Labels[cluster.PodSecurityLabel] = "restricted"
	m.Annotations = map[string]string{annotationCreated: "true"}
	return &corev1.Namespace{TypeMeta: typeMeta("v1", "Namespace"), ObjectMeta: m}
}

// baseObjects returns the objects that every manager needs, in the order of their creation.
func baseObjects(o Options) []runtime.Object {
	return []runtime.Object{serviceAccount(o.namespace()), deployment(o)}
}

// rightsObjects returns the objects that an admin adds: the manager's rights, and the Role for its users.
func rightsObjects(o Options) []runtime.Object {
	ns := o.namespace()
	return []runtime.Object{clusterRole(ns), clusterRoleBinding(ns), userRole(ns)}
}

func serviceAccount(namespace string) *corev1.ServiceAccount {
	return &corev1.ServiceAccount{
		TypeMeta:                     typeMeta("v1", "ServiceAccount"),
		ObjectMeta:                   meta(namespace, ManagerName),
		AutomountServiceAccountToken: new(false), // the manager's pod sets it to true
	}
}

// clusterRole contains all rights of the manager: to see Services and their endpoints, Nodes and ServiceCIDRs for the
// cluster's networks, and the pod of an endpoint.
func clusterRole(namespace string) *rbacv1.ClusterRole {
	read := []string{"list", "watch"}
	return &rbacv1.ClusterRole{
		TypeMeta:   typeMeta("rbac.authorization.k8s.io/v1", "ClusterRole"),
		ObjectMeta: clusterMeta(namespace),
		Rules: []rbacv1.PolicyRule{
			{APIGroups: []string{""}, Resources: []string{"services", "nodes"}, Verbs: read},
			{APIGroups: []string{""}, Resources: []string{"pods"}, Verbs: []string{"get"}},
			{APIGroups: []string{"discovery.k8s.io"}, Resources: []string{"endpointslices"}, Verbs: read},
			{APIGroups: []string{"networking.k8s.io"}, Resources: []string{"servicecidrs"}, Verbs: read},
		},
	}
}

func clusterRoleBinding(namespace string) *rbacv1.ClusterRoleBinding {
	return &rbacv1.ClusterRoleBinding{
		TypeMeta:   typeMeta("rbac.authorization.k8s.io/v1", "ClusterRoleBinding"),
		ObjectMeta: clusterMeta(namespace),
		RoleRef:    rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "ClusterRole", Name: clusterName(namespace)},
		Subjects:   []rbacv1.Subject{{Kind: rbacv1.ServiceAccountKind, Namespace: namespace, Name: ManagerName}},
	}
}

// userRole contains the rights of a laptop in the manager's namespace. WebSocket port-forwards require get before
// Kubernetes 1.35, and create since. The transport api-proxy uses pods/proxy, which reaches less of a pod than a
// port-forward. The laptop identifies the manager by the Deployment's image and the namespace's UID. The ConfigMap has
// the client defaults.
func userRole(namespace string) *rbacv1.Role {
	return &rbacv1.Role{
		TypeMeta:   typeMeta("rbac.authorization.k8s.io/v1", "Role"),
		ObjectMeta: meta(namespace, userRoleName),
		Rules: []rbacv1.PolicyRule{
			{APIGroups: []string{""}, Resources: []string{"pods"}, Verbs: []string{"get", "list", "watch"}},
			{APIGroups: []string{""}, Resources: []string{"pods/portforward"}, Verbs: []string{"create", "get"}},
			{APIGroups: []string{""}, Resources: []string{"pods/proxy"}, Verbs: []string{"get"}},
			{APIGroups: []string{"apps"}, Resources: []string{"deployments"}, Verbs: []string{"get"}},
			{APIGroups: []string{""}, Resources: []string{"namespaces"}, ResourceNames: []string{namespace},
				Verbs: []string{"get"}},
			{APIGroups: []string{""}, Resources: []string{"configmaps"}, ResourceNames: []string{DefaultsName},
				Verbs: []string{"get"}},
		},
	}
}

func deployment(o Options) *appsv1.Deployment {
	return &appsv1.Deployment{
		TypeMeta:   typeMeta("apps/v1", "Deployment"),
		ObjectMeta: meta(o.namespace(), ManagerName),
		Spec: appsv1.DeploymentSpec{
			Replicas:             new(int32(1)),
			RevisionHistoryLimit: new(int32(2)),
			Selector:             &metav1.LabelSelector{MatchLabels: selectorLabels()},
			Template: corev1.PodTemplateSpec{ObjectMeta: metav1.ObjectMeta{Labels: labels()},
				Spec: podSpec(o)},
			// The new manager runs before the old one ends, so that sessions can move.
			Strategy: appsv1.DeploymentStrategy{
				Type: appsv1.RollingUpdateDeploymentStrategyType,
				RollingUpdate: &appsv1.RollingUpdateDeployment{
					MaxUnavailable: new(intstr.FromInt32(0)),
					MaxSurge:       new(intstr.FromInt32(1)),
				},
			},
		},
	}
}

// podSpec returns a pod that the "restricted" Pod Security level admits.
func podSpec(o Options) corev1.PodSpec {
	return corev1.PodSpec{
		ServiceAccountName:            ManagerName,
		AutomountServiceAccountToken:  new(true),
		EnableServiceLinks:            new(false), // thousands of variables in a namespace full of Services
		TerminationGracePeriodSeconds: new(int64(5)),
		NodeSelector:                  map[string]string{corev1.LabelOSStable: "linux"},
		SecurityContext: &corev1.PodSecurityContext{
			RunAsNonRoot:   new(true),
			RunAsUser:      new(int64(nonroot)),
			RunAsGroup:     new(int64(nonroot)),
			SeccompProfile: &corev1.SeccompProfile{Type: corev1.SeccompProfileTypeRuntimeDefault},
			// Pings without a capability, and 64 000 connections to a pod instead of 28 000. Kubernetes calls both
			// safe.
			Sysctls: []corev1.Sysctl{
				{Name: "net.ipv4.ping_group_range", Value: "0 2147483647"},
				{Name: "net.ipv4.ip_local_port_range", Value: "1024 65535"},
			},
		},
		Containers: []corev1.Container{{
			Name:            containerName,
			Image:           o.Image,
			ImagePullPolicy: corev1.PullIfNotPresent,
			Args:            []string{"manager"},
			Env:             environment(o),
			Ports: []corev1.ContainerPort{
				{Name: "health", ContainerPort: api.HealthPort, Protocol: corev1.ProtocolTCP},
				{Name: "proxy", ContainerPort: api.ProxyPort, Protocol: corev1.ProtocolTCP},
			},
			// The manager refuses new flows long before it reaches the limit (internal/manager/limits.go), which would
			// end all sessions at once.
			Resources: corev1.ResourceRequirements{
				Requests: corev1.ResourceList{
					corev1.ResourceCPU:    resource.MustParse("50m"),
					corev1.ResourceMemory: resource.MustParse("32Mi"),
				},
				Limits: corev1.ResourceList{corev1.ResourceMemory: resource.MustParse("1Gi")},
			},
			LivenessProbe:  probe("/livez", 10),
			ReadinessProbe: probe("/readyz", 2),
			// The pod's status then contains its last output, which needs no right to read logs.
			TerminationMessagePolicy: corev1.TerminationMessageFallbackToLogsOnError,
			SecurityContext: &corev1.SecurityContext{
				AllowPrivilegeEscalation: new(false),
				ReadOnlyRootFilesystem:   new(true),
				Capabilities:             &corev1.Capabilities{Drop: []corev1.Capability{"ALL"}},
			},
		}},
	}
}

func probe(path string, period int32) *corev1.Probe {
	return &corev1.Probe{
		ProbeHandler: corev1.ProbeHandler{HTTPGet: &corev1.HTTPGetAction{
			Path: path, Port: intstr.FromString("health"), Scheme: corev1.URISchemeHTTP,
		}},
		PeriodSeconds: period, TimeoutSeconds: 2, FailureThreshold: 3, SuccessThreshold: 1,
	}
}

func environment(o Options) []corev1.EnvVar {
	field := func(name, path string) corev1.EnvVar {
		return corev1.EnvVar{Name: name, ValueFrom: &corev1.EnvVarSource{
			FieldRef: &corev1.ObjectFieldSelector{APIVersion: "v1", FieldPath: path},
		}}
	}
	env := []corev1.EnvVar{
		field("POD_NAME", "metadata.name"),
		field("POD_IP", "status.podIPs"), // of both families, with a comma
		field("POD_NAMESPACE", "metadata.namespace"),
		field("NODE_NAME", "spec.nodeName"),
		{Name: "GOMEMLIMIT", Value: "900MiB"}, // the garbage collector runs more often below the limit
	}
	if len(o.APIServers) > 0 {
		servers := slices.Clone(o.APIServers)
		slices.Sort(servers)
		// Without kube-proxy, pods cannot reach the API server's ClusterIP.
		env = append(env, corev1.EnvVar{Name: "KUBEVPN_APISERVERS", Value: strings.Join(servers, ",")})
	}
	return env
}

func typeMeta(version, kind string) metav1.TypeMeta {
	return metav1.TypeMeta{APIVersion: version, Kind: kind}
}
