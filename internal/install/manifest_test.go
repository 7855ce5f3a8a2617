package install

import (
	"bytes"
	"flag"
	"os"
	"testing"

	"github.com/google/go-cmp/cmp"

	"kubevpn/internal/version"
)

var update = flag.Bool("update", false, "overwrite testdata")

func TestManifestEqualsTheStoredOne(t *testing.T) {
	got, err := Manifest(Options{Image: "registry.example/kubevpn:1", APIServers: []string{"10.0.0.2:6443", "10.0.0.1:6443"}})
	if err != nil {
		t.Fatal(err)
	}
	got = bytes.ReplaceAll(got, []byte("version: "+labelValue(version.String())), []byte("version: VERSION"))
	const file = "testdata/manifest.yaml"
	if *update {
		if err := os.WriteFile(file, got, 0o644); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	if d := cmp.Diff(string(want), string(got)); d != "" {
		t.Errorf("%s (-want +got), go test -update writes it:\n%s", file, d)
	}
}

func TestLabelValueReplacesInvalidCharacters(t *testing.T) {
	for _, tt := range []struct{ in, want string }{
		{"0.1.0-dev", "0.1.0-dev"}, {"1.0+build/7", "1.0-build-7"}, {"-x-", "x"}, {"", ""},
		{"aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa", "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa"},
	} {
		if got := labelValue(tt.in); got != tt.want {
			t.Errorf("%q: %q, want %q", tt.in, got, tt.want)
		}
	}
}
