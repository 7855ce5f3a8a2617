//go:build unix

package config

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"encoding/pem"
	"os"
	"path/filepath"
	"sync"
	"testing"
)

func TestClientKeyIsCreatedOnce(t *testing.T) {
	p := Paths{StateDir: filepath.Join(t.TempDir(), "state")}
	if err := p.MakeStateDir(); err != nil {
		t.Fatal(err)
	}
	keys := make([]*ecdsa.PrivateKey, 8)
	var wg sync.WaitGroup
	for i := range keys {
		wg.Go(func() {
			key, err := p.ClientKey()
			if err != nil {
				t.Error(err)
			}
			keys[i] = key
		})
	}
	wg.Wait()
	for _, key := range keys {
		if key == nil || !key.Equal(keys[0]) {
			t.Fatal("concurrent callers got different keys")
		}
	}
	entries, err := os.ReadDir(p.StateDir)
	if err != nil || len(entries) != 1 || entries[0].Name() != "client.key" {
		t.Fatalf("state directory = %v, %v; want client.key alone", entries, err)
	}
	if info, err := entries[0].Info(); err != nil || info.Mode().Perm() != 0o600 {
		t.Errorf("mode = %v, %v; want 0600", info.Mode(), err)
	}
}

// Older versions stored the key in PKCS #8. The owner of intercepts must stay the same.
func TestClientKeyReadsAnOldFile(t *testing.T) {
	want, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	der, err := x509.MarshalPKCS8PrivateKey(want)
	if err != nil {
		t.Fatal(err)
	}
	p := Paths{StateDir: t.TempDir()}
	text := pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: der})
	if err := os.WriteFile(p.KeyFile(), text, 0o600); err != nil {
		t.Fatal(err)
	}
	if got, err := p.ClientKey(); err != nil || !got.Equal(want) {
		t.Errorf("ClientKey = %v, %v; want the key of the file", got, err)
	}
}

func TestClientKeyRejectsAFileOfAnotherUser(t *testing.T) {
	tests := []struct {
		name  string
		spoil func(path string) error
		want  string
	}{
		{"readable by others", func(path string) error { return os.Chmod(path, 0o644) }, "has mode 0644, but must not be accessible to others (0600)"},
		{"readable by the group", func(path string) error { return os.Chmod(path, 0o640) }, "has mode 0640"},
		{"no key", func(path string) error { return os.WriteFile(path, []byte("nonsense"), 0o600) }, "does not contain a private key"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			p := Paths{StateDir: t.TempDir()}
			if _, err := p.ClientKey(); err != nil {
				t.Fatal(err)
			}
			if err := tt.spoil(filepath.Join(p.StateDir, "client.key")); err != nil {
				t.Fatal(err)
			}
			_, err := p.ClientKey()
			wantDaemonError(t, err, tt.want)
		})
	}
	t.Run("not a file", func(t *testing.T) {
		p := Paths{StateDir: t.TempDir()}
		if err := os.Mkdir(filepath.Join(p.StateDir, "client.key"), 0o700); err != nil {
			t.Fatal(err)
		}
		_, err := p.ClientKey()
		wantDaemonError(t, err, "is not a regular file")
	})
	t.Run("another user's", func(t *testing.T) {
		if os.Geteuid() != 0 {
			t.Skip("only root can give files to another user")
		}
		p := Paths{StateDir: t.TempDir()}
		if _, err := p.ClientKey(); err != nil {
			t.Fatal(err)
		}
		if err := os.Chown(filepath.Join(p.StateDir, "client.key"), 12345, -1); err != nil {
			t.Fatal(err)
		}
		_, err := p.ClientKey()
		wantDaemonError(t, err, "belongs to user 12345")
	})
}
