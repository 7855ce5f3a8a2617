package connection

import (
	"os"
	"slices"
	"strings"
	"testing"

	"kubevpn/internal/api"
	"kubevpn/internal/kube/client"
)

// choiceRow is a row of the table in docs/netstacks.md. Each cell contains the values that it matches, or "any".
type choiceRow struct {
	asked, proxy, gateway, probe []string
	result                       string
}

func choiceTable(t *testing.T) []choiceRow {
	t.Helper()
	const file = "../../../docs/netstacks.md"
	text, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	const head = "| asked for | kube-proxy | gateway | probe | netstack |\n|---|---|---|---|---|\n"
	_, table, found := strings.Cut(string(text), head)
	if !found {
		t.Fatalf("%s has no table that begins with\n%s", file, head)
	}
	var rows []choiceRow
	for line := range strings.Lines(table) {
		cells := strings.Split(strings.Trim(strings.TrimSpace(line), "|"), "|")
		if len(cells) != 5 {
			break
		}
		list := func(i int) []string { return strings.Split(strings.TrimSpace(cells[i]), ", ") }
		rows = append(rows, choiceRow{list(0), list(1), list(2), list(3), strings.TrimSpace(cells[4])})
	}
	return rows
}

func (r choiceRow) fits(asked, proxy, gateway, probe string) bool {
	in := func(cell []string, value string) bool { return cell[0] == "any" || slices.Contains(cell, value) }
	return in(r.asked, asked) && in(r.proxy, proxy) && in(r.gateway, gateway) && in(r.probe, probe)
}

func TestChoiceMatchesTheDocumentedTable(t *testing.T) {
	proxies := map[string]client.KubeProxy{
		"iptables": {Mode: client.KubeProxyIPTables}, "nftables": {Mode: client.KubeProxyNFTables}, "ipvs": {Mode: client.KubeProxyIPVS},
		"served": {Mode: client.KubeProxyServed}, "none": {Mode: client.KubeProxyNone}, "unknown": {Mode: client.KubeProxyUnknown},
		"replaced": {Mode: client.KubeProxyNone, Replacement: "Cilium"},
	}
	gateways := map[string]*api.Error{"admitted": nil, "refused": api.Errorf(api.ExitPermission, "no")}
	probes := map[string]string{"passed": "", "failed": "pod 10.244.0.2:80: no answer"}
	rows := choiceTable(t)
	used := make([]bool, len(rows))
	for _, asked := range []string{"auto", "gvisor", "system"} {
		for proxy, p := range proxies {
			for gateway, refusal := range gateways {
				for probe, failed := range probes {
					f := facts{Asked: asked, Proxy: p, Refusal: refusal, Failed: failed}
					got := choose(f)
					result := got.Netstack
					if got.Err != nil {
						result = "error 42"
						if got.Err.Code != api.ExitNetstack || got.Netstack != "" {
							t.Errorf("%+v: %+v", f, got)
						}
					}
					i := slices.IndexFunc(rows, func(r choiceRow) bool { return r.fits(asked, proxy, gateway, probe) })
					if i < 0 {
						t.Errorf("no row for %s, %s, %s, %s", asked, proxy, gateway, probe)
						continue
					}
					used[i] = true
					if rows[i].result != result {
						t.Errorf("%s, %s, %s, %s: documented is %s, chosen is %s", asked, proxy, gateway, probe, rows[i].result, result)
					}
					if refusal != nil && !f.asksGateway() {
						// Then the gateway is not asked for, so it must not matter.
						f.Refusal = nil
						if again := choose(f); again != got {
							t.Errorf("%s, %s: %+v without an answer of the gateway, %+v with one", asked, proxy, again, got)
						}
					}
				}
			}
		}
	}
	for i, u := range used {
		if !u {
			t.Errorf("row %d is for nothing: %v", i+1, rows[i])
		}
	}
}

func TestChoiceStatesItsReason(t *testing.T) {
	iptables := client.KubeProxy{Mode: client.KubeProxyIPTables, By: "the ConfigMap kube-system/kube-proxy"}
	ipvs := client.KubeProxy{Mode: client.KubeProxyIPVS, By: "the ConfigMap kube-system/kube-proxy"}
	refusal := api.Errorf(api.ExitPermission, "jane may not patch pods/ephemeralcontainers in namespace kubevpn").WithHint("Ask a cluster admin to run:\nkubectl x")
	for _, tt := range []struct {
		name                string
		in                  facts
		netstack, reason    string
		failure, suggestion string
	}{
		{
			name: "system", in: facts{Asked: "auto", Proxy: iptables}, netstack: "system",
			reason: "kube-proxy is iptables, by the ConfigMap kube-system/kube-proxy, and the gateway is admitted",
		},
		{
			name: "ipvs", in: facts{Asked: "auto", Proxy: ipvs}, netstack: "gvisor",
			reason: "ClusterIPs are served by IPVS, by the ConfigMap kube-system/kube-proxy, which masqueraded packets do not always get through",
		},
		{
			name: "no_kube_proxy", netstack: "gvisor",
			in:     facts{Asked: "auto", Proxy: client.KubeProxy{Mode: client.KubeProxyNone, By: "the absence of its ConfigMap, DaemonSet and pods"}},
			reason: "no kube-proxy serves ClusterIPs, judging by the absence of its ConfigMap, DaemonSet and pods",
		},
		{
			name: "cilium", netstack: "gvisor",
			in:     facts{Asked: "auto", Proxy: client.KubeProxy{Mode: client.KubeProxyNone, Replacement: "Cilium", By: "the ConfigMap kube-system/cilium-config"}},
			reason: "Cilium serves ClusterIPs in kube-proxy's place, by the ConfigMap kube-system/cilium-config, and how it treats forwarded packets is unknown",
		},
		{
			name: "unknown", netstack: "gvisor",
			in:     facts{Asked: "auto", Proxy: client.KubeProxy{Mode: client.KubeProxyUnknown, By: "you may not list nodes"}},
			reason: "kube-proxy's mode is unknown: you may not list nodes",
		},
		{
			name: "refused", netstack: "gvisor",
			in:     facts{Asked: "auto", Proxy: iptables, Refusal: refusal},
			reason: "kube-proxy is iptables, by the ConfigMap kube-system/kube-proxy; but the system netstack is not available: jane may not patch pods/ephemeralcontainers in namespace kubevpn",
		},
		{
			name: "restricted", netstack: "gvisor",
			in: facts{Asked: "auto", Proxy: iptables, Refusal: api.Errorf(api.ExitNetstack,
				`pod security does not admit the gateway in the namespace kubevpn: violates PodSecurity "restricted:latest": unrestricted capabilities (container "gateway-1" must not include "MKNOD")`)},
			reason: `kube-proxy is iptables, by the ConfigMap kube-system/kube-proxy; but the system netstack is not available: pod security does not admit the gateway in the namespace kubevpn: violates PodSecurity "restricted:latest"`,
		},
		{
			name: "failed", netstack: "gvisor",
			in:     facts{Asked: "auto", Proxy: iptables, Failed: "clusterIP 10.96.0.1:443: no answer"},
			reason: "kube-proxy is iptables, by the ConfigMap kube-system/kube-proxy; but the system netstack was tried and does not reach clusterIP 10.96.0.1:443: no answer",
		},
		{
			name: "system_refused", in: facts{Asked: "system", Proxy: iptables, Refusal: refusal},
			failure:    "the system netstack is not available: jane may not patch pods/ephemeralcontainers in namespace kubevpn",
			suggestion: "Ask a cluster admin to run:\nkubectl x\nWithout it: `kubevpn connect --netstack gvisor`",
		},
		{
			name: "system_failed", in: facts{Asked: "system", Proxy: ipvs, Failed: "clusterIP 10.96.0.1:443: no answer"},
			failure:    "the system netstack does not reach clusterIP 10.96.0.1:443: no answer (kube-proxy: ipvs, by the ConfigMap kube-system/kube-proxy)",
			suggestion: "`kubevpn connect --netstack gvisor` was tried just now, and reaches all of it.",
		},
	} {
		t.Run(tt.name, func(t *testing.T) {
			got := choose(tt.in)
			if got.Netstack != tt.netstack || got.Reason != tt.reason {
				t.Errorf("got %s: %s\nwant %s: %s", got.Netstack, got.Reason, tt.netstack, tt.reason)
			}
			if tt.failure == "" && got.Err != nil || tt.failure != "" && (got.Err == nil || got.Err.Message != tt.failure || got.Err.Hint != tt.suggestion) {
				t.Errorf("got error %+v", got.Err)
			}
		})
	}
}
