package helper

import (
	"context"
	"os"
	"testing"

	"kubevpn/internal/laptop/helper/helpertest"
	"kubevpn/pkg/host/unixsocket"
)

func TestHelpersKeepTheContract(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("NOT TESTED: only root can change the network")
	}
	t.Run("local", func(t *testing.T) {
		helpertest.Test(t, func(*testing.T) helpertest.Helper { return NewLocal(LocalConfig{UID: 501}) })
	})
	t.Run("client", func(t *testing.T) {
		helpertest.Test(t, func(t *testing.T) helpertest.Helper {
			ours, theirs, err := unixsocket.Pair("helper")
			if err != nil {
				t.Fatal(err)
			}
			ended := make(chan error, 1)
			go func() { ended <- Serve(context.Background(), theirs, LocalConfig{UID: 501}) }()
			t.Cleanup(func() {
				if err := <-ended; err != nil {
					t.Error(err)
				}
			})
			c, err := NewClient(ours, nil)
			if err != nil {
				t.Fatal(err)
			}
			return c
		})
	})
}
