//go:build e2e && linux

package e2e

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"kubevpn/internal/testenv"
	"kubevpn/test/lab"
)

// otherDevice runs wireguard-go as device $1, with the private key $2 and the address $3, until SIGTERM. It gives the
// other arguments to wg, runs $ROUTES, and prints a line. At the end it runs $UNDO.
const otherDevice = `
mount -t tmpfs none /run && mkdir /run/wireguard || exit
wireguard-go -f "$1" >/dev/null 2>&1 &
trap 'kill $!; eval "$UNDO"' TERM
device=$1 key=$2 address=$3; shift 3
until wg show "$device" >/dev/null 2>&1; do sleep 0.05; done
echo "$key" >/run/key
wg set "$device" private-key /run/key "$@" && ip addr add "$address" dev "$device" &&
ip link set "$device" mtu 1420 up && eval "$ROUTES" && echo up || kill $!
wait`

// The laptop's routes of another VPN that takes all traffic, as wg-quick makes and removes them.
const (
	otherRoutes = `wg set office0 fwmark 51820 && ip route add default dev office0 table 51820 &&
		ip rule add not fwmark 51820 table 51820 && ip rule add table main suppress_prefixlength 0`
	otherRoutesUndo = "ip rule del table main suppress_prefixlength 0; ip rule del not fwmark 51820 table 51820"
)

// otherVPN is another VPN of the laptop: wireguard-go on the laptop and the router.
type otherVPN struct {
	*laptop
	network netip.Prefix
	keys    [2]string // private: of the laptop and the router
}

// newOtherVPN starts the router's end.
func (l *laptop) newOtherVPN(t *testing.T) *otherVPN {
	t.Helper()
	testenv.NeedPrograms(t, "wireguard-go", "wg")
	v := &otherVPN{laptop: l, network: netip.MustParsePrefix("172.31.9.0/24")}
	for i := range v.keys {
		v.keys[i] = strings.TrimSpace(testenv.Run(t, "wg genkey"))
	}
	v.device(t, "router", "", "", "peer0", v.keys[1], v.at(1), "listen-port", "51820",
		"peer", v.public(t, v.keys[0]), "allowed-ips", at(v.network, 2).String()+"/32")
	return v
}

func (v *otherVPN) at(n byte) string {
	return netip.PrefixFrom(at(v.network, n), v.network.Bits()).String()
}

func (v *otherVPN) public(t *testing.T, key string) string {
	t.Helper()
	cmd := exec.Command("wg", "pubkey")
	cmd.Stdin = strings.NewReader(key)
	out, err := cmd.Output()
	if err != nil {
		t.Fatal(err)
	}
	return strings.TrimSpace(string(out))
}

// device runs otherDevice at a place of the lab, until stop is called or the test ends. It returns when the device is
// up and has its routes.
func (v *otherVPN) device(t *testing.T, place, routes, undo string, args ...string) (stop func()) {
	t.Helper()
	cmd, err := v.Command(context.WithoutCancel(t.Context()), place,
		append([]string{"env", "ROUTES=" + routes, "UNDO=" + undo, "unshare", "--mount", "sh", "-c", otherDevice, "sh"}, args...)...)
	if err != nil {
		t.Fatal(err)
	}
	cmd.Stderr = t.Output()
	out, err := cmd.StdoutPipe()
	if err == nil {
		err = cmd.Start()
	}
	if err != nil {
		t.Fatal(err)
	}
	stop = func() {
		_ = cmd.Process.Signal(syscall.SIGTERM) // it fails if the process has ended
		_ = cmd.Wait()                          // with the signal
	}
	t.Cleanup(stop)
	if line, err := bufio.NewReader(out).ReadString('\n'); line != "up\n" {
		t.Fatalf("the device does not start: %q, %v", line, err)
	}
	return stop
}

// up connects the laptop. down undoes it.
func (v *otherVPN) up(t *testing.T, routes, undo string) (down func()) {
	t.Helper()
	stop := v.device(t, "laptop", routes, undo, "office0", v.keys[0], v.at(2), "peer", v.public(t, v.keys[1]),
		"allowed-ips", "0.0.0.0/0", "endpoint", v.Config().Families()[0].Gateway.String()+":51820")
	testenv.Eventually(t, time.Minute, func() error {
		if r := v.run(t, "ping", "-n", "-c", "1", "-W", "1", at(v.network, 1).String()); r.code != 0 {
			return fmt.Errorf("%v", r)
		}
		return nil
	})
	return func() {
		stop()
		testenv.Until(t, "the device is gone", func() bool { return v.run(t, "ip", "link", "show", "office0").code != 0 })
	}
}

// replaceFile replaces a file as the scripts of OpenVPN do with resolv.conf. It returns what the file contained.
func replaceFile(t *testing.T, path, text string) (before string) {
	t.Helper()
	old, err := os.ReadFile(path)
	if err == nil {
		err = os.WriteFile(path+".next", []byte(text), 0o644)
	}
	if err == nil {
		err = os.Rename(path+".next", path)
	}
	if err != nil {
		t.Fatal(err)
	}
	return string(old)
}

// usedFrom waits until the outside is reached by name, from that address of the laptop.
func (v *otherVPN) usedFrom(t *testing.T, address netip.Addr) {
	t.Helper()
	testenv.Eventually(t, time.Minute, func() error {
		r := v.run(t, "curl", "-sS", "--max-time", "5", "http://www.outside.test/")
		if !strings.Contains(r.stdout, "asked by "+address.String()+":") {
			return fmt.Errorf("not from %v: %v", address, r)
		}
		return nil
	})
}

// clusterIsReached waits until a Service is reached by its name.
func (v *otherVPN) clusterIsReached(t *testing.T) {
	t.Helper()
	testenv.Eventually(t, time.Minute, func() error {
		_, err := v.get(t, "http://web.default/")
		return err
	})
}

// otherVPNSuite checks that kubevpn and another VPN work together, whichever starts or ends first.
func otherVPNSuite(t *testing.T, w *world) {
	t.Run("all_traffic", func(t *testing.T) { otherVPNTakesAll(t, w) })
	t.Run("split_dns", func(t *testing.T) { otherVPNSplits(t, w) })
}

// otherVPNTakesAll uses a VPN that takes all traffic and the resolver.
func otherVPNTakesAll(t *testing.T, w *world) {
	l, dir := w.furnish(t)
	v := l.newOtherVPN(t)
	resolvConf := filepath.Join(dir, "etc/resolv.conf")
	plain, tunnel := w.Config().Families()[0].Laptop, at(v.network, 2)
	replaced := regexp.MustCompile(`(?m)^'?/etc/resolv\.conf'?,.*$`) // its inode and times
	before := replaced.ReplaceAllString(v.snapshot(t), "")
	v.connect(t)
	v.clusterIsReached(t)
	suite := t // the other VPN runs until then
	var down func()
	var nameservers string

	t.Run("other_vpn_starts_second", func(t *testing.T) {
		down = v.up(suite, otherRoutes, otherRoutesUndo)
		nameservers = replaceFile(t, resolvConf, "nameserver "+w.Config().Families()[0].Router.String()+"\n")
		v.clusterIsReached(t)
		v.usedFrom(t, tunnel)
	})
	t.Run("kubevpn_ends_first", func(t *testing.T) {
		v.must(t, "kubevpn", "disconnect", "--all")
		v.usedFrom(t, tunnel)
	})
	t.Run("kubevpn_starts_second", func(t *testing.T) {
		between := v.snapshot(t)
		if strings.Contains(between, "kubevpn0") {
			t.Errorf("something is left:\n%s", between)
		}
		v.connect(t)
		v.clusterIsReached(t)
		v.usedFrom(t, tunnel)
		v.must(t, "kubevpn", "disconnect", "--all")
		v.sameAs(t, between)
	})
	t.Run("other_vpn_ends_first", func(t *testing.T) {
		v.connect(t)
		v.clusterIsReached(t)
		down()
		replaceFile(t, resolvConf, nameservers)
		v.clusterIsReached(t)
		v.usedFrom(t, plain)
	})
	v.must(t, "kubevpn", "disconnect", "--all")
	if d := cmp.Diff(before, replaced.ReplaceAllString(v.snapshot(t), "")); d != "" {
		t.Errorf("the laptop is not as before (-before +after):\n%s", d)
	}
}

// otherVPNSplits uses a VPN with a nameserver for its own names, as OpenVPN configures systemd-resolved.
func otherVPNSplits(t *testing.T, w *world) {
	s := w.startSystemd(t)
	v := s.newOtherVPN(t)
	f := w.Config().Families()[0]
	names := 0
	// asks reports whether the question for a new name of the domain leaves the laptop with the address.
	asks := func(domain string, from netip.Addr) error {
		t.Helper()
		names++
		name := fmt.Sprintf("split%d-%d.%s", os.Getpid(), names, domain) // a lab can serve several runs
		s.run(t, "getent", "hosts", name)
		queries, err := w.Queries()
		if err != nil {
			t.Fatal(err)
		}
		asked := slices.DeleteFunc(queries, func(q lab.Query) bool { return q.Name != name+"." })
		if len(asked) == 0 || slices.ContainsFunc(asked, func(q lab.Query) bool { return !strings.HasPrefix(q.From, from.String()+":") }) {
			return fmt.Errorf("%s: %+v, want queries from %v", name, asked, from)
		}
		return nil
	}
	splits := func() {
		t.Helper()
		if err := errors.Join(asks("outside.test", at(v.network, 2)), asks("elsewhere.test", f.Laptop)); err != nil {
			t.Error(err)
		}
	}
	up := func() (down func()) {
		down = v.up(t, "ip route add "+f.Router.String()+" dev office0", ":")
		for _, of := range [][]string{{"dns", "office0", f.Router.String()}, {"domain", "office0", "~outside.test"}} {
			if r := s.resolvectl(t, of...); r.code != 0 {
				t.Fatal(r)
			}
		}
		testenv.Eventually(t, time.Minute, func() error { return asks("outside.test", at(v.network, 2)) }) // resolved follows the link
		return down
	}
	// resolved then knows its current server. resolvectl aligns its lines to that.
	if err := asks("outside.test", f.Laptop); err != nil {
		t.Fatal(err)
	}
	before := s.snapshot(t)

	down := up()
	splits()
	between := s.snapshot(t)
	s.connect(t)
	v.clusterIsReached(t)
	splits()
	s.must(t, "kubevpn", "disconnect", "--all")
	s.soonAs(t, between)
	splits()
	down()
	s.soonAs(t, before)

	s.connect(t)
	down = up()
	v.clusterIsReached(t)
	splits()
	down()
	v.clusterIsReached(t)
	if err := asks("outside.test", f.Laptop); err != nil {
		t.Error(err)
	}
	s.must(t, "kubevpn", "disconnect", "--all")
	s.soonAs(t, before)
}
