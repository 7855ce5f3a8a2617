package client

import (
	"context"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"

	"kubevpn/internal/api"
)

func systemConfigMap(name, key, text string) *corev1.ConfigMap {
	return &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: "kube-system", Name: name}, Data: map[string]string{key: text}}
}

func systemDaemonSet(name string, c corev1.Container) *appsv1.DaemonSet {
	return &appsv1.DaemonSet{
		ObjectMeta: metav1.ObjectMeta{Namespace: "kube-system", Name: name},
		Spec:       appsv1.DaemonSetSpec{Template: corev1.PodTemplateSpec{Spec: corev1.PodSpec{Containers: []corev1.Container{c}}}},
	}
}

func onWindows(d *appsv1.DaemonSet) *appsv1.DaemonSet {
	d.Spec.Template.Spec.NodeSelector = map[string]string{"kubernetes.io/os": "windows"}
	return d
}

func annotated(name, annotation, value string) *corev1.Node {
	return &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: name, Annotations: map[string]string{annotation: value}}}
}

// kubeadmConfig is the beginning of what kubeadm writes.
const kubeadmConfig = `apiVersion: kubeproxy.config.k8s.io/v1alpha1
bindAddress: 0.0.0.0
clientConnection:
  kubeconfig: /var/lib/kube-proxy/kubeconfig.conf
clusterCIDR: 10.244.0.0/16
ipvs:
  strictARP: false
kind: KubeProxyConfiguration
mode: `

func TestProxyModeComesFromTheFirstSource(t *testing.T) {
	kubeadmSet := systemDaemonSet("kube-proxy", corev1.Container{Name: "kube-proxy",
		Command: []string{"/usr/local/bin/kube-proxy", "--config=/var/lib/kube-proxy/config.conf", "--hostname-override=$(NODE_NAME)"}})
	const felix = "/apis/crd.projectcalico.org/v1/felixconfigurations/default"
	for _, tt := range []struct {
		name    string
		objects []runtime.Object
		raw     map[string]string // what is answered to a path; else it is not found
		deny    string
		want    KubeProxy
		text    string
	}{
		{
			name:    "kubeadm",
			objects: []runtime.Object{systemConfigMap("kube-proxy", "config.conf", kubeadmConfig+"nftables\n"), kubeadmSet},
			want:    KubeProxy{Mode: KubeProxyNFTables, By: "the ConfigMap kube-system/kube-proxy"},
			text:    "nftables, by the ConfigMap kube-system/kube-proxy",
		},
		{
			name:    "kubeadm_without_a_mode",
			objects: []runtime.Object{systemConfigMap("kube-proxy", "config.conf", kubeadmConfig+"\"\"\n"), kubeadmSet},
			want:    KubeProxy{Mode: KubeProxyIPTables, By: "the ConfigMap kube-system/kube-proxy (the default)"},
		},
		{
			name:    "ipvs",
			objects: []runtime.Object{systemConfigMap("kube-proxy", "config.conf", kubeadmConfig+"ipvs\n"), kubeadmSet},
			want:    KubeProxy{Mode: KubeProxyIPVS, By: "the ConfigMap kube-system/kube-proxy"},
		},
		{
			name:    "eks_has_another_name",
			objects: []runtime.Object{systemConfigMap("kube-proxy", "kubeconfig", "kind: Config\n"), systemConfigMap("kube-proxy-config", "config", kubeadmConfig+"iptables\n")},
			want:    KubeProxy{Mode: KubeProxyIPTables, By: "the ConfigMap kube-system/kube-proxy-config"},
		},
		{
			name: "arguments_in_a_shell_of_a_static_pod",
			objects: []runtime.Object{&corev1.Pod{
				ObjectMeta: metav1.ObjectMeta{Namespace: "kube-system", Name: "kube-proxy-n1", Labels: map[string]string{"component": "kube-proxy"}},
				Spec: corev1.PodSpec{Containers: []corev1.Container{{Name: "kube-proxy", Command: []string{"/bin/sh", "-c",
					"exec kube-proxy --master=https://192.0.2.1 --proxy-mode=ipvs --v=2 1>>/var/log/kube-proxy.log 2>&1"}}}},
			}},
			want: KubeProxy{Mode: KubeProxyIPVS, By: "the pod kube-system/kube-proxy-n1"},
		},
		{
			name: "arguments_count_before_a_configmap_that_nobody_reads",
			objects: []runtime.Object{
				systemConfigMap("kube-proxy", "config.conf", kubeadmConfig+"iptables\n"),
				systemDaemonSet("kube-proxy", corev1.Container{Name: "kube-proxy", Args: []string{"--proxy-mode", "ipvs"}}),
			},
			want: KubeProxy{Mode: KubeProxyIPVS, By: "the DaemonSet kube-system/kube-proxy"},
		},
		{
			name: "another_systems_daemonset_does_not_count",
			objects: []runtime.Object{
				onWindows(systemDaemonSet("kube-proxy-windows", corev1.Container{Name: "kube-proxy", Args: []string{"--proxy-mode=kernelspace"}})),
				systemConfigMap("kube-proxy", "config.conf", kubeadmConfig+"iptables\n"),
			},
			want: KubeProxy{Mode: KubeProxyIPTables, By: "the ConfigMap kube-system/kube-proxy"},
		},
		{
			name: "cilium_beside_a_kube_proxy_that_was_left",
			objects: []runtime.Object{
				systemConfigMap("cilium-config", "kube-proxy-replacement", "true"),
				systemConfigMap("kube-proxy", "config.conf", kubeadmConfig+"iptables\n"), kubeadmSet,
			},
			want: KubeProxy{Mode: KubeProxyNone, Replacement: "Cilium", PodSockets: true,
				By: "the ConfigMap kube-system/cilium-config, with BPF host routing: packets of pods bypass the node's netfilter"},
			text: "replaced by Cilium, by the ConfigMap kube-system/cilium-config, with BPF host routing: packets of pods bypass the node's netfilter",
		},
		{
			name: "cilium_that_serves_packets_of_pods",
			objects: []runtime.Object{&corev1.ConfigMap{ // from a chart with socketLB.hostNamespaceOnly, bpf.hostLegacyRouting
				ObjectMeta: metav1.ObjectMeta{Namespace: "kube-system", Name: "cilium-config"},
				Data: map[string]string{
					"kube-proxy-replacement": "true", "kube-proxy-replacement-healthz-bind-address": "", "bpf-lb-sock": "true",
					"bpf-lb-sock-hostns-only": "true", "enable-host-legacy-routing": "true", "routing-mode": "tunnel",
					"tunnel-protocol": "vxlan", "enable-bpf-masquerade": "true", "ipam": "cluster-pool",
				},
			}},
			want: KubeProxy{Mode: KubeProxyNone, Replacement: "Cilium", By: "the ConfigMap kube-system/cilium-config"},
		},
		{
			name: "cilium_that_replaces_nothing",
			objects: []runtime.Object{
				systemConfigMap("cilium-config", "kube-proxy-replacement", "false"),
				systemConfigMap("kube-proxy", "config.conf", kubeadmConfig+"iptables\n"), kubeadmSet,
			},
			want: KubeProxy{Mode: KubeProxyIPTables, By: "the ConfigMap kube-system/kube-proxy"},
		},
		{
			name:    "calico_ebpf",
			objects: []runtime.Object{systemConfigMap("kube-proxy", "config.conf", kubeadmConfig+"iptables\n")},
			raw:     map[string]string{felix: `{"spec":{"bpfEnabled":true,"ipipEnabled":true}}`},
			want:    KubeProxy{Mode: KubeProxyNone, Replacement: "Calico (eBPF)", By: "FelixConfiguration default"},
		},
		{
			name: "calico_ebpf_by_environment",
			objects: []runtime.Object{systemDaemonSet("calico-node", corev1.Container{Name: "calico-node",
				Env: []corev1.EnvVar{{Name: "FELIX_BPFENABLED", Value: "True"}}})},
			want: KubeProxy{Mode: KubeProxyNone, Replacement: "Calico (eBPF)", By: "the DaemonSet kube-system/calico-node"},
		},
		{
			name:    "calico_without_ebpf",
			objects: []runtime.Object{systemConfigMap("kube-proxy", "config.conf", kubeadmConfig+"iptables\n")},
			raw:     map[string]string{felix: `{"spec":{"bpfLogLevel":""}}`},
			want:    KubeProxy{Mode: KubeProxyIPTables, By: "the ConfigMap kube-system/kube-proxy"},
		},
		{
			name: "kube_router",
			objects: []runtime.Object{systemDaemonSet("kube-router", corev1.Container{Name: "kube-router",
				Args: []string{"--run-router=true", "--run-firewall=true", "--run-service-proxy=true"}})},
			want: KubeProxy{Mode: KubeProxyIPVS, By: "kube-router in the DaemonSet kube-system/kube-router"},
			text: "ipvs, by kube-router in the DaemonSet kube-system/kube-router",
		},
		{
			name: "kube_router_only_routes",
			objects: []runtime.Object{
				systemDaemonSet("kube-router", corev1.Container{Name: "kube-router", Args: []string{"--run-service-proxy=false"}}),
				systemConfigMap("kube-proxy", "config.conf", kubeadmConfig+"iptables\n"),
			},
			want: KubeProxy{Mode: KubeProxyIPTables, By: "the ConfigMap kube-system/kube-proxy"},
		},
		{
			name:    "k3s",
			objects: []runtime.Object{annotated("n1", "k3s.io/node-args", `["server","--disable","traefik"]`)},
			want:    KubeProxy{Mode: KubeProxyIPTables, By: "the annotation k3s.io/node-args of node n1 (the default)"},
		},
		{
			name: "k3s_in_another_mode_on_our_node",
			objects: []runtime.Object{
				annotated("n0", "k3s.io/node-args", `["server"]`),
				annotated("n1", "k3s.io/node-args", `["agent","--kube-proxy-arg","metrics-bind-address=0.0.0.0","--kube-proxy-arg","proxy-mode=ipvs"]`),
			},
			want: KubeProxy{Mode: KubeProxyIPVS, By: "the annotation k3s.io/node-args of node n1"},
		},
		{
			name:    "k3s_in_one_word",
			objects: []runtime.Object{annotated("n1", "k3s.io/node-args", `["server","--kube-proxy-arg=--proxy-mode=nftables"]`)},
			want:    KubeProxy{Mode: KubeProxyNFTables, By: "the annotation k3s.io/node-args of node n1"},
		},
		{
			name: "k3s_without",
			objects: []runtime.Object{
				annotated("n0", "k3s.io/node-args", `["server","--disable-kube-proxy"]`),
				annotated("n1", "k3s.io/node-args", `["agent"]`),
			},
			want: KubeProxy{Mode: KubeProxyNone, By: "the annotation k3s.io/node-args of node n0"},
		},
		{
			name: "nobody_is_there",
			want: KubeProxy{Mode: KubeProxyNone, By: "the absence of its ConfigMap, DaemonSet and pods"},
			text: "none, by the absence of its ConfigMap, DaemonSet and pods",
		},
		{
			name: "nothing_may_be_asked",
			deny: "get:configmaps list:daemonsets list:pods list:nodes",
			want: KubeProxy{Mode: KubeProxyUnknown, By: "you may not get configmaps in kube-system, list daemonsets in kube-system, " +
				"list pods in kube-system, list nodes"},
		},
		{
			name: "absence_is_no_proof_where_not_all_may_be_asked",
			deny: "list:pods",
			want: KubeProxy{Mode: KubeProxyUnknown, By: "you may not list pods in kube-system"},
			text: "unknown: you may not list pods in kube-system",
		},
		{
			name: "the_configuration_may_not_be_read",
			deny: "get:configmaps",
			want: KubeProxy{Mode: KubeProxyUnknown, By: "you may not get configmaps in kube-system"},
		},
		{
			name:    "a_trace_without_a_configuration",
			objects: []runtime.Object{kubeadmSet},
			want:    KubeProxy{Mode: KubeProxyUnknown, By: "kube-proxy runs, but its configuration was not found"},
		},
		{
			name:    "a_mode_of_old",
			objects: []runtime.Object{systemConfigMap("kube-proxy", "config.conf", kubeadmConfig+"userspace\n")},
			want:    KubeProxy{Mode: KubeProxyUnknown, By: `the ConfigMap kube-system/kube-proxy says "userspace"`},
		},
		{
			name: "two_that_contradict_each_other",
			objects: []runtime.Object{
				systemDaemonSet("kube-proxy-a", corev1.Container{Name: "kube-proxy", Args: []string{"--proxy-mode=ipvs"}}),
				systemDaemonSet("kube-proxy-b", corev1.Container{Name: "kube-proxy", Args: []string{"--proxy-mode=iptables"}}),
			},
			want: KubeProxy{Mode: KubeProxyUnknown, By: "the DaemonSet kube-system/kube-proxy-a says ipvs, the DaemonSet kube-system/kube-proxy-b says iptables"},
		},
	} {
		t.Run(tt.name, func(t *testing.T) {
			q := proxyQuestions{
				kube: fakeCluster(nil, tt.deny, tt.objects...),
				raw: func(_ context.Context, path string) ([]byte, error) {
					if text, ok := tt.raw[path]; ok {
						return []byte(text), nil
					}
					return nil, apierrors.NewNotFound(schema.GroupResource{}, path)
				},
			}
			got := q.find(t.Context(), "n1")
			if d := cmp.Diff(tt.want, got); d != "" {
				t.Errorf("(-want +got):\n%s", d)
			}
			if tt.text != "" && got.String() != tt.text {
				t.Errorf("in words: %q, want %q", got, tt.text)
			}
		})
	}
}

func TestArgumentUsesTheLastValue(t *testing.T) {
	for _, tt := range []struct {
		args  []string
		value string
		given bool
	}{
		{[]string{"--proxy-mode=ipvs"}, "ipvs", true},
		{[]string{"--proxy-mode", "ipvs"}, "ipvs", true},
		{[]string{"--proxy-mode='ipvs'", "--proxy-mode=iptables"}, "iptables", true},
		{[]string{"-proxy-mode=\"ipvs\""}, "ipvs", true},
		{[]string{"--proxy-mode", "--v=2"}, "", true},
		{[]string{"proxy-mode=ipvs", "--proxy-modes=x"}, "", false},
	} {
		if value, given := argument(corev1.Container{Args: tt.args}, "proxy-mode"); value != tt.value || given != tt.given {
			t.Errorf("%q: %q, %v", tt.args, value, given)
		}
	}
}

func TestProofCountsMoreThanAConfiguration(t *testing.T) {
	for name, tt := range map[string]struct {
		p    KubeProxy
		saw  string
		want KubeProxyMode
		text string
	}{
		"k3s has no ConfigMap":         {KubeProxy{Mode: KubeProxyNone, By: "absence"}, api.NodeServesClusterIP, KubeProxyServed, "from a pod of the node n1"},
		"nothing may be read":          {KubeProxy{Mode: KubeProxyUnknown, By: "you may not"}, api.NodeServesClusterIP, KubeProxyServed, "serves ClusterIPs"},
		"the node is not migrated yet": {KubeProxy{Mode: KubeProxyNFTables, By: "a ConfigMap"}, api.NodeServesAsAddress, KubeProxyIPVS, "end at the node n1 itself"},
		"the configuration is true":    {KubeProxy{Mode: KubeProxyNFTables, By: "a ConfigMap"}, api.NodeServesClusterIP, KubeProxyNFTables, "by a ConfigMap"},
		"IPVS without proof":           {KubeProxy{Mode: KubeProxyIPVS, By: "a ConfigMap"}, api.NodeServesClusterIP, KubeProxyIPVS, "by a ConfigMap"},
		"Cilium answers pings":         {KubeProxy{Mode: KubeProxyNone, Replacement: "Cilium", By: "x"}, api.NodeServesAsAddress, KubeProxyNone, "replaced by Cilium"},
		"nothing serves":               {KubeProxy{Mode: KubeProxyNone, By: "absence"}, api.NodeServesNothing, KubeProxyNone, "by absence"},
		"unknown, and nothing answers": {KubeProxy{Mode: KubeProxyUnknown, By: "you may not"}, api.NodeServesNothing, KubeProxyUnknown, "did not answer on the node n1"},
		"an older manager":             {KubeProxy{Mode: KubeProxyIPTables, By: "a ConfigMap"}, "", KubeProxyIPTables, "by a ConfigMap"},
	} {
		t.Run(name, func(t *testing.T) {
			if got := tt.p.Proven(tt.saw, "n1"); got.Mode != tt.want || !strings.Contains(got.String(), tt.text) {
				t.Errorf("%s (%s), want %s (%s)", got.Mode, got, tt.want, tt.text)
			}
		})
	}
}
