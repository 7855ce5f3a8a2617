package osdns

import (
	"path/filepath"
	"testing"

	"kubevpn/internal/testenv"
)

func TestFileModeKeepsTheContract(t *testing.T) {
	keepsTheContract(t, ModeFile, func(t *testing.T) machine {
		c, _ := fileConfigurator(t, "nameserver 192.0.2.1\n")
		return machine{c, fileConfig(), func() string { return describe(t, c.opt.ResolvConf) }}
	})
}

func TestRedirectKeepsTheContract(t *testing.T) {
	if !testenv.InNamespace(t, "nft") {
		return
	}
	startUpstream(t, "192.0.2.1", "2001:db8::1")
	startNameserver(t, "kubevpn0", []string{"198.19.255.53"}, "198.19.0.1/16")
	keepsTheContract(t, ModeNFTables, func(t *testing.T) machine {
		opt := testOptions(t, "nameserver 192.0.2.1\nnameserver 2001:db8::1\n")
		return machine{New(opt), resolvedConfig(), func() string { return namespaceState(t, opt.ResolvConf) }}
	})
}

func TestSystemdResolvedKeepsTheContract(t *testing.T) {
	if !testenv.InNamespace(t, "dbus-daemon", "nft") {
		return
	}
	startUpstream(t, "192.0.2.1")
	startNameserver(t, "kubevpn0", []string{"198.19.255.53"}, "198.19.0.1/16")
	s := startSystemd(t, stub)
	keepsTheContract(t, ModeResolved, func(t *testing.T) machine {
		c := New(Options{StateDir: filepath.Join(t.TempDir(), "state")})
		return machine{c, resolvedConfig(), func() string {
			return s.status(t) + s.status(t, "kubevpn0") + namespaceState(t, "/etc/resolv.conf")
		}}
	})
}
