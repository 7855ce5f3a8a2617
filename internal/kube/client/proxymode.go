package client

import (
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"regexp"
	"slices"
	"strings"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"sigs.k8s.io/yaml"

	"kubevpn/internal/api"
	"kubevpn/pkg/wakeup"
)

// KubeProxyMode names the mechanism with which nodes serve ClusterIPs.
type KubeProxyMode string

const (
	KubeProxyIPTables KubeProxyMode = "iptables"
	KubeProxyNFTables KubeProxyMode = "nftables"
	KubeProxyIPVS     KubeProxyMode = "ipvs"    // of kube-proxy or kube-router
	KubeProxyNone     KubeProxyMode = "none"    // no kube-proxy: KubeProxy.Replacement serves them, or nothing does
	KubeProxyServed   KubeProxyMode = "served"  // by an unknown mechanism, but the traffic manager's node serves them
	KubeProxyUnknown  KubeProxyMode = "unknown" // no readable source states it
)

// KubeProxy describes the program that serves ClusterIPs, and the source of that knowledge.
type KubeProxy struct {
	Mode KubeProxyMode
	// By is the source: "the ConfigMap kube-system/kube-proxy". For KubeProxyUnknown it is the reason.
	By string
	// Replacement serves ClusterIPs in kube-proxy's place with programs in the kernel: "Cilium". Empty: none does.
	Replacement string
	// PodSockets: Replacement serves ClusterIPs at the sockets of pods and not to packets that a pod forwards.
	PodSockets bool
}

// Proven returns what p is on a node of whose ClusterIPs a traffic manager saw something (api.NodeServes constants). A
// mode in a configuration is one of the cluster, which a node may not have yet; what packets meet counts.
func (p KubeProxy) Proven(saw, node string) KubeProxy {
	configured := p.Mode == KubeProxyIPTables || p.Mode == KubeProxyNFTables
	switch {
	case p.Replacement != "" || p.Mode == KubeProxyIPVS:
	case saw == api.NodeServesAsAddress:
		p = KubeProxy{Mode: KubeProxyIPVS, By: "packets to a ClusterIP, which end at the node " + node + " itself"}
	case saw == api.NodeServesClusterIP && !configured:
		p = KubeProxy{Mode: KubeProxyServed, By: "a connection to a ClusterIP from a pod of the node " + node}
	case saw == api.NodeServesNothing && p.Mode == KubeProxyUnknown:
		p.By += "; a ClusterIP did not answer on the node " + node
	}
	return p
}

// String returns for example "iptables, by the ConfigMap kube-system/kube-proxy".
func (p KubeProxy) String() string {
	switch {
	case p.Replacement != "":
		return fmt.Sprintf("replaced by %s, by %s", p.Replacement, p.By)
	case p.Mode == KubeProxyServed:
		return "of an unknown kind, but serves ClusterIPs, by " + p.By
	case p.Mode == KubeProxyUnknown:
		return "unknown: " + p.By
	}
	return fmt.Sprintf("%s, by %s", p.Mode, p.By)
}

const (
	systemNamespace = "kube-system"
	maxAsked        = 50              // nodes whose kube-proxy NodeModes asks
	proxyTimeout    = 5 * time.Second // for all questions about kube-proxy together
)

// KubeProxy finds out what serves ClusterIPs. It reads the configurations of Cilium, Calico and kube-router, which may
// replace kube-proxy; the ConfigMap, DaemonSets and static pods of kube-proxy; and the arguments of k3s and RKE2 in the
// annotations of nodes, of which that of the given node counts. If the user may read all of these and none mentions
// kube-proxy, there is none. KubeProxy creates nothing and never fails: it returns KubeProxyUnknown.
func (c *Cluster) KubeProxy(ctx context.Context, node string) KubeProxy {
	return proxyQuestions{
		kube: c.kube,
		raw: func(ctx context.Context, path string) ([]byte, error) {
			return c.kube.RESTClient().Get().AbsPath(path).SetHeader("Accept", "application/json, */*").DoRaw(ctx)
		},
	}.find(ctx, node)
}

// proxyQuestions reads the sources of KubeProxy.
type proxyQuestions struct {
	kube kubernetes.Interface
	raw  func(ctx context.Context, path string) ([]byte, error) // GET
}

// proxyQuestion is one source of information about kube-proxy.
type proxyQuestion struct {
	what string // for By of KubeProxyUnknown: "get configmaps in kube-system"
	// ask returns the answers. One without a mode only shows that there is a kube-proxy.
	ask func(ctx context.Context) ([]KubeProxy, error)
}

func (q proxyQuestions) find(ctx context.Context, node string) KubeProxy {
	ctx, cancel := context.WithTimeout(ctx, proxyTimeout)
	defer cancel()
	questions := []proxyQuestion{ // the most reliable first
		{"get configmaps in kube-system", q.cilium},
		{"get felixconfigurations", q.calico},
		{"list daemonsets in kube-system", q.daemonSets},
		{"list pods in kube-system", q.staticPods},
		{"get configmaps in kube-system", q.configMaps},
		{"list nodes", func(ctx context.Context) ([]KubeProxy, error) { return q.distributions(ctx, node) }},
	}
	answers, errs := make([][]KubeProxy, len(questions)), make([]error, len(questions))
	var wg sync.WaitGroup
	for i, question := range questions {
		wg.Go(func() { answers[i], errs[i] = question.ask(ctx) })
	}
	wg.Wait()
	var forbidden, missing []string
	for i, err := range errs {
		switch what := questions[i].what; {
		case err == nil, apierrors.IsNotFound(err):
		case !apierrors.IsForbidden(err):
			missing = append(missing, what+": "+err.Error())
		case !slices.Contains(forbidden, what):
			forbidden = append(forbidden, what)
		}
	}
	if len(forbidden) > 0 {
		missing = append([]string{"you may not " + strings.Join(forbidden, ", ")}, missing...)
	}
	found, traced := decideProxy(answers)
	if found.Mode != "" {
		return found
	}
	switch {
	case found.By != "": // they contradict each other
		found.Mode = KubeProxyUnknown
		return found
	case traced && len(missing) == 0:
		return KubeProxy{Mode: KubeProxyUnknown, By: "kube-proxy runs, but its configuration was not found"}
	case len(missing) > 0:
		return KubeProxy{Mode: KubeProxyUnknown, By: strings.Join(missing, "; ")}
	}
	return KubeProxy{Mode: KubeProxyNone, By: "the absence of its ConfigMap, DaemonSet and pods"}
}

// NodeModes asks the kube-proxies themselves, at their metrics port, through the API server: the names of nodes by
// mode. It lacks nodes whose kube-proxy cannot be asked: kubeadm has it listen on 127.0.0.1, and the user needs the
// right to get nodes/proxy.
func (c *Cluster) NodeModes(ctx context.Context) map[KubeProxyMode][]string {
	ctx, cancel := context.WithTimeout(ctx, proxyTimeout)
	defer cancel()
	list, err := c.kube.CoreV1().Nodes().List(ctx, metav1.ListOptions{ResourceVersion: "0"})
	if err != nil {
		return nil
	}
	nodes := list.Items[:min(len(list.Items), maxAsked)]
	said := wakeup.All(nodes, func(n corev1.Node) KubeProxyMode {
		text, err := c.kube.CoreV1().RESTClient().Get().Resource("nodes").Name(n.Name + ":10249").
			SubResource("proxy").Suffix("proxyMode").DoRaw(ctx)
		if p := proxyByName(string(text), ""); err == nil && len(text) > 0 && p.Mode != KubeProxyUnknown {
			return p.Mode
		}
		return "" // whoever does not answer is left out
	})
	modes := map[KubeProxyMode][]string{}
	for i, n := range nodes {
		if said[i] != "" {
			modes[said[i]] = append(modes[said[i]], n.Name)
		}
	}
	return modes
}

// decideProxy returns the first answer that states a mode. If the findings of one answer contradict each other, it
// returns no mode and ignores the less reliable answers.
func decideProxy(answers [][]KubeProxy) (found KubeProxy, traced bool) {
	for _, all := range answers {
		for _, c := range all {
			switch {
			case c.Mode == "":
				traced = true
			case found.Mode == "":
				found = c
			case found.Mode != c.Mode:
				return KubeProxy{By: fmt.Sprintf("%s says %s, %s says %s", found.By, found.Mode, c.By, c.Mode)}, true
			}
		}
		if found.Mode != "" {
			return found, traced
		}
	}
	return found, traced
}

// cilium reads Cilium's configuration. If it replaces kube-proxy, it serves ClusterIPs even if a kube-proxy still runs.
func (q proxyQuestions) cilium(ctx context.Context) ([]KubeProxy, error) {
	const name = "cilium-config"
	cm, err := q.kube.CoreV1().ConfigMaps(systemNamespace).Get(ctx, name, metav1.GetOptions{})
	if err != nil {
		return nil, err
	}
	switch cm.Data["kube-proxy-replacement"] { // strict: before Cilium 1.14
	case "true", "strict":
		p := KubeProxy{Mode: KubeProxyNone, Replacement: "Cilium", By: configMap(name),
			PodSockets: cm.Data["bpf-lb-sock-hostns-only"] != "true"}
		if cm.Data["enable-host-legacy-routing"] != "true" {
			p.By += ", with BPF host routing: packets of pods bypass the node's netfilter"
		}
		return []KubeProxy{p}, nil
	}
	return nil, nil
}

// calico reads Calico's configuration object. A cluster without Calico does not know the kind.
func (q proxyQuestions) calico(ctx context.Context) ([]KubeProxy, error) {
	data, err := q.raw(ctx, "/apis/crd.projectcalico.org/v1/felixconfigurations/default")
	if err != nil {
		return nil, err
	}
	var felix struct {
		Spec struct {
			BPFEnabled bool `json:"bpfEnabled"`
		} `json:"spec"`
	}
	if err := json.Unmarshal(data, &felix); err != nil {
		return nil, fmt.Errorf("reading FelixConfiguration default: %w", err)
	}
	if !felix.Spec.BPFEnabled {
		return nil, nil
	}
	return []KubeProxy{{Mode: KubeProxyNone, Replacement: "Calico (eBPF)", By: "FelixConfiguration default"}}, nil
}

func (q proxyQuestions) daemonSets(ctx context.Context) ([]KubeProxy, error) {
	list, err := q.kube.AppsV1().DaemonSets(systemNamespace).List(ctx, metav1.ListOptions{Limit: listLimit})
	if err != nil {
		return nil, err
	}
	var replaced, findings []KubeProxy
	for _, d := range list.Items {
		by := "the DaemonSet " + systemNamespace + "/" + d.Name
		for _, c := range d.Spec.Template.Spec.Containers {
			switch {
			case runs(c, "calico-node") && variable(c, "FELIX_BPFENABLED") == "true":
				replaced = append(replaced, KubeProxy{Mode: KubeProxyNone, Replacement: "Calico (eBPF)", By: by})
			case runs(c, "kube-router"):
				if on, given := argument(c, "run-service-proxy"); !given || on != "false" { // it is on by default
					replaced = append(replaced, KubeProxy{Mode: KubeProxyIPVS, By: "kube-router in " + by})
				}
			}
		}
		findings = append(findings, proxyFindings(d.Spec.Template.Spec, by)...)
	}
	if len(replaced) > 0 { // the arguments of a kube-proxy that still runs do not matter
		return replaced[:1], nil
	}
	return findings, nil
}

// staticPods finds kube-proxies that no DaemonSet runs, as in RKE2 and GKE.
func (q proxyQuestions) staticPods(ctx context.Context) ([]KubeProxy, error) {
	list, err := q.kube.CoreV1().Pods(systemNamespace).List(ctx,
		metav1.ListOptions{LabelSelector: "component=kube-proxy", Limit: listLimit})
	if err != nil {
		return nil, err
	}
	var findings []KubeProxy
	for _, p := range list.Items {
		findings = append(findings, proxyFindings(p.Spec, "the pod "+systemNamespace+"/"+p.Name)...)
	}
	return findings, nil
}

// proxyFindings reads the arguments of a pod's kube-proxy, if it has one. With --config, kube-proxy ignores the others.
func proxyFindings(pod corev1.PodSpec, by string) []KubeProxy {
	if pod.NodeSelector[corev1.LabelOSStable] == "windows" {
		return nil
	}
	var findings []KubeProxy
	for _, c := range pod.Containers {
		if !runs(c, "kube-proxy") {
			continue
		}
		var found KubeProxy
		if _, file := argument(c, "config"); !file {
			mode, _ := argument(c, "proxy-mode")
			found = proxyByName(mode, by)
		}
		findings = append(findings, found)
	}
	return findings
}

// configMaps reads kube-proxy's configuration, under the names of kubeadm and of EKS, at any key.
func (q proxyQuestions) configMaps(ctx context.Context) ([]KubeProxy, error) {
	for _, name := range []string{"kube-proxy", "kube-proxy-config"} {
		cm, err := q.kube.CoreV1().ConfigMaps(systemNamespace).Get(ctx, name, metav1.GetOptions{})
		if apierrors.IsNotFound(err) {
			continue
		}
		if err != nil {
			return nil, err
		}
		for _, text := range cm.Data {
			var config struct {
				Kind string `json:"kind"`
				Mode string `json:"mode"`
			}
			if yaml.Unmarshal([]byte(text), &config) == nil && config.Kind == "KubeProxyConfiguration" {
				return []KubeProxy{proxyByName(config.Mode, configMap(name))}, nil
			}
		}
	}
	return nil, nil
}

func configMap(name string) string { return "the ConfigMap " + systemNamespace + "/" + name }

// innerMode matches kube-proxy's mode in the arguments of k3s: --kube-proxy-arg=proxy-mode=ipvs, or in two words.
var innerMode = regexp.MustCompile(`-kube-proxy-arg[= ]-*proxy-mode=(\S+)`)

// distributions reads the arguments that k3s and RKE2 write to annotations of their nodes. In k3s, kube-proxy is part
// of the program and runs unless a server disables it.
func (q proxyQuestions) distributions(ctx context.Context, node string) ([]KubeProxy, error) {
	list, err := q.kube.CoreV1().Nodes().List(ctx, metav1.ListOptions{ResourceVersion: "0"})
	if err != nil {
		return nil, err
	}
	var own []KubeProxy
	for _, n := range list.Items {
		for _, annotation := range []string{"k3s.io/node-args", "rke2.io/node-args"} {
			var args []string
			if text := n.Annotations[annotation]; text == "" || json.Unmarshal([]byte(text), &args) != nil {
				continue
			}
			c := corev1.Container{Args: args}
			by := "the annotation " + annotation + " of node " + n.Name
			if off, given := argument(c, "disable-kube-proxy"); given && off != "false" {
				return []KubeProxy{{Mode: KubeProxyNone, By: by}}, nil
			}
			if node != "" && n.Name != node {
				continue
			}
			mode := ""
			for _, m := range innerMode.FindAllStringSubmatch(strings.Join(args, " "), -1) {
				mode = m[1] // the last one counts
			}
			own = append(own, proxyByName(mode, by))
		}
	}
	return own, nil
}

// proxyByName converts a mode of kube-proxy's configuration. An empty mode means iptables on Linux.
func proxyByName(mode, by string) KubeProxy {
	switch m := KubeProxyMode(strings.ToLower(mode)); m {
	case "":
		return KubeProxy{Mode: KubeProxyIPTables, By: by + " (the default)"}
	case KubeProxyIPTables, KubeProxyNFTables, KubeProxyIPVS:
		return KubeProxy{Mode: m, By: by}
	}
	return KubeProxy{Mode: KubeProxyUnknown, By: fmt.Sprintf("%s says %q", by, mode)}
}

// runs reports whether a container runs the program, by its name or its command.
func runs(c corev1.Container, program string) bool {
	if c.Name == program {
		return true
	}
	return slices.ContainsFunc(words(c), func(w string) bool {
		return w == program || strings.HasSuffix(w, "/"+program)
	})
}

// words returns the words of a container's command line, and of a shell command in it.
func words(c corev1.Container) []string {
	var out []string
	for _, part := range slices.Concat(c.Command, c.Args) {
		out = append(out, strings.Fields(part)...)
	}
	return out
}

// argument returns the value of a flag: the text after an equals sign, or the next word unless that is a flag.
func argument(c corev1.Container, name string) (value string, given bool) {
	all := words(c)
	for i, w := range all {
		flag, rest, equals := strings.Cut(strings.TrimLeft(w, "-"), "=")
		if flag != name || !strings.HasPrefix(w, "-") {
			continue
		}
		if !equals && i+1 < len(all) && !strings.HasPrefix(all[i+1], "-") {
			rest = all[i+1]
		}
		value, given = strings.Trim(rest, `"'`), true // the last one counts
	}
	return value, given
}

func variable(c corev1.Container, name string) string {
	e := api.Find(c.Env, func(e corev1.EnvVar) bool { return e.Name == name })
	return strings.ToLower(cmp.Or(e, new(corev1.EnvVar)).Value)
}
