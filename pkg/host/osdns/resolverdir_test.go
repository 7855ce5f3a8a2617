package osdns

import (
	"net/netip"
	"os"
	"path/filepath"
	"testing"

	"github.com/google/go-cmp/cmp"
)

func readDir(t *testing.T, dir string) map[string]string {
	t.Helper()
	out := map[string]string{}
	entries, err := os.ReadDir(dir)
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range entries {
		b, err := os.ReadFile(filepath.Join(dir, e.Name()))
		if err != nil {
			t.Fatal(err)
		}
		out[e.Name()] = string(b)
	}
	return out
}

func TestResolverDirWritesOnlyOwnFiles(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "resolver")
	server := netip.MustParseAddrPort("127.0.0.1:5399")
	r := resolverDir{dir: dir, pid: 100, alive: func(pid int) bool { return pid != 99 }}
	set := func(domains ...string) []string {
		t.Helper()
		warnings, err := r.set(domains, server)
		if err != nil {
			t.Fatal(err)
		}
		return warnings
	}
	const ours = resolverMark + "100\nnameserver 127.0.0.1\nport 5399\n"
	set("cluster.local", "96.10.in-addr.arpa")
	if diff := cmp.Diff(map[string]string{"cluster.local": ours, "96.10.in-addr.arpa": ours}, readDir(t, dir)); diff != "" {
		t.Errorf("-want +got\n%s", diff)
	}

	theirs := map[string]string{
		"corp.example": "nameserver 192.0.2.1\n",
		"other.local":  resolverMark + "101\nnameserver 127.0.0.1\n",
		"dead.local":   resolverMark + "99\nnameserver 127.0.0.1\n",
		"odd.local":    resolverMark + "x\n",
		"empty":        "",
	}
	for name, content := range theirs {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(content), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	want := []string{filepath.Join(dir, "corp.example") + " belongs to another program, which keeps resolving names under corp.example"}
	if diff := cmp.Diff(want, set("cluster.local", "corp.example")); diff != "" {
		t.Errorf("-want +got\n%s", diff)
	}
	if n, err := r.recover(); n != 1 || err != nil {
		t.Errorf("recover removed %d, %v; want the one of the process that died", n, err)
	}
	delete(theirs, "dead.local")
	theirs["cluster.local"] = ours
	if diff := cmp.Diff(theirs, readDir(t, dir)); diff != "" {
		t.Errorf("-want +got\n%s", diff)
	}
	set()
	delete(theirs, "cluster.local")
	if diff := cmp.Diff(theirs, readDir(t, dir)); diff != "" {
		t.Errorf("-want +got\n%s", diff)
	}
}
