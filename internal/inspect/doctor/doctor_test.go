package doctor

import (
	"context"
	"errors"
	"net/netip"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"go.uber.org/goleak"

	"kubevpn/internal/api"
	"kubevpn/internal/config"
	"kubevpn/internal/inspect/check"
	"kubevpn/internal/kube/client"
	"kubevpn/internal/kube/install"
	"kubevpn/internal/process/version"
	"kubevpn/pkg/host/osdns"
	"kubevpn/pkg/host/route"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// complete checks that a fault says what to do.
func complete(t *testing.T, f api.Finding) {
	t.Helper()
	switch f.Verdict {
	case api.VerdictWarning, api.VerdictFailed:
		if f.Cause == "" || f.Effect == "" || f.Fix == "" || (f.Code == 0) != (f.Verdict == api.VerdictWarning) {
			t.Errorf("the finding is incomplete: %+v", f)
		}
	default:
		if f.Seen == "" || f.Cause+f.Effect+f.Fix != "" || f.Code != 0 {
			t.Errorf("the finding has too much or too little: %+v", f)
		}
	}
}

// The race detector sees it if the diagnosis reads what the check writes.
func TestKubeconfigThatHangsMayEndLater(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c, err := client.Load([]byte(`{clusters: [{name: c, cluster: {server: "https://cluster"}}], contexts: [{name: c, context: {cluster: c}}], current-context: c}`), client.Options{})
		if err != nil {
			t.Fatal(err)
		}
		f := &facts{Config: Config{
			Load: func() (client.Prepared, *client.Cluster, error) {
				time.Sleep(2 * check.Timeout)
				return client.Prepared{}, c, nil
			},
		}}
		if d := diagnose(t.Context(), f, []check.Check[*facts]{{Section: "s", Name: checkKubeconfig, Do: kubeconfig}}); d.Findings[0].Verdict != api.VerdictFailed {
			t.Errorf("%+v", d.Findings[0])
		}
		time.Sleep(2 * check.Timeout) // until the check has ended
	})
}

func TestChecksNeedChecksThatExist(t *testing.T) {
	names := map[string]bool{}
	for _, c := range checks() {
		if names[c.Name] {
			t.Errorf("two checks are named %q", c.Name)
		}
		names[c.Name] = true
	}
	for _, c := range checks() {
		if c.Needs != "" && !names[c.Needs] {
			t.Errorf("%q needs %q, which does not exist", c.Name, c.Needs)
		}
	}
}

// It works without a kubeconfig and without a daemon.
func TestRunWithoutAnything(t *testing.T) {
	d := Run(t.Context(), Config{
		Load: func() (client.Prepared, *client.Cluster, error) {
			return client.Prepared{}, nil, api.Errorf(api.ExitKubeconfig, "no kubeconfig").WithHint("--kubeconfig FILE")
		},
		Status: func(context.Context) (api.Status, error) { return api.Status{Version: version.Full()}, nil },
		Paths:  config.Paths{StateDir: t.TempDir() + "/not/yet"},
	})
	if len(d.Findings) != len(checks()) {
		t.Errorf("%d findings of %d checks", len(d.Findings), len(checks()))
	}
	for _, f := range d.Findings {
		complete(t, f)
		if f.Section == sectionCluster && f.Verdict != api.VerdictSkipped {
			t.Errorf("%+v", f)
		}
	}
}

// finding is what a judging function must return.
type finding struct {
	verdict api.Verdict
	code    api.ExitCode
	text    string // in Seen or Cause
	fix     string // in Fix
}

func (want finding) check(t *testing.T, got api.Finding) {
	t.Helper()
	complete(t, got)
	if got.Verdict != want.verdict || got.Code != want.code || !strings.Contains(got.Seen+got.Cause, want.text) ||
		!strings.Contains(got.Fix, want.fix) {
		t.Errorf("want %+v, got %+v", want, got)
	}
}

const (
	fine   = api.VerdictOK
	warns  = api.VerdictWarning
	fails  = api.VerdictFailed
	passed = api.VerdictSkipped
)

func TestDaemonReportsFaultsOfConnections(t *testing.T) {
	broken := api.Errorf(api.ExitLost, "the root helper ended").WithHint("kubevpn connect")
	for name, tt := range map[string]struct {
		status api.Status
		err    error
		want   finding
	}{
		"none runs":       {status: api.Status{Version: version.Full()}, want: finding{fine, 0, "no connection", ""}},
		"does not answer": {err: api.Errorf(api.ExitDaemon, "the daemon does not answer").WithHint("kill 1"), want: finding{fails, api.ExitDaemon, "does not answer", "kill 1"}},
		"other version":   {status: api.Status{Version: "2"}, want: finding{warns, 0, "the daemon is kubevpn 2", "kubevpn quit"}},
		"connected": {status: api.Status{Version: version.Full(), Connections: []api.Connection{{Status: api.StatusConnected}}},
			want: finding{fine, 0, "1 connection", ""}},
		"failed": {status: api.Status{Version: version.Full(), Connections: []api.Connection{{ID: "c1", Status: api.StatusFailed, Error: broken}}},
			want: finding{fails, api.ExitLost, "c1", "kubevpn connect"}},
		"reconnecting": {status: api.Status{Version: version.Full(), Connections: []api.Connection{{Status: api.StatusReconnecting, Error: broken}}},
			want: finding{warns, 0, "reconnecting", "kubevpn connect"}},
		"probe": {status: api.Status{Version: version.Full(), Connections: []api.Connection{{Checks: []api.Check{{What: "pod", Target: "10.1.1.1:80", Seen: "no answer"}}}}},
			want: finding{warns, 0, "did not reach the pod 10.1.1.1:80: no answer", "status"}},
		"warning": {status: api.Status{Version: version.Full(), Connections: []api.Connection{{Warnings: []string{"10.9.0.0/16 is not routed"}}}},
			want: finding{warns, 0, "10.9.0.0/16 is not routed", "status"}},
	} {
		t.Run(name, func(t *testing.T) {
			f := &facts{status: func() (api.Status, error) { return tt.status, tt.err }}
			tt.want.check(t, daemon(t.Context(), f))
		})
	}
}

func TestResolverOf(t *testing.T) {
	nm := osdns.Inspection{Mode: osdns.ModeNFTables, File: "/etc/resolv.conf", Writer: "NetworkManager"}
	edited, file, odd, none := nm, nm, nm, nm
	edited.Edited = true
	file.Mode, file.Warnings = osdns.ModeFile, []string{"nftables cannot redirect DNS"}
	odd.Warnings = []string{"resolv.conf bypasses systemd-resolved"}
	none.Mode, none.Warnings = osdns.ModeNone, []string{"no listener"}
	for name, tt := range map[string]struct {
		i                 osdns.Inspection
		connected, fought bool
		want              finding
	}{
		"usual":                   {nm, false, false, finding{fine, 0, "nftables; the file is /etc/resolv.conf, which NetworkManager writes", ""}},
		"fight":                   {nm, false, true, finding{warns, 0, "NetworkManager keeps changing", "lsof"}},
		"left edit":               {edited, false, false, finding{warns, 0, "was killed", "kubevpn connect"}},
		"edit of this connection": {edited, true, false, finding{fine, 0, "nftables", ""}},
		"edit to come":            {file, false, false, finding{warns, 0, "will edit", "nf_tables"}},
		"bypass":                  {odd, false, false, finding{warns, 0, "bypasses", "stub-resolv.conf"}},
		"nothing fits":            {none, false, false, finding{fails, api.ExitNetwork, "no listener", "nf_tables"}},
	} {
		t.Run(name, func(t *testing.T) { tt.want.check(t, resolverOf(tt.i, tt.connected, tt.fought)) })
	}
}

func TestNameserversOf(t *testing.T) {
	servers := []netip.AddrPort{netip.MustParseAddrPort("10.0.0.53:53"), netip.MustParseAddrPort("[fd00::53]:53")}
	finding{fine, 0, "10.0.0.53, fd00::53 answer", ""}.check(t, nameserversOf(servers, []string{"", ""}))
	finding{warns, 0, "fd00::53 (no answer)", "resolvectl"}.check(t, nameserversOf(servers, []string{"", "no answer"}))
	finding{fails, api.ExitNetwork, "no nameserver of this machine answers", "resolvectl"}.check(t, nameserversOf(servers, []string{"refused", "no answer"}))
	finding{warns, 0, "no nameserver", "resolv.conf"}.check(t, nameserversOf(nil, nil))
}

func prefixes(texts ...string) (out []netip.Prefix) {
	for _, text := range texts {
		out = append(out, netip.MustParsePrefix(text))
	}
	return out
}

func TestVPNsOf(t *testing.T) {
	for name, tt := range map[string]struct {
		tunnels []route.Tunnel
		want    finding
	}{
		"none":          {nil, finding{fine, 0, "there is none", ""}},
		"kubevpn's own": {[]route.Tunnel{{Link: "kubevpn0", Routes: prefixes("0.0.0.0/0")}}, finding{fine, 0, "there is none", ""}},
		"split":         {[]route.Tunnel{{Link: "wg0", Kind: "wireguard", Routes: prefixes("10.8.0.0/16")}}, finding{fine, 0, "wg0 (wireguard: 10.8.0.0/16)", ""}},
		"default route": {[]route.Tunnel{{Link: "tun0", Kind: "tun", Routes: prefixes("0.0.0.0/0")}}, finding{warns, 0, "takes all traffic of this machine: tun0 (tun)", "ip link set tun0 down"}},
		"two halves":    {[]route.Tunnel{{Link: "tun0", Kind: "tun", Routes: prefixes("128.0.0.0/1", "0.0.0.0/1")}}, finding{warns, 0, "tun0", "ip link set tun0 down"}},
		"one half":      {[]route.Tunnel{{Link: "tun0", Kind: "tun", Routes: prefixes("128.0.0.0/1")}}, finding{fine, 0, "tun0 (tun: 128.0.0.0/1)", ""}},
	} {
		t.Run(name, func(t *testing.T) { tt.want.check(t, vpnsOf(tt.tunnels)) })
	}
}

func TestForeseenNamesOverlapAndGuess(t *testing.T) {
	overlap := api.Errorf(api.ExitOverlap, "the cluster's network overlaps a local one").
		WithHint("Nothing was changed. To go on:\n  kubevpn connect --exclude-cidr 10.0.0.0/8")
	finding{fails, api.ExitOverlap, "overlaps", "kubevpn connect --exclude-cidr 10.0.0.0/8"}.check(t, foreseen(api.Foresight{Overlap: overlap}))
	finding{warns, 0, "is guessed", "--extra-cidr"}.check(t, foreseen(api.Foresight{Warnings: []string{"10.1.0.0/24 is not routed: it is guessed, and it overlaps eth0"}}))
	finding{fine, 0, "10.96.0.0/12, 10.244.1.0/24", ""}.check(t, foreseen(api.Foresight{Routes: prefixes("10.244.1.0/24", "10.96.0.0/12")}))
}

func TestCredentialsOf(t *testing.T) {
	now := time.Date(2026, 11, 23, 12, 0, 0, 0, time.UTC)
	at := func(d time.Duration, renewed bool) api.Finding {
		return credentialsOf(client.Credentials{Kind: "the token", Expires: now.Add(d), Renewed: renewed}, now)
	}
	finding{fine, 0, "the token", ""}.check(t, credentialsOf(client.Credentials{Kind: "the token"}, now))
	finding{fine, 0, "valid for another 3d", ""}.check(t, at(72*time.Hour, false))
	finding{warns, 0, "expires in 12m", "log in"}.check(t, at(12*time.Minute, false))
	finding{fine, 0, "valid for another 10m", ""}.check(t, at(10*time.Minute, true))
	finding{fails, api.ExitCredentials, "expired 120m ago", "kubectl auth whoami"}.check(t, at(-2*time.Hour, false))
}

func TestClockOf(t *testing.T) {
	finding{fine, 0, "within 1s", ""}.check(t, clockOf(300*time.Millisecond))
	finding{fine, 0, "within 40s", ""}.check(t, clockOf(-40*time.Second))
	finding{warns, 0, "clock is 2m0s behind", "set-ntp"}.check(t, clockOf(2*time.Minute))
	finding{warns, 0, "clock is 24h0m0s ahead of", "set-ntp"}.check(t, clockOf(-24*time.Hour))
}

func TestManagerOf(t *testing.T) {
	lacks := []client.Permission{{Verb: "create", Resource: "pods/portforward", Namespace: "kubevpn"}}
	for name, tt := range map[string]struct {
		m    install.Inspection
		want finding
	}{
		"ready":       {install.Inspection{Namespace: "kubevpn", Installed: true, Pod: "m-1", Image: "i:1"}, finding{fine, 0, "pod kubevpn/m-1, image i:1", ""}},
		"none":        {install.Inspection{Namespace: "kubevpn"}, finding{fine, 0, "installs it in the namespace kubevpn", ""}},
		"may not use": {install.Inspection{Namespace: "kubevpn", Installed: true, Lacking: lacks, Ask: "  kubevpn install"}, finding{fails, api.ExitPermission, "use the traffic manager in the namespace kubevpn: this requires the right to create pods/portforward", "kubevpn install"}},
		"may not":     {install.Inspection{Namespace: "kubevpn", Lacking: lacks, Ask: "  kubevpn install"}, finding{fails, api.ExitPermission, "you may not install", "kubevpn install"}},
		"starting":    {install.Inspection{Installed: true, Starting: true, Problem: api.Errorf(api.ExitNotReady, "is not ready").WithHint("kubectl describe")}, finding{warns, 0, "is not ready", "kubectl describe"}},
		"not ready":   {install.Inspection{Installed: true, Problem: api.Errorf(api.ExitNotReady, "scaled to zero").WithHint("kubectl scale")}, finding{fails, api.ExitNotReady, "scaled to zero", "kubectl scale"}},
	} {
		t.Run(name, func(t *testing.T) {
			f := &facts{manager: func() (install.Inspection, error) { return tt.m, nil }}
			tt.want.check(t, manager(t.Context(), f))
		})
	}
}

func TestManagerVersion(t *testing.T) {
	own := version.String()
	finding{fine, 0, own + ", as this program", ""}.check(t, managerVersion(t.Context(), &facts{managerVersion: own}))
	finding{warns, 0, "the traffic manager is kubevpn 0.0.1, and this is " + own, "--upgrade"}.check(t, managerVersion(t.Context(), &facts{managerVersion: "0.0.1"}))
}

func TestManagerRights(t *testing.T) {
	f := &facts{
		status:  func() (api.Status, error) { return api.Status{}, nil },
		manager: func() (install.Inspection, error) { return install.Inspection{Namespace: "team"}, nil },
	}
	finding{fine, 0, "it may read Services", ""}.check(t, managerRights(t.Context(), f))
	f.missing = []string{"list nodes", "list services"}
	finding{warns, 0, "may not list nodes, list services", "kubevpn install --manager-namespace team"}.check(t, managerRights(t.Context(), f))
}

func TestProxyOf(t *testing.T) {
	for name, tt := range map[string]struct {
		p     client.KubeProxy
		modes map[client.KubeProxyMode][]string
		want  finding
	}{
		"iptables":    {client.KubeProxy{Mode: client.KubeProxyIPTables, By: "the ConfigMap x"}, nil, finding{fine, 0, "iptables, by the ConfigMap x", ""}},
		"ipvs":        {client.KubeProxy{Mode: client.KubeProxyIPVS, By: "the ConfigMap x"}, nil, finding{warns, 0, "IPVS, by the ConfigMap x", "mode: nftables"}},
		"kube-router": {client.KubeProxy{Mode: client.KubeProxyIPVS, By: "kube-router in the DaemonSet x"}, nil, finding{fine, 0, "ipvs, by kube-router", ""}},
		"a node still has IPVS": {client.KubeProxy{Mode: client.KubeProxyNFTables, By: "the ConfigMap x"},
			map[client.KubeProxyMode][]string{"ipvs": {"a"}, "nftables": {"b", "c"}},
			finding{warns, 0, "ipvs on a, nftables on b, c; in the cluster's configuration it is nftables, by the ConfigMap x", "mode: nftables"}},
		"nodes say it, no object does": {client.KubeProxy{Mode: client.KubeProxyNone, By: "its absence"},
			map[client.KubeProxyMode][]string{"iptables": {"a"}}, finding{fine, 0, "iptables on a; in the cluster's configuration it is none", ""}},
		"Cilium at sockets": {client.KubeProxy{Mode: client.KubeProxyNone, Replacement: "Cilium", By: "cilium-config", PodSockets: true}, nil,
			finding{warns, 0, "replaced by Cilium, by cilium-config; socketLB.hostNamespaceOnly is off", "--set socketLB.hostNamespaceOnly=true"}},
		"none":    {client.KubeProxy{Mode: client.KubeProxyNone, By: "its absence"}, nil, finding{warns, 0, "no kube-proxy serves ClusterIPs", "--netstack gvisor"}},
		"Cilium":  {client.KubeProxy{Mode: client.KubeProxyNone, Replacement: "Cilium", By: "cilium-config"}, nil, finding{fine, 0, "replaced by Cilium", ""}},
		"unknown": {client.KubeProxy{Mode: client.KubeProxyUnknown, By: "you may not list nodes"}, nil, finding{passed, 0, "you may not list nodes", ""}},
	} {
		t.Run(name, func(t *testing.T) { tt.want.check(t, proxyOf(tt.p, tt.modes)) })
	}
}

func TestUpgradesOf(t *testing.T) {
	blocked := api.Errorf(api.ExitUnreachable, "it did not switch protocols")
	forbidden := api.Errorf(api.ExitPermission, "you may not create pods/portforward")
	finding{fine, 0, "by SPDY and by WebSocket", ""}.check(t, upgradesOf(nil, nil, "p"))
	finding{fine, 0, "not by WebSocket", ""}.check(t, upgradesOf(nil, blocked, "p"))
	finding{warns, 0, "p blocks SPDY", "Upgrade: SPDY"}.check(t, upgradesOf(blocked, nil, "p"))
	finding{fails, api.ExitUnreachable, "neither by SPDY", "kubectl port-forward"}.check(t, upgradesOf(blocked, blocked, "p"))
	finding{passed, 0, "pods/portforward", ""}.check(t, upgradesOf(forbidden, forbidden, "p"))
}

func TestTransportOf(t *testing.T) {
	for name, tt := range map[string]struct {
		t    api.Transport
		want finding
	}{
		"works":            {api.Transport{Name: "api-proxy", State: api.TransportInUse, Seconds: 0.0012}, finding{fine, 0, "round trip 1.2 ms", ""}},
		"not in time":      {api.Transport{Name: "api-proxy", State: api.TransportTrying}, finding{passed, 0, "in time", ""}},
		"off":              {api.Transport{Name: "direct", State: api.TransportOff, Reason: "--transport api-proxy"}, finding{passed, 0, "--transport api-proxy", ""}},
		"blocked":          {api.Transport{Name: "api-proxy", State: api.TransportFailing, Reason: "forbidden"}, finding{warns, 0, "api-proxy does not work: forbidden", "--transport api-proxy"}},
		"direct, as usual": {api.Transport{Name: "direct", State: api.TransportFailing, Reason: "no route"}, finding{fine, 0, "not reachable", ""}},
		"standby":          {api.Transport{Name: "direct", State: api.TransportStandby, Seconds: 0.002}, finding{fine, 0, "round trip 2.0 ms", ""}},
	} {
		t.Run(name, func(t *testing.T) { tt.want.check(t, transportOf(tt.t)) })
	}
}

func TestErrorWithoutHintHasAFix(t *testing.T) {
	complete(t, failed(errors.New("something"), "nothing works"))
}

func TestServerOf(t *testing.T) {
	for version, want := range map[string]finding{
		"v1.37.2":             {fine, 0, "Kubernetes v1.37.2 knows you", ""},
		"v1.31.0-eks-a1b2c3d": {fine, 0, "v1.31.0-eks-a1b2c3d", ""},
		"v1.30.14+k3s1":       {warns, 0, "v1.30.14+k3s1 knows you; kubevpn is tested with 1.31 and newer", "kubectl version"},
		"master":              {fine, 0, "Kubernetes master", ""},
	} {
		t.Run(version, func(t *testing.T) { want.check(t, serverOf(version)) })
	}
}
