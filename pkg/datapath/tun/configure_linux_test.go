package tun

import (
	"errors"
	"os"
	"testing"
)

func TestConfigureRejectsAnotherDevice(t *testing.T) {
	f, err := os.OpenFile(os.DevNull, os.O_RDWR, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if err := configure(int(f.Fd()), "t0", 1500); !errors.Is(err, ErrNoTUN) {
		t.Errorf("/dev/null as a TUN device: %v, want ErrNoTUN", err)
	}
}
