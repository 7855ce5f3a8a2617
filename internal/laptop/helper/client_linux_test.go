package helper

import (
	"context"
	"errors"
	"io"
	"os"
	"testing"
	"time"
)

// After an interrupted call returns, the device must be gone, and not a moment later.
func TestCreateTUNWaitsForTheAnswer(t *testing.T) {
	d, h := pair(t)
	c, err := NewClient(d, nil)
	if err != nil {
		t.Fatal(err)
	}
	helper, err := openWire(h)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	result := make(chan error, 1)
	go func() {
		_, err := c.CreateTUN(ctx, "kubevpn0", 1500)
		result <- err
	}()
	var r request
	if _, err := helper.Receive(&r, ""); err != nil {
		t.Fatal(err)
	}
	cancel()
	select {
	case err := <-result:
		t.Fatalf("it did not wait for the device: %v", err)
	case <-time.After(50 * time.Millisecond):
	}
	gone, device, err := os.Pipe() // its read end sees when the last descriptor of the other is closed
	if err != nil {
		t.Fatal(err)
	}
	if err := helper.Send(response{ID: r.ID}, device); err != nil {
		t.Fatal(err)
	}
	device.Close()
	if err := <-result; !errors.Is(err, context.Canceled) {
		t.Errorf("error %v, want that it was canceled", err)
	}
	if err := gone.SetReadDeadline(time.Now().Add(5 * time.Second)); err != nil {
		t.Fatal(err)
	}
	if _, err := gone.Read(make([]byte, 1)); err != io.EOF {
		t.Errorf("reading: %v, want that nobody has the descriptor", err)
	}
	gone.Close()
	helper.Close()
	if err := c.Close(); err != nil {
		t.Fatal(err)
	}
}
