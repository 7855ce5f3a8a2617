package config

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/google/go-cmp/cmp"

	"kubevpn/internal/api"
)

func TestTrustFileIsPrivate(t *testing.T) {
	p := Paths{StateDir: filepath.Join(t.TempDir(), "state")}
	if all, err := p.LoadTrust(); err != nil || len(all) != 0 {
		t.Fatalf("nothing stored: %v, %v", all, err)
	}
	want := Trusted{Cluster: "lab", Server: "https://192.0.2.1", Consent: api.Consent{Domain: "example.com", Managers: []api.TrustedManager{{Namespace: "kubevpn", NamespaceUID: "u"}}}}
	for _, id := range []string{"a", "b"} {
		if err := p.SaveTrust(func(all map[string]Trusted) { all[id] = want }); err != nil {
			t.Fatal(err)
		}
	}
	all, err := p.LoadTrust()
	if d := cmp.Diff(map[string]Trusted{"a": want, "b": want}, all); err != nil || d != "" {
		t.Errorf("%v (-want +got):\n%s", err, d)
	}
	info, err := os.Stat(p.TrustFile())
	if err != nil || info.Mode().Perm() != 0o600 {
		t.Errorf("mode %v, %v; want 0600", info.Mode(), err)
	}
	if left, err := os.ReadDir(p.StateDir); err != nil || len(left) != 1 {
		t.Errorf("beside it: %v, %v", left, err)
	}
	write(t, p.TrustFile(), "{")
	if _, err := p.LoadTrust(); api.AsError(err).Code != api.ExitUsage || api.AsError(err).Hint == "" {
		t.Errorf("a broken file: %v", err)
	}
	if err := p.SaveTrust(func(map[string]Trusted) {}); err == nil {
		t.Error("a broken file was written over")
	}
}

func TestTrustFileWithNullIsEmpty(t *testing.T) {
	p := Paths{StateDir: t.TempDir()}
	if err := os.WriteFile(p.TrustFile(), []byte("null\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := p.SaveTrust(func(all map[string]Trusted) { all["id"] = Trusted{Cluster: "east"} }); err != nil {
		t.Fatal(err)
	}
	if all, err := p.LoadTrust(); err != nil || all["id"].Cluster != "east" {
		t.Errorf("%v, %v", all, err)
	}
}
