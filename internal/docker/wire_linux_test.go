package docker

import (
	"bytes"
	"io"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"kubevpn/internal/podenv"
)

// answering is a wire whose other end sends bytes, and reads whatever it is told.
func answering(answer io.Reader) *wire {
	ours, theirs := net.Pipe()
	go func() { _, _ = io.Copy(io.Discard, theirs) }() // until ours is closed
	go func() {
		_, _ = io.Copy(theirs, answer) // ours may be closed before all is sent
		theirs.Close()
	}()
	return newWire(ours)
}

// endless is a report that does not end.
type endless struct{ sent int }

func (e *endless) Read(b []byte) (int, error) {
	if e.sent > 16<<20 {
		return 0, io.EOF
	}
	n := copy(b, strings.Repeat("a", len(b)))
	if e.sent == 0 {
		n = copy(b, `{"path":"`)
	}
	e.sent += n
	return n, nil
}

// A container cannot fill this machine's memory.
func TestReportIsBounded(t *testing.T) {
	var sent endless
	w := answering(&sent)
	if _, err := w.ask(order{Resolve: &position{"scratch", "a"}}); err == nil {
		t.Error("a report without an end was received")
	}
	if err := w.conn.Close(); err != nil {
		t.Fatal(err)
	}
	if most := 4 * reportBytes; sent.sent > most {
		t.Errorf("%d bytes of it were read, want at most %d", sent.sent, most)
	}
}

// Whatever the other end of the wire answers, what the engine mounts is in the volume.
func FuzzReport(f *testing.F) {
	for _, seed := range []string{
		`{}`, `{"path":"..1/page"}`, `{"path":"../../../../etc"}`, `{"path":"/etc"}`, `{"path":"a/../../b"}`, `{"path":"a\u0000b"}`,
		`{"error":{"text":"no","errno":2}}`, `{"ended":-1}`, `{"path":`, `[`, `null`, "",
	} {
		f.Add([]byte(seed))
	}
	f.Fuzz(func(t *testing.T, answer []byte) {
		w := answering(bytes.NewReader(answer))
		defer w.conn.Close()
		r := &run{Config: Config{Warn: func(string) {}}, network: &networkContainer{files: w, volumes: "/volumes"},
			mounts: map[string][]podenv.Mount{"web": {{Path: "/cache", Volume: "scratch", SubPath: "a"}}}}
		mounts, err := r.resolve(container{name: "web"})
		for _, m := range mounts {
			if at := source("/volumes", "scratch", ""); err != nil || m.source != at && !strings.HasPrefix(m.source, at+"/") {
				t.Errorf("%q is mounted, %v", m.source, err)
			}
		}
	})
}

// Whatever the network container is told, it writes in the directory of its volumes alone.
func FuzzOrder(f *testing.F) {
	for _, seed := range []string{
		`{"volume":{"name":"keys","files":[{"path":"password","mode":256,"owner":1000,"data":"b25l"}],"group":3000,"points":["in/it"]}}`,
		`{"volume":{"name":"scratch","empty":true}}{"resolve":{"volume":"scratch","path":"a/b"}}`,
		`{"volume":{"name":"keys","files":[{"path":"a","data":""}]}}{"volume":{"name":"keys"}}{"resolve":{"volume":"keys","path":"a"}}`,
		`{"volume":{"name":"../x"}}`, `{"volume":{"name":"x","files":[{"path":"../../y"}]}}`, `{"volume":{"name":"x","empty":true,"points":["../../z","/z"]}}`,
		`{"volume":{"name":"x","empty":true}}{"resolve":{"volume":"x","path":"../.."}}`, `{"volume":{"name":".."}}`, `{"signal":9}`, `{"program":{}}`, `{"volume":`, "",
	} {
		f.Add([]byte(seed))
	}
	f.Fuzz(func(t *testing.T, orders []byte) {
		outside := t.TempDir()
		volumes := filepath.Join(outside, "a", "b")
		if err := os.MkdirAll(volumes, 0o755); err != nil {
			t.Fatal(err)
		}
		ours, theirs := net.Pipe()
		go func() { _, _ = io.Copy(io.Discard, ours) }() // the answers, until theirs is closed
		go func() {
			_, _ = ours.Write(orders) // theirs may be closed before all is sent
			ours.Close()
		}()
		_ = keepFiles(theirs, volumes) // it may well refuse
		theirs.Close()
		if err := filepath.WalkDir(outside, func(name string, _ fs.DirEntry, err error) error {
			if !strings.HasPrefix(volumes+"/", name+"/") && !strings.HasPrefix(name, volumes+"/") {
				t.Errorf("it has made %s", name)
			}
			return err
		}); err != nil {
			t.Fatal(err)
		}
	})
}
