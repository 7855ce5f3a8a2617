//go:build linux

package agent

import (
	"io"
	"log/slog"
	"net"
	"net/netip"
	"strings"
	"testing"

	"kubevpn/internal/testenv"
)

func testInfoServer(t *testing.T) (d *infoServer, at string, closed func()) {
	t.Helper()
	free, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	at = free.Addr().String()
	if err := free.Close(); err != nil {
		t.Fatal(err)
	}
	d, closed = openInfoServer(netip.MustParseAddrPort(at).Port(), slog.New(slog.DiscardHandler))
	if d == nil {
		t.Fatalf("%s is not served", at)
	}
	t.Cleanup(closed)
	return d, at, closed
}

// A client that connects before there is an info waits for it; a later client receives the latest one.
func TestInfoServerSendsTheLatestInfo(t *testing.T) {
	d, at, closed := testInfoServer(t)
	early, err := net.Dial("tcp", at)
	if err != nil {
		t.Fatal(err)
	}
	defer early.Close()
	d.set([]byte("one\n"))
	if got, err := io.ReadAll(early); string(got) != "one\n" || err != nil {
		t.Errorf("%q, %v", got, err)
	}
	d.set([]byte("two\n"))
	late, err := net.Dial("tcp", at)
	if err != nil {
		t.Fatal(err)
	}
	defer late.Close()
	if got, err := io.ReadAll(late); string(got) != "two\n" || err != nil {
		t.Errorf("%q, %v", got, err)
	}
	closed()
	if conn, err := net.Dial("tcp", at); err == nil {
		conn.Close()
		t.Error("the port is still open after the close")
	}
}

// An infoServer that never gets an info can end.
func TestInfoServerEndsWithoutInfo(t *testing.T) {
	_, _, closed := testInfoServer(t)
	closed()
}

// An agent works without an info port that is in use, and logs that.
func TestInfoPortInUseIsNoError(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	log := new(testenv.Buffer)
	d, closed := openInfoServer(netip.MustParseAddrPort(l.Addr().String()).Port(), slog.New(slog.NewTextHandler(log, nil)))
	defer closed()
	if d != nil || !strings.Contains(log.String(), "address already in use") {
		t.Errorf("got %v, and the log %q", d, log)
	}
	d.set([]byte("not served"))
	d.close()
}
