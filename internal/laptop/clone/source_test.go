package clone

import (
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"
	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	networkingv1 "k8s.io/api/networking/v1"
	policyv1 "k8s.io/api/policy/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"kubevpn/internal/api"
)

func inShop(name string) metav1.ObjectMeta { return metav1.ObjectMeta{Namespace: "shop", Name: name} }

func claim(namespace, name string, modes ...corev1.PersistentVolumeAccessMode) *corev1.PersistentVolumeClaim {
	return &corev1.PersistentVolumeClaim{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: name}, Spec: corev1.PersistentVolumeClaimSpec{AccessModes: modes}}
}

// user is a pod that has a claim.
func user(name, node, claim string, phase corev1.PodPhase) *corev1.Pod {
	return &corev1.Pod{
		ObjectMeta: inShop(name), Status: corev1.PodStatus{Phase: phase},
		Spec: corev1.PodSpec{NodeName: node, Volumes: []corev1.Volume{claimed(claim)}},
	}
}

func claimed(claim string) corev1.Volume {
	return corev1.Volume{Name: claim, VolumeSource: corev1.VolumeSource{PersistentVolumeClaim: &corev1.PersistentVolumeClaimVolumeSource{ClaimName: claim}}}
}

func TestSelectorsOfNamespaceAreFound(t *testing.T) {
	app := func(name string) *metav1.LabelSelector {
		return &metav1.LabelSelector{MatchLabels: map[string]string{"app": name}}
	}
	ofDeployment := inShop("web-1")
	ofDeployment.OwnerReferences = []metav1.OwnerReference{{Kind: "Deployment", Name: "web", Controller: new(true)}}
	ofClone := inShop("web-ann")
	ofClone.Labels = map[string]string{labelManagedBy: managedBy, labelClone: "web-ann"}
	w := newWorld(
		&corev1.Service{ObjectMeta: inShop("front"), Spec: corev1.ServiceSpec{Selector: map[string]string{"app": "service"}}},
		&corev1.Service{ObjectMeta: inShop("none")},
		&corev1.Service{ObjectMeta: ofClone, Spec: corev1.ServiceSpec{Selector: map[string]string{labelClone: "web-ann"}}},
		&policyv1.PodDisruptionBudget{ObjectMeta: inShop("most"), Spec: policyv1.PodDisruptionBudgetSpec{Selector: app("budget")}},
		&policyv1.PodDisruptionBudget{ObjectMeta: inShop("wrong"), Spec: policyv1.PodDisruptionBudgetSpec{Selector: &metav1.LabelSelector{
			MatchExpressions: []metav1.LabelSelectorRequirement{{Key: "app", Operator: "Near"}},
		}}},
		&appsv1.Deployment{ObjectMeta: inShop("web"), Spec: appsv1.DeploymentSpec{Selector: app("deployment")}},
		&appsv1.StatefulSet{ObjectMeta: inShop("db"), Spec: appsv1.StatefulSetSpec{Selector: app("set")}},
		&appsv1.ReplicaSet{ObjectMeta: ofDeployment, Spec: appsv1.ReplicaSetSpec{Selector: app("deployment")}},
		&appsv1.ReplicaSet{ObjectMeta: inShop("old"), Spec: appsv1.ReplicaSetSpec{Selector: app("replicas")}},
		&networkingv1.NetworkPolicy{ObjectMeta: inShop("deny")},
	)
	w.fail("list", "daemonsets", func() error { return apierrors.NewForbidden(appsv1.Resource("daemonsets"), "", nil) })
	var got []string
	all, notes := selectors(t.Context(), w.kube, "shop")
	for _, s := range all {
		got = append(got, s.of+": "+s.String())
	}
	if diff := cmp.Diff([]string{
		"Service front: app=service", "PodDisruptionBudget most: app=budget", "Deployment web: app=deployment", "StatefulSet db: app=set", "ReplicaSet old: app=replicas",
	}, got); diff != "" {
		t.Errorf("-want +got\n%s", diff)
	}
	if diff := cmp.Diff([]string{
		`cannot parse the selector of PodDisruptionBudget wrong: "Near" is not a valid label selector operator`,
		`cannot list DaemonSets, which may select the clone's pods: daemonsets.apps is forbidden: <nil>`,
	}, notes); diff != "" {
		t.Errorf("notes: -want +got\n%s", diff)
	}
}

func TestExclusiveClaimsAreFound(t *testing.T) {
	objects := func() *world {
		return newWorld(
			claim("shop", "once", corev1.ReadWriteOnce), claim("shop", "many", corev1.ReadWriteOnce, corev1.ReadWriteMany), claim("shop", "pod", corev1.ReadWriteOncePod),
			claim("other", "many", corev1.ReadWriteMany),
			user("done", "node-1", "once", corev1.PodSucceeded), user("failed", "node-1", "once", corev1.PodFailed), user("runs", "node-2", "once", corev1.PodRunning),
		)
	}
	for _, tt := range []struct {
		namespace string
		want      map[string]exclusive
	}{
		{"shop", map[string]exclusive{"once": {mode: corev1.ReadWriteOnce, node: "node-2"}, "pod": {mode: corev1.ReadWriteOncePod}}},
		{"other", map[string]exclusive{"once": {mode: corev1.ReadWriteOnce, absent: true}, "pod": {mode: corev1.ReadWriteOncePod, absent: true}}},
		{"empty", map[string]exclusive{
			"once": {mode: corev1.ReadWriteOnce, absent: true}, "pod": {mode: corev1.ReadWriteOncePod, absent: true}, "many": {absent: true},
		}},
	} {
		t.Run(tt.namespace, func(t *testing.T) {
			w := objects()
			w.workload.Template.Spec.Volumes = []corev1.Volume{claimed("once"), claimed("many"), claimed("pod")}
			s, notes, err := read(t.Context(), w.kube, w.workload, "app", tt.namespace)
			if err != nil || len(notes) > 0 {
				t.Fatal(notes, err)
			}
			if diff := cmp.Diff(tt.want, s.claims, cmp.AllowUnexported(exclusive{})); diff != "" {
				t.Errorf("-want +got\n%s", diff)
			}
		})
	}
	w := objects()
	w.workload.Template.Spec.Volumes = []corev1.Volume{claimed("nowhere")}
	for _, namespace := range []string{"shop", "other"} {
		if _, _, err := read(t.Context(), w.kube, w.workload, "app", namespace); !apierrors.IsNotFound(err) {
			t.Errorf("%s: %v", namespace, err)
		}
	}
}

func TestMissingReferencesAreNamed(t *testing.T) {
	w := newWorld(&corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: "other", Name: "settings"}})
	spec := &w.workload.Template.Spec
	spec.ServiceAccountName = "robot"
	spec.Volumes = []corev1.Volume{
		{Name: "settings", VolumeSource: corev1.VolumeSource{ConfigMap: &corev1.ConfigMapVolumeSource{LocalObjectReference: corev1.LocalObjectReference{Name: "settings"}}}},
		{Name: "keys", VolumeSource: corev1.VolumeSource{Secret: &corev1.SecretVolumeSource{SecretName: "keys"}}},
		{Name: "extra", VolumeSource: corev1.VolumeSource{Secret: &corev1.SecretVolumeSource{SecretName: "extra", Optional: new(true)}}},
		claimed("data"),
	}
	_, _, err := read(t.Context(), w.kube, w.workload, "app", "other")
	checkError(t, err, api.ExitWorkload, "the namespace other lacks objects that the pods need: ServiceAccount robot, Secret keys")
}

// TestPoliciesOfBothNamespacesAreListed also checks the note for a user who may not list them.
func TestPoliciesOfBothNamespacesAreListed(t *testing.T) {
	there := inShop("theirs")
	there.Namespace = "other"
	w := newWorld(&networkingv1.NetworkPolicy{ObjectMeta: inShop("ours")}, &networkingv1.NetworkPolicy{ObjectMeta: there})
	for _, tt := range []struct {
		namespace string
		want      []string
	}{{"shop", []string{"ours"}}, {"other", []string{"ours", "theirs"}}} {
		all, notes := listPolicies(t.Context(), w.kube, "shop", tt.namespace)
		var got []string
		for _, p := range all {
			got = append(got, p.Name)
		}
		if slices.Sort(got); !slices.Equal(got, tt.want) || len(notes) > 0 {
			t.Errorf("%s: %q, %q", tt.namespace, got, notes)
		}
	}
	w.fail("list", "networkpolicies", func() error { return apierrors.NewForbidden(networkingv1.Resource("networkpolicies"), "", nil) })
	all, notes := listPolicies(t.Context(), w.kube, "shop", "shop")
	if diff := cmp.Diff([]string{"cannot list NetworkPolicies, which may block requests to the clone: networkpolicies.networking.k8s.io is forbidden: <nil>"}, notes); diff != "" || len(all) > 0 {
		t.Errorf("%v, -want +got\n%s", all, diff)
	}
}
