// Package chart_test checks the Helm chart without a cluster: it renders the same objects as `kubevpn install`, its
// schema rejects wrong values, and its README is up to date.
package chart_test

import (
	"bytes"
	"context"
	"encoding/json"
	"flag"
	"fmt"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	networkingv1 "k8s.io/api/networking/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/util/intstr"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/kubernetes/fake"
	"sigs.k8s.io/yaml"

	"kubevpn/internal/api"
	"kubevpn/internal/config"
	"kubevpn/internal/incluster/manager"
	"kubevpn/internal/kube/install"
	"kubevpn/internal/process/version"
	"kubevpn/test/lab"
)

var update = flag.Bool("update", false, "write the chart's README, and the objects that install reads")

const (
	chart  = "../../charts/kubevpn"
	digest = "sha256:0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef"
)

// helm returns a command of Helm, which the lab builds and caches.
func helm(t *testing.T, args ...string) *exec.Cmd {
	t.Helper()
	if testing.Short() {
		t.Skip("building Helm takes a minute")
	}
	program, err := lab.New(lab.Config{Progress: os.Stderr}).Helm(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	return exec.CommandContext(t.Context(), program, args...)
}

// render returns the chart's objects, with the keys of objects. It checks that laptops accept the manager among them.
func render(t *testing.T, namespace string, args ...string) map[string]unstructured.Unstructured {
	t.Helper()
	cmd := helm(t, append([]string{"template", "vpn", chart, "--namespace", namespace}, args...)...)
	var stderr bytes.Buffer
	cmd.Stderr = &stderr
	out, err := cmd.Output()
	if err != nil {
		t.Fatalf("%v: %s", err, stderr.String())
	}
	all := objects(t, namespace, out)
	checkAccepted(t, namespace, all)
	return all
}

// server is an API server that has the objects.
type server struct{ *fake.Clientset }

func (s server) Kube() kubernetes.Interface { return s }

func (server) ExplainContext(_ context.Context, err error) error { return err }

// checkAccepted checks that laptops use the Deployment, and not that of another program.
func checkAccepted(t *testing.T, namespace string, all map[string]unstructured.Unstructured) {
	t.Helper()
	var d appsv1.Deployment
	decode(t, all["Deployment kubevpn-traffic-manager"], &d)
	image := d.Spec.Template.Spec.Containers[0].Image
	repository, _, _ := strings.Cut(image, "@")
	repository = strings.TrimSuffix(repository, ":"+version.String())
	repository = strings.TrimSuffix(repository, ":1")
	consent := api.Consent{Managers: []api.TrustedManager{{NamespaceUID: "deployment:", Namespace: namespace,
		Repository: repository, ServiceAccount: install.ManagerName}}}
	if got, err := install.Find(t.Context(), server{fake.NewClientset(&d)}, namespace, "", consent); err != nil || got != image {
		t.Errorf("laptops see the image %q, %v; want %q", got, err, image)
	}
}

// objects parses YAML documents. The keys are kinds and names, with the namespace if it differs.
func objects(t *testing.T, namespace string, text []byte) map[string]unstructured.Unstructured {
	t.Helper()
	all := map[string]unstructured.Unstructured{}
	for document := range strings.SplitSeq("\n"+string(text), "\n---\n") {
		var o unstructured.Unstructured
		if err := yaml.UnmarshalStrict([]byte(document), &o.Object); err != nil {
			t.Fatalf("%v:\n%s", err, document)
		}
		if o.Object == nil {
			continue
		}
		key := o.GetKind() + " " + o.GetName()
		if in := o.GetNamespace(); in != "" && in != namespace {
			key = o.GetKind() + " " + in + "/" + o.GetName()
		}
		if _, twice := all[key]; twice {
			t.Fatalf("two objects are %s", key)
		}
		all[key] = o
	}
	return all
}

// TestManifestOfInstallIsGenerated checks the objects that `kubevpn install` reads. The chart makes them for these
// values, and kubevpn replaces the values with its own.
func TestManifestOfInstallIsGenerated(t *testing.T) {
	all := render(t, "manager-namespace", "--set-string", "image.repository=manager-image,image.tag=1,expose=nodeport")
	var documents []string
	for _, key := range slices.Sorted(maps.Keys(all)) {
		text, err := yaml.Marshal(all[key].Object)
		if err != nil {
			t.Fatal(err)
		}
		documents = append(documents, string(text))
	}
	checkGenerated(t, "../../internal/kube/install/manifest.yaml", strings.NewReplacer("manager-image:1", "manager-image",
		"app.kubernetes.io/managed-by: Helm", "app.kubernetes.io/managed-by: kubevpn",
		"app.kubernetes.io/version: "+version.String(), "app.kubernetes.io/version: manager-version").
		Replace(strings.Join(documents, "---\n")))
}

func TestChartInstallsWhatKubevpnInstallInstalls(t *testing.T) {
	for _, tt := range []struct {
		name    string
		options install.Options
		args    []string
	}{
		{"digest", install.Options{Image: "registry.example/kubevpn@" + digest},
			[]string{"--set", "image.repository=registry.example/kubevpn,image.digest=" + digest}},
		{"tag in another namespace", install.Options{Namespace: "tools", Image: "registry.example:5000/kubevpn:1"},
			[]string{"--set-string", "image.repository=registry.example:5000/kubevpn,image.tag=1"}},
		{"default tag without kube-proxy",
			install.Options{Image: "kubevpn:" + version.String(), APIServers: []string{"10.0.0.2:6443", "10.0.0.1:6443"}},
			[]string{"--set", "image.repository=kubevpn,apiServers={10.0.0.2:6443,10.0.0.1:6443}"}},
		{"node port", install.Options{Image: "kubevpn:" + version.String(), Expose: install.ExposeNodePort},
			[]string{"--set", "image.repository=kubevpn,expose=nodeport"}},
		{"load balancer", install.Options{Image: "kubevpn:" + version.String(), Expose: install.ExposeLoadBalancer,
			ExposeRanges: []string{"203.0.113.0/24", "2001:db8::/32"}},
			[]string{"--set", "image.repository=kubevpn,expose=loadbalancer,exposeSourceRanges={203.0.113.0/24,2001:db8::/32}"}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			manifest, err := install.Manifest(tt.options)
			if err != nil {
				t.Fatal(err)
			}
			namespace := "kubevpn"
			if tt.options.Namespace != "" {
				namespace = tt.options.Namespace
			}
			want := objects(t, namespace, manifest)
			delete(want, "Namespace "+namespace) // a release cannot contain the namespace that it is stored in
			got := render(t, namespace, tt.args...)
			for _, all := range []map[string]unstructured.Unstructured{want, got} {
				for _, o := range all {
					dropOwner(o.Object)
				}
			}
			if d := cmp.Diff(want, got); d != "" {
				t.Errorf("the chart differs from `kubevpn install` (-install +chart):\n%s", d)
			}
		})
	}
}

// dropOwner removes the label that differs between kubevpn and Helm, also from the pod template.
func dropOwner(fields map[string]any) {
	const label = "app.kubernetes.io/managed-by"
	for _, path := range [][]string{{"metadata"}, {"spec", "template", "metadata"}} {
		unstructured.RemoveNestedField(fields, append(path, "labels", label)...)
	}
}

const allValues = `
image: {repository: registry.example/kubevpn, tag: ignored, digest: ` + digest + `}
imagePullSecrets: [{name: registry}]
resources: {limits: {memory: 512Mi}, requests: {cpu: 1}}
memoryLimit: 460MiB
nodeSelector: {pool: system}
tolerations: [{key: system, operator: Exists}]
affinity: {podAntiAffinity: {requiredDuringSchedulingIgnoredDuringExecution: [{topologyKey: zone}]}}
priorityClassName: high
topologySpreadConstraints: [{maxSkew: 1, topologyKey: zone, whenUnsatisfiable: ScheduleAnyway}]
labels: {team: tools}
annotations: {contact: "tools: #help"}
watchNamespaces: [shop]
allowNamespaces: [shop]
expose: nodeport
clusterRole: {create: false}
clientDefaults:
  extraCIDRs: [10.20.0.0/16, 192.0.2.7]
  excludeCIDRs: [10.20.30.0/24]
  extraDomains: [corp.test]
  excludeDomains: [mail.corp.test]
  netstack: gvisor
  transport: port-forward
  mode: sidecar
  requireMatch: [true, sandbox=false]
access: {users: [ann, "oidc:ben"], groups: [developers], gateways: true}
networkPolicy:
  enabled: true
  from: [{ipBlock: {cidr: 10.0.0.0/24}}]
  egress: [{to: [{namespaceSelector: {}}]}]
metrics:
  enabled: true
  from: [{namespaceSelector: {matchLabels: {name: monitoring}}}]
  serviceMonitor: {enabled: true, labels: {release: prometheus}, interval: 1m}
  dashboard: {enabled: true, labels: {dashboards: "yes"}}
`

func TestEveryValueHasItsEffect(t *testing.T) {
	file := filepath.Join(t.TempDir(), "values.yaml")
	if err := os.WriteFile(file, []byte(allValues), 0o600); err != nil {
		t.Fatal(err)
	}
	all := render(t, "kubevpn", "--values", file)
	for name, o := range all {
		if o.GetLabels()["team"] != "tools" || o.GetAnnotations()["contact"] != "tools: #help" {
			t.Errorf("%s has the labels %v and the annotations %v", name, o.GetLabels(), o.GetAnnotations())
		}
	}
	if got, want := slices.Sorted(maps.Keys(all)), []string{
		"ConfigMap kubevpn-client-defaults", "ConfigMap kubevpn-dashboard", "Deployment kubevpn-traffic-manager", "NetworkPolicy kubevpn-traffic-manager",
		"Role kubevpn-traffic-manager-user", "Role shop/kubevpn-traffic-manager-watch-kubevpn",
		"RoleBinding kubevpn-traffic-manager-user", "RoleBinding shop/kubevpn-traffic-manager-watch-kubevpn",
		"Service kubevpn-traffic-manager-direct", "Service kubevpn-traffic-manager-metrics",
		"ServiceAccount kubevpn-traffic-manager", "ServiceMonitor kubevpn-traffic-manager",
	}; !slices.Equal(got, want) {
		t.Errorf("the objects are %q, want %q", got, want)
	}
	t.Run("pod", func(t *testing.T) {
		var d appsv1.Deployment
		decode(t, all["Deployment kubevpn-traffic-manager"], &d)
		checkPod(t, d.Spec.Template)
	})
	t.Run("access", func(t *testing.T) {
		var binding rbacv1.RoleBinding
		var role rbacv1.Role
		decode(t, all["RoleBinding kubevpn-traffic-manager-user"], &binding)
		decode(t, all["Role kubevpn-traffic-manager-user"], &role)
		subject := func(kind, name string) rbacv1.Subject {
			return rbacv1.Subject{APIGroup: rbacv1.GroupName, Kind: kind, Name: name}
		}
		want := []rbacv1.Subject{subject("User", "ann"), subject("User", "oidc:ben"), subject("Group", "developers")}
		if d := cmp.Diff(want, binding.Subjects); d != "" {
			t.Errorf("the subjects differ (-want +got):\n%s", d)
		}
		last := role.Rules[len(role.Rules)-1]
		if !slices.Equal(last.Resources, []string{"pods/ephemeralcontainers"}) || !slices.Equal(last.Verbs, []string{"patch"}) {
			t.Errorf("the last rule is %v, want the right to add gateways", last)
		}
	})
	t.Run("client defaults", func(t *testing.T) {
		var m corev1.ConfigMap
		decode(t, all["ConfigMap "+install.DefaultsName], &m)
		checkDefaults(t, m.Data)
	})
	t.Run("metrics", func(t *testing.T) { checkMetrics(t, all) })
	t.Run("network policy", func(t *testing.T) {
		var policy networkingv1.NetworkPolicy
		decode(t, all["NetworkPolicy kubevpn-traffic-manager"], &policy)
		tcp := corev1.ProtocolTCP
		port := func(name string) []networkingv1.NetworkPolicyPort {
			at := intstr.FromString(name)
			return []networkingv1.NetworkPolicyPort{{Protocol: &tcp, Port: &at}}
		}
		if d := cmp.Diff(networkingv1.NetworkPolicySpec{
			PodSelector: metav1.LabelSelector{MatchLabels: map[string]string{
				"app.kubernetes.io/name": "kubevpn", "app.kubernetes.io/component": "traffic-manager"}},
			PolicyTypes: []networkingv1.PolicyType{networkingv1.PolicyTypeIngress, networkingv1.PolicyTypeEgress},
			Ingress: []networkingv1.NetworkPolicyIngressRule{{Ports: port("health")}, {Ports: port("proxy"),
				From: []networkingv1.NetworkPolicyPeer{{IPBlock: &networkingv1.IPBlock{CIDR: "10.0.0.0/24"}}}},
				{Ports: port("metrics"), From: []networkingv1.NetworkPolicyPeer{{NamespaceSelector: &metav1.LabelSelector{
					MatchLabels: map[string]string{"name": "monitoring"}}}}}},
			Egress: []networkingv1.NetworkPolicyEgressRule{{
				To: []networkingv1.NetworkPolicyPeer{{NamespaceSelector: &metav1.LabelSelector{}}}}},
		}, policy.Spec); d != "" {
			t.Errorf("the policy differs (-want +got):\n%s", d)
		}
	})
}

// checkDefaults checks that laptops use all client defaults, and that no other setting can be one.
func checkDefaults(t *testing.T, data map[string]string) {
	t.Helper()
	c := config.Default()
	if warnings := c.ApplyDefaults("the chart", data); len(warnings) > 0 {
		t.Errorf("laptops warn: %q", warnings)
	}
	got := map[string]string{}
	for _, s := range c.Settings() {
		if s.Origin == api.OriginCluster {
			got[s.Key] = s.Value
		}
	}
	want := map[string]string{
		"extraCIDRs": "10.20.0.0/16,192.0.2.7/32", "excludeCIDRs": "10.20.30.0/24", "netstack": "gvisor",
		"extraDomains": "corp.test", "excludeDomains": "mail.corp.test",
		"transport": "port-forward", "mode": "sidecar", "requireMatch": "true,sandbox=false",
	}
	if d := cmp.Diff(want, got); d != "" {
		t.Errorf("the settings differ (-want +got):\n%s", d)
	}
}

// checkPod checks the values about the manager's pod.
func checkPod(t *testing.T, pod corev1.PodTemplateSpec) {
	t.Helper()
	if pod.Labels["team"] != "tools" || pod.Annotations["contact"] != "tools: #help" {
		t.Errorf("the pod has the labels %v and the annotations %v", pod.Labels, pod.Annotations)
	}
	spec := pod.Spec
	manager := spec.Containers[0]
	got := fmt.Sprintln(manager.Image, spec.ImagePullSecrets, spec.NodeSelector, spec.Tolerations[0].Key,
		spec.PriorityClassName, spec.TopologySpreadConstraints[0].TopologyKey,
		spec.Affinity.PodAntiAffinity.RequiredDuringSchedulingIgnoredDuringExecution[0].TopologyKey,
		manager.Resources.Limits.Memory(), manager.Resources.Requests.Cpu())
	want := fmt.Sprintln("registry.example/kubevpn@"+digest, []corev1.LocalObjectReference{{Name: "registry"}},
		map[string]string{"kubernetes.io/os": "linux", "pool": "system"}, "system", "high", "zone", "zone", "512Mi", "1")
	if got != want {
		t.Errorf("the pod has %s, want %s", got, want)
	}
	if !slices.ContainsFunc(manager.Env, func(e corev1.EnvVar) bool {
		return e.Name == "GOMEMLIMIT" && e.Value == "460MiB"
	}) {
		t.Errorf("the environment is %v", manager.Env)
	}
}

// TestWatchedNamespacesHaveRolesOfTheirOwn checks that a manager of some namespaces has the same rights as a manager of
// all, but by a Role in each of them.
func TestWatchedNamespacesHaveRolesOfTheirOwn(t *testing.T) {
	image := []string{"--set", "image.repository=kubevpn"}
	all := render(t, "tools", append(image, "--set-json", `watchNamespaces=["tools","shop","123"]`,
		"--set-json", `allowNamespaces=["tools","shop","123"]`,
		"--set-json", `allowCIDRs=["10.0.0.0/8","fd00::/8"]`, "--set-json", `denyCIDRs=["10.1.0.0/16"]`)...)
	var whole, cluster rbacv1.ClusterRole
	decode(t, render(t, "tools", image...)["ClusterRole kubevpn-traffic-manager-tools"], &whole)
	decode(t, all["ClusterRole kubevpn-traffic-manager-tools"], &cluster)
	want, everywhere := verbsOf(whole.Rules), verbsOf(cluster.Rules)
	if got := slices.Sorted(maps.Keys(everywhere)); !slices.Equal(got, []string{"nodes", "servicecidrs"}) {
		t.Errorf("the ClusterRole is for %q", got)
	}
	for _, prefix := range []string{"", "shop/", "123/"} {
		name := prefix + "kubevpn-traffic-manager-watch-tools"
		var role rbacv1.Role
		var binding rbacv1.RoleBinding
		decode(t, all["Role "+name], &role)
		decode(t, all["RoleBinding "+name], &binding)
		got := verbsOf(role.Rules)
		maps.Copy(got, everywhere)
		if d := cmp.Diff(want, got); d != "" {
			t.Errorf("%s: the rights differ (-all namespaces +these):\n%s", name, d)
		}
		if d := cmp.Diff([]rbacv1.Subject{{Kind: rbacv1.ServiceAccountKind, Namespace: "tools", Name: install.ManagerName}},
			binding.Subjects); d != "" || binding.RoleRef.Name != role.Name {
			t.Errorf("%s binds %v to (-want +got):\n%s", name, binding.RoleRef, d)
		}
		if role.Labels["kubevpn/namespace"] != "tools" || role.Labels["app.kubernetes.io/name"] != "kubevpn" {
			t.Errorf("%s has the labels %v", name, role.Labels)
		}
	}
	var d appsv1.Deployment
	decode(t, all["Deployment kubevpn-traffic-manager"], &d)
	cmd := manager.NewCommand()
	args := d.Spec.Template.Spec.Containers[0].Args
	if err := cmd.ParseFlags(args[1:]); err != nil {
		t.Fatal(err)
	}
	for _, flag := range []string{"watch-namespaces", "allow-namespaces"} {
		got, err := cmd.Flags().GetStringSlice(flag)
		if err != nil || args[0] != cmd.Name() || !slices.Equal(got, []string{"123", "shop", "tools"}) {
			t.Errorf("from %q the manager reads %q, %v", args, got, err)
		}
	}
	for flag, want := range map[string][]string{"allow-cidr": {"10.0.0.0/8", "fd00::/8"}, "deny-cidr": {"10.1.0.0/16"}} {
		if got, err := cmd.Flags().GetStringSlice(flag); err != nil || !slices.Equal(got, want) {
			t.Errorf("from %q the manager reads --%s %q, %v", args, flag, got, err)
		}
	}
}

// TestAuthorizationHasItsRights checks that the manager may review access, and that users may tell it who they are,
// only if the manager authorizes users.
func TestAuthorizationHasItsRights(t *testing.T) {
	users := []string{"--set", "image.repository=kubevpn,access.users={ann},access.groups={dev}"}
	var before, manager, user rbacv1.ClusterRole
	var role rbacv1.RoleBinding
	var cluster rbacv1.ClusterRoleBinding
	all := render(t, "tools", users...)
	decode(t, all["ClusterRole kubevpn-traffic-manager-tools"], &before)
	if _, ok := all["ClusterRole kubevpn-traffic-manager-tools-user"]; ok || len(verbsOf(before.Rules)["subjectaccessreviews"]) > 0 {
		t.Error("the objects grant unused rights")
	}
	all = render(t, "tools", append(users, "--set", "authorize=true")...)
	decode(t, all["ClusterRole kubevpn-traffic-manager-tools"], &manager)
	decode(t, all["ClusterRole kubevpn-traffic-manager-tools-user"], &user)
	decode(t, all["RoleBinding kubevpn-traffic-manager-user"], &role)
	decode(t, all["ClusterRoleBinding kubevpn-traffic-manager-tools-user"], &cluster)
	got := verbsOf(manager.Rules)
	if !slices.Equal(got["subjectaccessreviews"], []string{"create"}) || !slices.Equal(got["certificatesigningrequests"], []string{"get"}) {
		t.Errorf("the manager may %v", got)
	}
	if d := cmp.Diff(map[string][]string{"certificatesigningrequests": {"create"}}, verbsOf(user.Rules)); d != "" {
		t.Errorf("a user may (-want +got):\n%s", d)
	}
	if d := cmp.Diff(role.Subjects, cluster.Subjects); d != "" || len(role.Subjects) != 2 || cluster.RoleRef.Name != user.Name {
		t.Errorf("the subjects differ:\n%s", d)
	}
	var d appsv1.Deployment
	decode(t, all["Deployment kubevpn-traffic-manager"], &d)
	if args := d.Spec.Template.Spec.Containers[0].Args; !slices.Contains(args, "--authorize") {
		t.Errorf("the arguments are %q", args)
	}
	out, err := helm(t, "template", "vpn", chart, "--set", "image.repository=kubevpn,authorize=true,clusterRole.create=false").CombinedOutput()
	if err == nil || !strings.Contains(string(out), "authorize needs clusterRole.create") {
		t.Errorf("got %v: %s", err, out)
	}
}

func TestAllowedNamespacesMustBeWatched(t *testing.T) {
	out, err := helm(t, "template", "vpn", chart, "--set", "image.repository=kubevpn,watchNamespaces={tools},allowNamespaces={tools,shop}").CombinedOutput()
	if err == nil || !strings.Contains(string(out), `allowNamespaces has "shop", which watchNamespaces lacks`) {
		t.Errorf("got %v: %s", err, out)
	}
}

// verbsOf returns the verbs by resource.
func verbsOf(rules []rbacv1.PolicyRule) map[string][]string {
	verbs := map[string][]string{}
	for _, rule := range rules {
		for _, resource := range rule.Resources {
			verbs[resource] = rule.Verbs
		}
	}
	return verbs
}

// decode converts an object, and fails for fields that its type does not have.
func decode(t *testing.T, o unstructured.Unstructured, into any) {
	t.Helper()
	text, err := yaml.Marshal(o.Object)
	if err != nil {
		t.Fatal(err)
	}
	if err := yaml.UnmarshalStrict(text, into); err != nil {
		t.Fatal(err)
	}
}

func TestSchemaRejectsWrongValues(t *testing.T) {
	for _, wrong := range []string{
		"replicas=2", "replicas=0", "image.digest=sha256:12", "image.repository=a@b", "image.tag=a/b", "images.tag=1",
		"imagePullSecrets={registry}", "resources.memory=1Gi", "memoryLimit=lots", "priorityClassName=1",
		"labels.app\\.kubernetes\\.io/name=other", "annotations.kubevpn/created=true", "apiServers={10.0.0.1}",
		"watchNamespaces=shop", "watchNamespaces={Shop}", "allowCIDRs=10.0.0.0/8", "denyCIDRs={10.0.0.1}", "denyCIDRs={nodes}",
		"clusterRole.create=1", "access.users=ann",
		"watchNamespaces=shop", "watchNamespaces={Shop}", "allowNamespaces={a b}", "authorize=sometimes", "clusterRole.create=1", "access.users=ann",
		"access.gateways=perhaps", "expose=ingress", "expose=true", "networkPolicy.from={10.0.0.0/8}",
		"clientDefaults.image=x", "clientDefaults.netstack=kernel", "clientDefaults.extraCIDRs=10.20.0.0/16",
		"clientDefaults.requireMatch={A}", "metrics.enabled=yes", "metrics.serviceMonitor.interval=often",
		"metrics.dashboard.enabled=1",
	} {
		t.Run(wrong, func(t *testing.T) {
			out, err := helm(t, "template", "vpn", chart, "--set", "image.repository=kubevpn", "--set", wrong).CombinedOutput()
			if said := string(out); err == nil || !strings.Contains(said, "meet the specifications of the schema") {
				t.Errorf("got %v: %s", err, said)
			}
		})
	}
	t.Run("no image", func(t *testing.T) {
		out, err := helm(t, "template", "vpn", chart).CombinedOutput()
		if err == nil || !strings.Contains(string(out), "set image.repository") {
			t.Errorf("got %v: %s", err, out)
		}
	})
}

func TestChartPassesLint(t *testing.T) {
	if out, err := helm(t, "lint", "--strict", chart, "--set", "image.repository=kubevpn").CombinedOutput(); err != nil {
		t.Errorf("%v: %s", err, out)
	}
}

// TestSchemaHasNoOtherValues checks that the schema has no values that values.yaml lacks. The linter finds the
// opposite, because the schema allows no further properties.
func TestSchemaHasNoOtherValues(t *testing.T) {
	type schema struct {
		Properties map[string]*schema `json:"properties"`
	}
	var of schema
	var values map[string]any
	read(t, "values.schema.json", func(b []byte) error { return json.Unmarshal(b, &of) })
	read(t, "values.yaml", func(b []byte) error { return yaml.Unmarshal(b, &values) })
	delete(of.Properties, "global") // Helm passes it to every chart
	for name, property := range of.Properties {
		value, found := values[name]
		if !found {
			t.Errorf("values.yaml lacks %s", name)
		}
		if name == "resources" { // those of Kubernetes
			continue
		}
		group, _ := value.(map[string]any)
		for inner := range property.Properties {
			if _, found := group[inner]; !found {
				t.Errorf("values.yaml lacks %s.%s", name, inner)
			}
		}
	}
}

func read(t *testing.T, name string, parse func([]byte) error) {
	t.Helper()
	text, err := os.ReadFile(filepath.Join(chart, name))
	if err == nil {
		err = parse(text)
	}
	if err != nil {
		t.Fatal(err)
	}
}

func TestChartHasTheVersionOfKubevpn(t *testing.T) {
	var about struct {
		Version    string `json:"version"`
		AppVersion string `json:"appVersion"`
	}
	read(t, "Chart.yaml", func(b []byte) error { return yaml.Unmarshal(b, &about) })
	if about.Version != version.String() || about.AppVersion != version.String() {
		t.Errorf("Chart.yaml has %+v, want %s", about, version.String())
	}
}

func TestReadmeIsGenerated(t *testing.T) {
	if testing.Short() {
		t.Skip("building helm-docs takes half a minute")
	}
	cmd := exec.CommandContext(t.Context(), "go", "tool", "-modfile=../../tools/helm-docs/go.mod", "helm-docs",
		"--chart-search-root", "../../charts", "--dry-run", "--log-level", "error")
	var stderr bytes.Buffer
	cmd.Stderr = &stderr
	want, err := cmd.Output()
	if err != nil {
		t.Fatalf("%v: %s", err, stderr.String())
	}
	checkGenerated(t, filepath.Join(chart, "README.md"), strings.TrimSpace(string(want))+"\n")
}

// checkGenerated compares a file with its generated content, or writes it.
func checkGenerated(t *testing.T, file, want string) {
	t.Helper()
	if *update {
		if err := os.WriteFile(file, []byte(want), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	got, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	if d := cmp.Diff(want, string(got)); d != "" {
		t.Errorf("%s is outdated; run `make docs` (-generated +file):\n%s", file, d)
	}
}
