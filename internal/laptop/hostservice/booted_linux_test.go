package hostservice_test

import (
	"fmt"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"kubevpn/internal/testenv"
)

// The states that the users hold at the same time.
var (
	ofAlice = []string{"DEVICE=kubevpn1", "ADDRESS=198.18.0.1/32", "ROUTE=10.96.0.0/16", "LISTEN=127.0.0.1:5301"}
	ofBob   = []string{"DEVICE=kubevpn2", "ADDRESS=198.19.0.1/32 fd00:198::1/128", "ROUTE=10.97.0.0/16",
		"LISTEN=127.0.0.1:5302"}
)

func TestServiceOnBootedSystemd(t *testing.T) {
	m := boot(t)
	// The helper turns IPv6 on for its links, which needs /proc/sys.
	m.run(t, root, "sysctl -q -w net.ipv6.conf.default.disable_ipv6=1")
	before, files := m.network(t), m.files(t)
	if got, want := m.run(t, alice, "kubevpn service status"), "the service is not installed: `kubevpn connect` uses sudo\n"; got != want {
		t.Errorf("status: %s", got)
	}

	m.run(t, alice, "kubevpn service install") // by sudo
	m.allowed(t, "user alice", map[string]bool{alice: true, bob: false, mallory: false})
	for range 2 {
		m.run(t, root, "kubevpn service install --group vpn")
	}
	m.allowed(t, "members of group vpn", map[string]bool{alice: true, bob: true, mallory: false})

	m.queries(t)
	m.contract(t, alice)
	m.contract(t, bob)
	m.unchanged(t, before)

	m.outsider(t)
	m.policy(t)
	m.usersAtOnce(t)
	m.unchanged(t, before)
	m.resolved(t)
	m.unchanged(t, before)
	m.resolvConf(t)
	m.unchanged(t, before)

	m.run(t, alice, "kubevpn service uninstall") // by sudo
	if diff := cmp.Diff(files, m.files(t)); diff != "" {
		t.Errorf("uninstall: -before +after\n%s", diff)
	}
	m.run(t, root, "kubevpn service uninstall")
}

// network returns the configuration of the machine that the helper may change.
func (m *machine) network(t *testing.T) string {
	t.Helper()
	var b strings.Builder
	for _, c := range []string{"ip -j addr", "ip -j -4 route show table all", "ip -j -6 route show table all",
		"nft list ruleset", "cat /etc/resolv.conf"} {
		b.WriteString(m.run(t, root, c) + "\n")
	}
	return b.String()
}

// files returns the names of files that could be left.
func (m *machine) files(t *testing.T) string {
	t.Helper()
	return m.run(t, root, "find /etc /usr/local /var/lib") + m.run(t, root, "ls /run")
}

func (m *machine) unchanged(t *testing.T, before string) {
	t.Helper()
	testenv.Eventually(t, waitTime, func() error {
		if diff := cmp.Diff(before, m.network(t)); diff != "" {
			return fmt.Errorf("left behind: -before +after\n%s", diff)
		}
		return nil
	})
}

// allowed compares the status of the service for each user.
func (m *machine) allowed(t *testing.T, who string, users map[string]bool) {
	t.Helper()
	for user, want := range users {
		got := m.run(t, user, "kubevpn service status")
		if !strings.HasPrefix(got, "installed, active\n") || !strings.Contains(got, "  users    "+who+"; ") ||
			strings.Contains(got, "you may use it") != want {
			t.Errorf("%s, who may use it: %v, is told:\n%s", user, want, got)
		}
		if got := m.run(t, user, "kubevpn service status -o jsonpath={.allowed}"); got != fmt.Sprint(want) {
			t.Errorf("%s: allowed is %s", user, got)
		}
		if got := m.run(t, user, "kubevpn version"); !strings.Contains(got, "\nservice ") {
			t.Errorf("version: %s", got)
		}
	}
}

// contract has the helper of a user pass the contract of all helpers.
func (m *machine) contract(t *testing.T, user string) {
	t.Helper()
	out := m.run(t, user, "kubevpn-test -test.v -test.run ^TestContractOfUser$", roleVariable+"=contract")
	if n := strings.Count(out, "--- PASS: TestContractOfUser/"); n != 4 {
		t.Errorf("%d of 4 parts of the contract passed as %s:\n%s", n, user, out)
	}
}

// resolved shows that the helper reaches systemd-resolved, over the system bus.
func (m *machine) resolved(t *testing.T) {
	t.Helper()
	m.run(t, root, "systemctl start systemd-resolved")
	m.run(t, root, "cp /etc/resolv.conf /tmp/resolv.conf")
	m.run(t, root, "ln -sf /run/systemd/resolve/stub-resolv.conf /etc/resolv.conf")
	m.run(t, root, "sed -i 12s/true/false/ /etc/kubevpn/helper.yaml") // the resolver gets the link's domains only
	c := m.start(t, bob, "hold", ofBob...)
	if got := c.line(); !strings.HasPrefix(got, "up: systemd-resolved, by service, process ") {
		t.Error(got)
	}
	m.run(t, root, "sed -i 12s/false/true/ /etc/kubevpn/helper.yaml")
	m.instances(t, "stop")
	if got := c.line(); got != "the helper has ended" {
		t.Error(got)
	}
	m.run(t, root, "systemctl stop systemd-resolved")
	m.run(t, root, "mv -f /tmp/resolv.conf /etc/resolv.conf")
}

// resolvConf shows that the helper can edit resolv.conf, for one user at a time, and that the next helper undoes the
// edit of one that was killed.
func (m *machine) resolvConf(t *testing.T) {
	t.Helper()
	edits := func(state []string) []string { return append(state[:3:3], "LISTEN=") } // nothing to redirect queries to
	a := m.start(t, alice, "hold", edits(ofAlice)...)
	if got := a.line(); !strings.HasPrefix(got, "up: resolv.conf, by service, process ") {
		t.Fatal(got)
	}
	if got, want := m.start(t, bob, "hold", edits(ofBob)...).line(), "another kubevpn process has edited it"; !strings.Contains(got, want) {
		t.Errorf("the second user: %s", got)
	}
	m.instances(t, "kill --signal KILL")
	if got := a.line(); got != "the helper has ended" {
		t.Error(got)
	}
	if got := m.run(t, root, "cat /etc/resolv.conf"); !strings.Contains(got, "Edited by kubevpn") {
		t.Errorf("nothing is left, so this shows nothing: %s", got)
	}
	b := m.start(t, bob, "hold", ofBob...)
	if got := b.line(); !strings.HasPrefix(got, "up: nftables, by service, process ") {
		t.Error(got)
	}
	m.instances(t, "stop")
}

// queries shows that a user gets the DNS queries of the machine only if root allows it. It leaves it allowed.
func (m *machine) queries(t *testing.T) {
	t.Helper()
	before := m.network(t)
	want := "error: the root helper refuses name resolution: all DNS queries of this machine would go to the resolver, because " +
		"systemd-resolved does not answer them: it does not run; only an administrator can allow it. " +
		"Change line 12 of /etc/kubevpn/helper.yaml to   allQueries: true"
	if diff := cmp.Diff(want, m.start(t, alice, "hold", ofAlice...).line()); diff != "" {
		t.Errorf("-want +got\n%s", diff)
	}
	m.unchanged(t, before)
	m.run(t, root, "sed -i 12s/false/true/ /etc/kubevpn/helper.yaml")
}

// outsider shows that another user gets no helper and a hint to use sudo, and that a process in a container gets none.
func (m *machine) outsider(t *testing.T) {
	t.Helper()
	got := m.start(t, mallory, "hold", ofAlice...).line()
	if !strings.HasPrefix(got, "error: links, routes and name resolution require root, and sudo is not installed; ") ||
		!strings.HasSuffix(got, "The service of the root helper is for other users: see `kubevpn service status`") {
		t.Error(got)
	}
	elsewhere := m.run(t, root, "unshare --net setpriv --reuid alice --regid alice --init-groups kubevpn-test",
		append(ofAlice, roleVariable+"=hold")...)
	if !strings.HasPrefix(elsewhere, "error: the service of the root helper is in another network namespace than you; ") {
		t.Errorf("in another network namespace: %s", elsewhere)
	}
}

// policy shows that the consent of the user counts for nothing, and that of root does.
func (m *machine) policy(t *testing.T) {
	t.Helper()
	public := append([]string{}, ofAlice...)
	public[2] = "ROUTE=203.0.113.0/24"
	want := "error: the root helper refuses the route 203.0.113.0/24: it is not in private address space, and not in a network " +
		"that /etc/kubevpn/helper.yaml allows (link kubevpn1); only an administrator can allow it. " +
		"Change line 5 of /etc/kubevpn/helper.yaml to   networks: [203.0.113.0/24]"
	if diff := cmp.Diff(want, m.start(t, alice, "hold", public...).line()); diff != "" {
		t.Errorf("-want +got\n%s", diff)
	}
	m.run(t, root, "sed -i 5s/.*/networks:\\x20[203.0.113.0\\/24]/ /etc/kubevpn/helper.yaml")
	c := m.start(t, alice, "hold", public...)
	if got := c.line(); !strings.HasPrefix(got, "up: nftables, by service, process ") {
		t.Error(got)
	}
	m.run(t, root, "kubevpn service install --group vpn") // keeps the policy, and the connection
	if got := m.run(t, root, "ip route show 203.0.113.0/24"); !strings.Contains(got, "kubevpn1") {
		t.Errorf("the route is %q", got)
	}
	m.run(t, root, "chmod 666 /etc/kubevpn/helper.yaml")
	if got := m.start(t, bob, "hold", ofBob...).line(); !strings.Contains(got, "has mode 0666: users besides root can write to it") {
		t.Error(got)
	}
	m.run(t, root, "chmod 644 /etc/kubevpn/helper.yaml")
	m.instances(t, "stop")
	if got := c.line(); got != "the helper has ended" {
		t.Error(got)
	}
}

// usersAtOnce shows that two users do not share what their helpers made, and that each end removes its own.
func (m *machine) usersAtOnce(t *testing.T) {
	t.Helper()
	a, b := m.start(t, alice, "hold", ofAlice...), m.start(t, bob, "hold", ofBob...)
	up := a.line()
	for _, line := range []string{up, b.line()} {
		if !strings.HasPrefix(line, "up: nftables, by service, process ") {
			t.Fatal(line)
		}
	}
	m.hardened(t)
	both := m.network(t)
	for _, want := range []string{`"kubevpn1"`, `"kubevpn2"`, "10.96.0.0/16", "10.97.0.0/16", "fd00:198::1", "table inet kubevpn-64910-",
		"table inet kubevpn-64911-"} {
		if !strings.Contains(both, want) {
			t.Errorf("%s is not there:\n%s", want, both)
		}
	}
	log := m.run(t, root, "journalctl --no-pager --output cat --unit kubevpn-helper@*")
	for _, want := range []string{"uid=64910", "uid=64911", "10.97.0.0/16"} {
		if !strings.Contains(log, want) {
			t.Errorf("the journal lacks %s:\n%s", want, log)
		}
	}

	m.run(t, alice, "kill -9 "+up[strings.LastIndexByte(up, ' ')+1:])
	testenv.Eventually(t, waitTime, func() error {
		left := m.network(t)
		for _, gone := range []string{"kubevpn1", "10.96.0.0/16", "kubevpn-64910-"} {
			if strings.Contains(left, gone) {
				return fmt.Errorf("%s is left after kill -9 of the daemon:\n%s", gone, left)
			}
		}
		return nil
	})
	if left := m.network(t); !strings.Contains(left, "10.97.0.0/16") || !strings.Contains(left, "table inet kubevpn-64911-") {
		t.Errorf("bob has lost his connection:\n%s", left)
	}

	m.instances(t, "stop")
	if got := b.line(); got != "the helper has ended" {
		t.Error(got)
	}
}

// hardened checks what the kernel says about the helpers that run.
func (m *machine) hardened(t *testing.T) {
	t.Helper()
	pids := strings.Fields(m.run(t, root, "systemctl show --property MainPID --value kubevpn-helper@*.service"))
	if len(pids) != 2 {
		t.Errorf("helpers: %q", pids)
	}
	for _, pid := range pids {
		status := m.run(t, root, "cat /proc/"+pid+"/status")
		for _, want := range []string{"NoNewPrivs:\t1", "Seccomp:\t2", "CapBnd:\t0000000000001000", "CapEff:\t0000000000001000"} {
			if !strings.Contains(status, want+"\n") {
				t.Errorf("a helper is without %q:\n%s", want, status)
			}
		}
		if got := m.run(t, root, "readlink /proc/"+pid+"/exe"); got != "/usr/local/libexec/kubevpn/kubevpn\n" {
			t.Errorf("the program is %s", got)
		}
	}
}
