package dev

import (
	"bytes"
	"context"
	"fmt"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"testing"

	"github.com/google/go-cmp/cmp"

	"kubevpn/internal/kube/podenv"
	"kubevpn/internal/testenv"
	"kubevpn/pkg/host/sandbox"
	"kubevpn/pkg/wire/remotefs"
)

// What the pod has mounted within a remote volume belongs to that volume, and a link in it must not lead a mount away.
func TestMountsWithinARemoteVolumeAreOmitted(t *testing.T) {
	g := &guard{}
	mounts := []podenv.Mount{{Path: "/kubevpn-test", Volume: "data", Remote: true}, {Path: "/kubevpn-test/keys", Volume: "keys"},
		{Path: "/kubevpn-tests", Volume: "keys", ReadOnly: true}}
	got := g.shown(mounts, []podenv.Volume{{Name: "keys"}}, func(text string) { t.Error(text) })
	want := []sandbox.Mount{{Path: "/kubevpn-test", Remote: true}, {Path: "/kubevpn-tests", Volume: "keys", ReadOnly: true}}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("-want +got\n%s", diff)
	}
}

// The program sees the files of the other end, also below a directory that this machine lacks, as this user's.
func TestProgramSeesARemoteVolume(t *testing.T) {
	testenv.NeedFUSE(t)
	far := t.TempDir()
	if err := os.WriteFile(filepath.Join(far, "page"), []byte("of the pod\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	root, err := os.OpenRoot(far)
	if err != nil {
		t.Fatal(err)
	}
	server, err := remotefs.NewServer(root, false)
	if err != nil {
		t.Fatal(err)
	}
	near, other := net.Pipe()
	served := make(chan error, 1)
	go func() { served <- server.Serve(context.Background(), other) }()

	const at = "/srv/kubevpn-test/data"
	cfg := &Config{Warn: func(text string) { t.Error(text) }}
	r := &remoteVolumes{cfg: cfg, all: map[string]*remoteVolume{
		at: {Mount: podenv.Mount{Path: at, Volume: "data", Remote: true}, files: remotefs.NewClient(), conn: near}}}
	out, err := os.Create(filepath.Join(t.TempDir(), "out"))
	if err != nil {
		t.Fatal(err)
	}
	defer out.Close()
	box, err := sandbox.New(sandbox.Config{Init: []string{roleInit}, Stdout: out, Stderr: out, Serve: r.mounted,
		Args: []string{"sh", "-euc", `cd ` + at + `; cat page; echo mine >new; ls; stat -c %u new; ln -s page link; cat link`},
		Env:  os.Environ(), Mounts: []sandbox.Mount{{Path: at, Remote: true}}, Logger: slog.New(slog.DiscardHandler)})
	if err != nil {
		t.Fatal(err)
	}
	p := &Program{cfg: *cfg, box: box, remote: r}
	status, err := p.Run(t.Context())
	if err != nil || status.Code != 0 {
		t.Errorf("%+v, %v", status, err)
	}
	if err := <-served; err != nil {
		t.Error(err)
	}
	said, err := os.ReadFile(out.Name())
	want := fmt.Sprintf("of the pod\nnew\npage\n%d\nof the pod\n", os.Geteuid())
	if err != nil || string(said) != want {
		t.Errorf("%q, %v, want %q", said, err, want)
	}
	if text, err := os.ReadFile(filepath.Join(far, "new")); err != nil || !bytes.Equal(text, []byte("mine\n")) {
		t.Errorf("%q, %v", text, err)
	}
}
