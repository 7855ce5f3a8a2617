//go:build e2e && linux

package e2e

import (
	"archive/tar"
	"compress/gzip"
	"encoding/base64"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"kubevpn/internal/kube/client"
	"kubevpn/internal/testenv"
)

// reports checks that `kubevpn report` collects all logs during an intercept, and no credential.
func (l *laptop) reports(t *testing.T, s *shop) {
	t.Helper()
	var all string
	var files map[string]string
	tries := 0
	testenv.Eventually(t, soon, func() error { // the kubelet serves the log of a new container late
		tries++
		file := filepath.Join(l.home, fmt.Sprintf("report-%d.tar.gz", tries))
		all = l.must(t, "kubevpn", "report", "--file", file, "-n", s.namespace, "--why", "http://shop."+s.namespace+"/")
		files = unpack(t, file)
		for part, content := range map[string]string{
			"daemon.log": "level=INFO", "status.json": `"workload": "` + s.workload + `"`, "cluster.txt": "API server v", "why.txt": " answer ",
			"routes.txt": "kubevpn", "rules.txt": "table", "resolver.txt": "nameserver",
			"-manager.log": "msg=", "kubevpn-agent-1.log": "protocol",
		} {
			if !slices.ContainsFunc(slices.Collect(maps.Keys(files)), func(name string) bool {
				return strings.Contains(name, part) && strings.Contains(files[name], content)
			}) {
				return fmt.Errorf("no %s contains %q: %s", part, content, all)
			}
		}
		return nil
	})
	t.Log(all)
	for _, text := range files {
		all += text
	}
	key, err := os.ReadFile(filepath.Join(l.home, "state", "kubevpn", "client.key"))
	if err != nil {
		t.Fatal(err)
	}
	secrets := append(client.Inputs{Kubeconfig: l.kubeconfig}.Secrets(), string(key))
	for _, secret := range secrets {
		encoded := base64.StdEncoding.EncodeToString([]byte(secret))
		if secret != "" && (strings.Contains(all, secret) || strings.Contains(all, encoded)) {
			t.Error("the archive contains a credential")
		}
	}
}

// unpack returns the files of an archive by their names.
func unpack(t *testing.T, file string) map[string]string {
	t.Helper()
	f, err := os.Open(file)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	zip, err := gzip.NewReader(f)
	if err != nil {
		t.Fatal(err)
	}
	files := map[string]string{}
	for r := tar.NewReader(zip); ; {
		h, err := r.Next()
		if errors.Is(err, io.EOF) {
			return files
		}
		text, reading := io.ReadAll(r)
		if err := errors.Join(err, reading); err != nil {
			t.Fatal(err)
		}
		files[h.Name] = string(text)
	}
}
