//go:build e2e && linux

package e2e

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"net/netip"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"

	clientcmdapi "k8s.io/client-go/tools/clientcmd/api"

	"kubevpn/internal/api"
	"kubevpn/internal/testenv"
	"kubevpn/test/lab"
)

// fault is a finding of `kubevpn doctor` that a planted fault must cause.
type fault struct {
	name  string // of the check
	state api.Verdict
	code  api.ExitCode
	cause string // a regular expression
	fix   string // a regular expression
}

// diagnose runs `kubevpn doctor` through a command on the laptop. It checks that each finding of a fault says what to
// do, and checks the exit code.
func (l *laptop) diagnose(t *testing.T, command ...string) map[string]api.Finding {
	t.Helper()
	r := l.run(t, command...)
	var d api.Diagnosis
	if err := json.Unmarshal([]byte(r.stdout), &d); err != nil {
		t.Fatalf("%v: %v", err, r)
	}
	findings, code := map[string]api.Finding{}, api.ExitOK
	for _, f := range d.Findings {
		findings[f.Name] = f
		faulty := f.Verdict == api.VerdictFailed || f.Verdict == api.VerdictWarning
		if faulty != (f.Cause != "" && f.Effect != "" && f.Fix != "" && f.Seen == "") || trace.MatchString(f.Cause+f.Fix) {
			t.Errorf("the finding is incomplete: %+v", f)
		}
	}
	if f := d.Failed(); f != nil {
		code = f.Code
	}
	if r.code != int(code) || r.stderr != "" {
		t.Errorf("want exit code %d: %v", code, r)
	}
	return findings
}

func (l *laptop) doctor(t *testing.T, args ...string) map[string]api.Finding {
	t.Helper()
	return l.diagnose(t, append([]string{"kubevpn", "doctor", "-o", "json"}, args...)...)
}

// only checks that the findings contain these faults, and no others.
func only(t *testing.T, findings map[string]api.Finding, faults ...fault) {
	t.Helper()
	for _, want := range faults {
		got := findings[want.name]
		if got.Verdict != want.state || got.Code != want.code || !regexp.MustCompile(want.cause).MatchString(got.Cause) ||
			!regexp.MustCompile(want.fix).MatchString(got.Fix) {
			t.Errorf("want %+v, got %+v", want, got)
		}
		delete(findings, want.name)
	}
	for _, f := range findings {
		if f.Verdict == api.VerdictFailed || f.Verdict == api.VerdictWarning {
			t.Errorf("a false finding: %+v", f)
		}
	}
}

// managerStarted waits until the traffic manager, if there is one, is ready. The previous suite may have stopped it.
func (l *laptop) managerStarted(t *testing.T) {
	t.Helper()
	testenv.Eventually(t, time.Minute, func() error {
		if f := l.doctor(t)["manager"]; f.Verdict != api.VerdictOK {
			return fmt.Errorf("%+v", f)
		}
		return nil
	})
}

// doctorSuite plants faults, and checks that `kubevpn doctor` finds each, finds nothing else, and changes nothing.
func doctorSuite(t *testing.T, w *world) {
	l := w.newUser(t, lab.Admin)
	before := l.snapshot(t)
	l.managerStarted(t)
	only(t, l.doctor(t))
	l.connect(t)
	only(t, l.doctor(t))
	l.must(t, "kubevpn", "disconnect", "--all")
	healthy := l.doctor(t)
	only(t, healthy)
	for name, seen := range map[string]string{
		"manager": "kubevpn/kubevpn-traffic-manager-", "version": "as this program", "upgrades": "by SPDY and by WebSocket",
		"port-forward": "^round trip .* ms$", "api-proxy": "^round trip .* ms$", "overlap": "10.96.0.0/",
	} {
		if f := healthy[name]; f.Verdict != api.VerdictOK || !regexp.MustCompile(seen).MatchString(f.Seen) {
			t.Errorf("%s: want %q: %+v", name, seen, f)
		}
	}
	t.Run("text", func(t *testing.T) { doctorText(t, l) })
	t.Run("kubeconfig", func(t *testing.T) { doctorKubeconfig(t, l) })
	t.Run("beside", func(t *testing.T) { // the plugin takes its ten seconds
		t.Run("hanging_plugin", func(t *testing.T) { t.Parallel(); doctorHangingPlugin(t, l) })
		t.Run("api_server", func(t *testing.T) { t.Parallel(); doctorAPIServer(t, l) })
	})
	t.Run("rights", func(t *testing.T) { doctorRights(t, w, l) })
	t.Run("machine", func(t *testing.T) { doctorMachine(t, l) })
	t.Run("networks", func(t *testing.T) { doctorNetworks(t, w, l) })
	t.Run("names", func(t *testing.T) { doctorNames(t, w) })
	l.sameAs(t, before)
	t.Run("manager", func(t *testing.T) { doctorManager(t, w, l) })
}

// doctorText checks the output for people.
func doctorText(t *testing.T, l *laptop) {
	r := l.run(t, "kubevpn", "doctor", "--context", "nosuch")
	if r.code != int(api.ExitKubeconfig) || !strings.Contains(r.stdout, "\n  failed   kubeconfig ") || !strings.Contains(r.stdout, "  the kubeconfig has no context") ||
		!strings.Contains(r.stdout, "fix:     It has: ") || !strings.Contains(r.stdout, "\n1 failed, 0 warnings") {
		t.Error(r)
	}
	if out := l.must(t, "kubevpn", "doctor"); !strings.Contains(out, "yes: connect: reach pods, Services and names") {
		t.Error(out)
	}
}

// doctorKubeconfig uses kubeconfigs and credentials that do not work.
func doctorKubeconfig(t *testing.T, l *laptop) {
	none := *l
	none.kubeconfig = ""
	token := func(token string) string {
		return l.variant(t, func(_ *clientcmdapi.Cluster, u *clientcmdapi.AuthInfo) { *u = clientcmdapi.AuthInfo{Token: token} })
	}
	for _, tt := range []struct {
		name, kubeconfig string
		l                *laptop
		fault
	}{
		{"none", "", &none, fault{"kubeconfig", api.VerdictFailed, api.ExitKubeconfig, "no kubeconfig", "KUBECONFIG=FILE"}},
		{"expired_token", token(l.expiredToken(t)), l, fault{"credentials", api.VerdictFailed, api.ExitCredentials, "token of the kubeconfig expired (1h|60m)", "kubectl auth whoami"}},
		{"unknown_token", token("nobody-knows-me"), l, fault{"answer", api.VerdictFailed, api.ExitCredentials, "rejects the kubeconfig's credentials", "Log in again"}},
		{"plugin_fails", l.withPlugin(t, "failing-login", "echo 'session over' >&2; exit 3\n"), l, fault{"credentials", api.VerdictFailed, api.ExitExecPlugin, "failing-login failed with exit code 3: session over", "failing-login"}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			args := []string{"kubevpn", "doctor", "-o", "json"}
			if tt.kubeconfig != "" {
				args = append(args, "--kubeconfig", tt.kubeconfig)
			}
			only(t, tt.l.diagnose(t, args...), tt.fault)
		})
	}
}

// withPlugin returns a kubeconfig whose credential plugin is a script.
func (l *laptop) withPlugin(t *testing.T, name, script string) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), name)
	if err := os.WriteFile(path, []byte("#!/bin/sh\n"+script), 0o755); err != nil {
		t.Fatal(err)
	}
	return l.variant(t, func(_ *clientcmdapi.Cluster, u *clientcmdapi.AuthInfo) {
		*u = clientcmdapi.AuthInfo{Exec: &clientcmdapi.ExecConfig{APIVersion: "client.authentication.k8s.io/v1",
			Command: path, InteractiveMode: clientcmdapi.IfAvailableExecInteractiveMode}}
	})
}

func doctorHangingPlugin(t *testing.T, l *laptop) {
	only(t, l.doctor(t, "--kubeconfig", l.withPlugin(t, "hanging-login", "sleep 600\n")), fault{"credentials", api.VerdictFailed,
		api.ExitExecPlugin, "hanging-login did not answer within 10s and was killed", "hanging-login"})
}

// doctorAPIServer puts faults between the laptop and the API server.
func doctorAPIServer(t *testing.T, l *laptop) {
	node := l.Config().Families()[0].Node(1).String()
	silent := l.Config().Families()[0].Node(200).String()
	server := func(url string) string {
		return l.variant(t, func(c *clientcmdapi.Cluster, _ *clientcmdapi.AuthInfo) { c.Server = url })
	}
	fails := func(name, cause, fix string) fault {
		return fault{name, api.VerdictFailed, api.ExitUnreachable, cause, fix}
	}
	limit := []string{"--request-timeout", "2s"}
	t.Run("refuses", func(t *testing.T) {
		only(t, l.doctor(t, "--kubeconfig", server("https://"+node+":9")), fails("address", "connection refused", "Does the cluster run"))
	})
	t.Run("unknown_host", func(t *testing.T) {
		only(t, l.doctor(t, "--kubeconfig", server("https://nosuch.outside.test:6443")), fails("address", "there is no host nosuch", "VPN"))
	})
	t.Run("black_hole", func(t *testing.T) {
		l.drop(t, "ip daddr "+silent)
		only(t, l.doctor(t, append(limit, "--kubeconfig", server("https://"+silent+":6443"))...), fails("address", "did not answer in time", "VPN"))
	})
	t.Run("loses_large_packets", func(t *testing.T) {
		heal := l.drop(t, fmt.Sprintf("tcp dport %d ip length > 600", lab.APIPort), fmt.Sprintf("tcp sport %d ip length > 600", lab.APIPort))
		defer heal()
		only(t, l.doctor(t, limit...), fails("answer", "accepts the connection and does not answer within 2s.*MTU", "ping .* -M do"))
	})
	t.Run("another_authority", func(t *testing.T) {
		kubeconfig := l.variant(t, func(c *clientcmdapi.Cluster, _ *clientcmdapi.AuthInfo) {
			_, c.CertificateAuthorityData = selfSigned(t, "another CA")
		})
		only(t, l.doctor(t, "--kubeconfig", kubeconfig), fails("answer", "authority did not sign", "Fetch the kubeconfig again"))
	})
	t.Run("proxy_that_is_down", func(t *testing.T) {
		kubeconfig := l.variant(t, func(c *clientcmdapi.Cluster, _ *clientcmdapi.AuthInfo) {
			c.ProxyURL = "http://dev:s3cret@" + node + ":9"
		})
		f := l.doctor(t, "--kubeconfig", kubeconfig)
		if strings.Contains(fmt.Sprint(f), "s3cret") {
			t.Error("the password of the proxy is shown")
		}
		only(t, f, fails("address", "the proxy http://dev:xxxxx@"+node+":9 .*connection refused", "curl"))
	})
	t.Run("proxy_that_blocks_SPDY_and_wrong_clock", func(t *testing.T) {
		kubeconfig := l.behindProxy(t, l, func(r *http.Response) error {
			r.Header.Set("Date", time.Now().Add(-24*time.Hour).UTC().Format(http.TimeFormat))
			return nil
		})
		f := l.doctor(t, "--kubeconfig", kubeconfig)
		for _, name := range []string{"api-proxy"} { // another upgrade that the proxy does not know
			if f[name].Verdict != api.VerdictWarning {
				t.Errorf("%+v", f[name])
			}
			delete(f, name)
		}
		only(t, f, fault{"upgrades", api.VerdictWarning, 0, "blocks SPDY", "Upgrade: SPDY"},
			fault{"clock", api.VerdictWarning, 0, `this machine's clock is (24h|23h59m5\ds).* ahead of that of the API server`, "timedatectl"})
	})
}

// doctorRights uses a user without rights, and one who may edit a namespace.
func doctorRights(t *testing.T, w *world, l *laptop) {
	w.apply(t, "apiVersion: v1\nkind: ServiceAccount\nmetadata: {name: doctor-powerless, namespace: default}\n")
	token := w.kubectl(t, "create", "token", "doctor-powerless")
	kubeconfig := l.variant(t, func(_ *clientcmdapi.Cluster, u *clientcmdapi.AuthInfo) { *u = clientcmdapi.AuthInfo{Token: token} })
	only(t, l.doctor(t, "--kubeconfig", kubeconfig), fault{"manager", api.VerdictFailed, api.ExitPermission,
		"you may not .* the traffic manager in the namespace kubevpn: .*create pods/portforward", "(?s)kubevpn install.*--serviceaccount=default:doctor-powerless"})
	dev := w.newUser(t, lab.Developer)
	if f := dev.doctor(t); f["manager"].Verdict == api.VerdictFailed {
		t.Errorf("a developer may install a manager in their namespace: %+v", f["manager"])
	}
	if out := dev.must(t, "kubevpn", "doctor"); !strings.Contains(out, "no: give it its rights") {
		t.Error(out)
	}
}

// doctorMachine removes from the laptop what kubevpn needs.
func doctorMachine(t *testing.T, l *laptop) {
	hidden := func(hide string) []string {
		return []string{"unshare", "-m", "sh", "-c", hide + ` && exec "$0" doctor -o json`, l.program}
	}
	noTUN := fault{"device", api.VerdictFailed, api.ExitNoTUN, "/dev/net/tun", "modprobe tun|--device /dev/net/tun"}
	t.Run("no_device", func(t *testing.T) { only(t, l.diagnose(t, hidden("mount -t tmpfs none /dev/net")...), noTUN) })
	t.Run("another_device", func(t *testing.T) {
		only(t, l.diagnose(t, hidden("mount --bind /dev/null /dev/net/tun")...), noTUN)
	})
	t.Run("full_disk", func(t *testing.T) {
		if err := os.MkdirAll(filepath.Join(l.home, "state"), 0o700); err != nil {
			t.Fatal(err)
		}
		only(t, l.diagnose(t, hidden("mount -t tmpfs -o size=1m none "+l.home+"/state")...),
			fault{"storage", api.VerdictFailed, api.ExitDaemon, "has only .* of free space", "XDG_STATE_HOME"})
	})
	t.Run("root_without_rights", func(t *testing.T) {
		f := l.diagnose(t, "setpriv", "--bounding-set=-net_admin", "--inh-caps=-net_admin", "--", l.program, "doctor", "-o", "json")
		only(t, f, fault{"root helper", api.VerdictFailed, api.ExitNetwork, "NET_ADMIN", "cap-add NET_ADMIN"})
	})
	t.Run("few_ports", func(t *testing.T) {
		const setting = "net.ipv4.ip_local_port_range"
		was := l.must(t, "sysctl", "-n", setting)
		l.must(t, "sysctl", "-qw", setting+"=40000 40199")
		defer l.must(t, "sysctl", "-qw", setting+"="+was)
		only(t, l.doctor(t), fault{"ports", api.VerdictWarning, 0, "only 200 local ports", "sysctl " + setting})
	})
}

// doctorNetworks adds networks and another VPN that conflict with kubevpn.
func doctorNetworks(t *testing.T, w *world, l *laptop) {
	t.Run("local_network_overlaps", func(t *testing.T) {
		pods := w.Config().Families()[0].PodRange(1)
		half := netip.PrefixFrom(at(pods, 128), 25)
		l.must(t, "ip", "link", "add", "office0", "type", "veth", "peer", "name", "office1")
		defer l.must(t, "ip", "link", "del", "office0")
		for _, link := range []string{"office0", "office1"} {
			l.must(t, "ip", "link", "set", link, "up")
		}
		l.must(t, "ip", "addr", "add", netip.PrefixFrom(at(pods, 129), 25).String(), "dev", "office0")
		only(t, l.doctor(t))
		only(t, l.doctor(t, "--no-map"), fault{"overlap", api.VerdictFailed, api.ExitOverlap, "overlaps .*" + half.String() + " of office0",
			"^kubevpn connect --exclude-cidr " + half.String()})
		only(t, l.doctor(t, "--exclude-cidr", half.String()))
	})
	t.Run("another_VPN_takes_everything", func(t *testing.T) {
		v := l.newOtherVPN(t)
		down := v.up(t, otherRoutes, otherRoutesUndo)
		defer down()
		only(t, l.doctor(t), fault{"other VPNs", api.VerdictWarning, 0, `takes all traffic of this machine: office0 \(tun\)`, "ip link set office0 down"})
	})
}

// doctorNames breaks name resolution of a laptop with its own /etc.
func doctorNames(t *testing.T, w *world) {
	l, dir := w.furnish(t)
	resolvConf := filepath.Join(dir, "etc/resolv.conf")
	good, err := os.ReadFile(resolvConf)
	if err != nil {
		t.Fatal(err)
	}
	write := func(t *testing.T, text string) {
		t.Helper()
		err := os.WriteFile(resolvConf, []byte(text), 0o644)
		if err == nil { // the check watches a file that has just changed
			err = os.Chtimes(resolvConf, time.Time{}, time.Now().Add(-time.Hour))
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	t.Run("nameserver_of_a_VPN_that_ended", func(t *testing.T) {
		write(t, "nameserver 127.0.0.9\n")
		only(t, l.doctor(t), fault{"nameservers", api.VerdictFailed, api.ExitNetwork, `127.0.0.9 \(connection refused\)`, "resolvectl"})
	})
	t.Run("edit_of_a_killed_kubevpn", func(t *testing.T) {
		write(t, "# Edited by kubevpn, which puts the original back when it ends.\n"+string(good))
		only(t, l.doctor(t), fault{"resolver", api.VerdictWarning, 0, "still has the edit of a kubevpn", "kubevpn connect"})
	})
	t.Run("two_programs_fight", func(t *testing.T) {
		stop, stopped := make(chan struct{}), make(chan struct{})
		go func() {
			defer close(stopped)
			tick := time.NewTicker(300 * time.Millisecond)
			defer tick.Stop()
			for n := 0; ; n++ {
				_ = os.WriteFile(resolvConf+".next", fmt.Appendf(nil, "# Generated by NetworkManager, %d\n%s", n, good), 0o644)
				_ = os.Rename(resolvConf+".next", resolvConf)
				select {
				case <-stop:
					return
				case <-tick.C:
				}
			}
		}()
		defer func() { close(stop); <-stopped }()
		only(t, l.doctor(t), fault{"resolver", api.VerdictWarning, 0, "NetworkManager keeps changing /etc/resolv.conf", "lsof"})
	})
	write(t, string(good))
}

// doctorManager checks the findings about a manager of another version, without rights, that does not run, and that
// does not exist.
func doctorManager(t *testing.T, w *world, l *laptop) {
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(t.Context()), time.Minute)
		defer cancel()
		if r := l.runContext(ctx, t, "kubevpn", "install"); r.code != 0 { // restores the image and the rights
			t.Error(r)
		}
	})
	t.Run("another_version", func(t *testing.T) {
		l.must(t, "kubevpn", "quit") // a daemon of this version
		program, err := os.ReadFile(l.program)
		if err != nil {
			t.Fatal(err)
		}
		// A string of the same length takes the place of the version in a copy of the program.
		version := regexp.MustCompile(`\d+\.\d+\.\d+\S*`).Find([]byte(l.must(t, "kubevpn", "version", "-o", "jsonpath={.version}")))
		other := *l
		other.program = filepath.Join(t.TempDir(), "kubevpn")
		if err := os.WriteFile(other.program, bytes.ReplaceAll(program, version, append([]byte("9"), version[1:]...)), 0o755); err != nil {
			t.Fatal(err)
		}
		only(t, other.doctor(t), fault{"version", api.VerdictWarning, 0, "the traffic manager is kubevpn " + regexp.QuoteMeta(string(version)), "kubevpn connect --upgrade"})
	})
	t.Run("without_rights", func(t *testing.T) {
		w.kubectl(t, "delete", "clusterrolebinding", "kubevpn-traffic-manager-kubevpn", "--ignore-not-found")
		w.kubectl(t, "-n", "kubevpn", "rollout", "restart", "deployment/kubevpn-traffic-manager")
		w.kubectl(t, "-n", "kubevpn", "rollout", "status", "deployment/kubevpn-traffic-manager", "--timeout=60s")
		testenv.Eventually(t, soon, func() error { // the old pod may still end
			f := l.doctor(t)["its rights"]
			if f.Verdict != api.VerdictWarning || !strings.Contains(f.Cause, "may not list services") {
				return fmt.Errorf("%+v", f)
			}
			return nil
		})
	})
	t.Run("scaled_to_zero", func(t *testing.T) {
		w.kubectl(t, "-n", "kubevpn", "scale", "deployment/kubevpn-traffic-manager", "--replicas=0")
		only(t, l.doctor(t), fault{"manager", api.VerdictFailed, api.ExitNotReady, "scaled to zero", "kubectl -n kubevpn scale deployment"})
	})
	t.Run("image_that_nobody_has", func(t *testing.T) {
		w.kubectl(t, "-n", "kubevpn", "set", "image", "deployment/kubevpn-traffic-manager", "*=docker.io/kubevpn/nosuch:1")
		w.kubectl(t, "-n", "kubevpn", "scale", "deployment/kubevpn-traffic-manager", "--replicas=1")
		testenv.Eventually(t, time.Minute, func() error {
			f := l.doctor(t)["manager"]
			if f.Verdict != api.VerdictFailed || f.Code != api.ExitImagePull || !strings.Contains(f.Fix, "--image") {
				return fmt.Errorf("%+v", f)
			}
			return nil
		})
	})
}

// doctorNoProxySuite runs where nothing serves ClusterIPs.
func doctorNoProxySuite(t *testing.T, w *world) {
	l := w.newUser(t, lab.Admin)
	l.managerStarted(t)
	only(t, l.doctor(t), fault{"kube-proxy", api.VerdictWarning, 0, "no kube-proxy serves ClusterIPs", "--netstack gvisor"})
}
