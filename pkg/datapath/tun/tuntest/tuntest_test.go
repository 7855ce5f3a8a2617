package tuntest

import (
	"errors"
	"os"
	"testing"
	"time"
)

func TestPairConnectsTwoDevices(t *testing.T) {
	a, b := Pair(1500, true)
	if err := a.Writev([][]byte{{1}, {2, 3}}); err != nil {
		t.Fatal(err)
	}
	buf := make([]byte, 10)
	if n, err := b.Read(buf); err != nil || string(buf[:n]) != "\x01\x02\x03" {
		t.Errorf("read %x, %v", buf[:n], err)
	}
	b.SetReadDeadline(time.Now())
	if _, err := b.Read(buf); !errors.Is(err, os.ErrDeadlineExceeded) {
		t.Errorf("after the deadline: %v", err)
	}
	b.SetReadDeadline(time.Time{})
	a.Close()
	if _, err := b.Read(buf); !errors.Is(err, os.ErrClosed) {
		t.Errorf("after Close: %v", err)
	}
	if err := b.Writev([][]byte{{1}}); !errors.Is(err, os.ErrClosed) {
		t.Errorf("writing after Close: %v", err)
	}
}
