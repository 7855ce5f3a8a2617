package osdns

import (
	"errors"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
)

// fileConfigurator returns a Configurator of a machine without nftables and systemd-resolved.
func fileConfigurator(t *testing.T, conf string) (*Configurator, chan Applied) {
	t.Helper()
	dir := t.TempDir()
	path := filepath.Join(dir, "resolv.conf")
	write(t, path, conf, 0o644)
	changes := make(chan Applied, 100)
	c := New(Options{
		ResolvConf: path, StateDir: filepath.Join(dir, "state"), Bus: "unix:path=" + filepath.Join(dir, "nobus"),
		OnChange: func(a Applied) { changes <- a },
	})
	c.poll = 5 * time.Millisecond
	c.openTable = func(string) (*ownerTable, error) { return nil, errors.New("operation not supported") }
	return c, changes
}

func fileConfig() Config {
	return Config{
		Listen4: netip.MustParseAddrPort("127.0.0.1:5399"),
		Links:   []Link{{Name: "kubevpn0", Resolver: netip.MustParseAddr("198.19.255.53"), MatchDomains: []string{"cluster.local"}}},
	}
}

func next(t *testing.T, changes <-chan Applied) Applied {
	t.Helper()
	select {
	case a := <-changes:
		return a
	case <-time.After(10 * time.Second):
		t.Fatal("no change was reported")
		return Applied{}
	}
}

func TestFileModeRestoresTheFile(t *testing.T) {
	c, _ := fileConfigurator(t, "nameserver 192.0.2.1\noptions ndots:2\n")
	path := c.opt.ResolvConf
	before := describe(t, path)
	for range 2 { // the second Set changes nothing
		applied, err := c.Set(fileConfig())
		if err != nil {
			t.Fatal(err)
		}
		const want = "{resolv.conf [192.0.2.1:53] [nftables cannot redirect DNS: operation not supported editing PATH, until kubevpn ends]}"
		if got := fmt.Sprint(Applied{applied.Mode, applied.Upstreams, []string{applied.Warnings[0], "editing PATH, until kubevpn ends"}}); got != want {
			t.Errorf("applied %s, want %s", got, want)
		}
		got, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		if diff := cmp.Diff(header+"\nnameserver 198.19.255.53\noptions ndots:2\n", string(got)); diff != "" {
			t.Errorf("-want +got\n%s", diff)
		}
	}
	if applied, err := c.Set(Config{}); err != nil || applied.Mode != ModeNone {
		t.Fatal(applied, err)
	}
	if diff := cmp.Diff(before, describe(t, path)); diff != "" {
		t.Errorf("-before +after\n%s", diff)
	}
	leftovers(t, filepath.Dir(path)+"/state")
}

// A DHCP client writes resolv.conf while it is edited: its nameservers become the upstreams, and Close restores its
// file.
func TestFileModeFollowsAnotherProgram(t *testing.T) {
	c, changes := fileConfigurator(t, "nameserver 192.0.2.1\n")
	path := c.opt.ResolvConf
	if _, err := c.Set(fileConfig()); err != nil {
		t.Fatal(err)
	}
	write(t, path+".dhcp", "nameserver 192.0.2.99\nsearch new.example\n", 0o600)
	theirs := describe(t, path+".dhcp")
	if err := os.Rename(path+".dhcp", path); err != nil {
		t.Fatal(err)
	}
	if got := fmt.Sprint(next(t, changes).Upstreams); got != "[192.0.2.99:53]" {
		t.Errorf("upstreams %s", got)
	}
	got, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(header+"\nnameserver 198.19.255.53\nsearch new.example\n", string(got)); diff != "" {
		t.Errorf("-want +got\n%s", diff)
	}
	if err := c.Close(); err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(theirs, describe(t, path)); diff != "" {
		t.Errorf("-theirs +after\n%s", diff)
	}
}

// Another program keeps rewriting the file: after a few rounds the Configurator gives up and warns the user.
func TestFileModeGivesUp(t *testing.T) {
	c, changes := fileConfigurator(t, "nameserver 192.0.2.1\n")
	path := c.opt.ResolvConf
	if _, err := c.Set(fileConfig()); err != nil {
		t.Fatal(err)
	}
	for i := range maxTramples {
		replace(t, path, fmt.Sprintf("nameserver 192.0.2.%d\n", 10+i))
		if got, want := fmt.Sprint(next(t, changes).Upstreams), fmt.Sprintf("[192.0.2.%d:53]", 10+i); got != want {
			t.Fatalf("upstreams %s, want %s", got, want)
		}
	}
	replace(t, path, "nameserver 192.0.2.200\n")
	last := next(t, changes)
	want := "another program keeps rewriting " + path + ": cluster names are not resolved"
	if last.Mode != ModeNone || last.Warnings[len(last.Warnings)-1] != want {
		t.Errorf("applied %+v, want %q", last, want)
	}
	if err := c.Close(); err != nil {
		t.Fatal(err)
	}
	if got, _ := os.ReadFile(path); string(got) != "nameserver 192.0.2.200\n" {
		t.Errorf("the file contains %q", got)
	}
}

// replace replaces a file by rename.
func replace(t *testing.T, path, content string) {
	t.Helper()
	write(t, path+".new", content, 0o644)
	if err := os.Rename(path+".new", path); err != nil {
		t.Fatal(err)
	}
}
