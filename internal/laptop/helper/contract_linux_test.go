package helper

import (
	"testing"

	"kubevpn/internal/laptop/helper/helpertest"
	"kubevpn/internal/testenv"
)

func TestHelpersKeepTheContract(t *testing.T) {
	if !testenv.InNamespace(t, "nft") {
		return
	}
	privateEtc(t, "nameserver 192.0.2.1\n")
	t.Run("local", func(t *testing.T) {
		helpertest.Test(t, func(*testing.T) helpertest.Helper { return NewLocal(LocalConfig{UID: 1000}) })
	})
	t.Run("client", func(t *testing.T) {
		helpertest.Test(t, func(t *testing.T) helpertest.Helper {
			c, ended := inProcess(t)
			t.Cleanup(func() {
				if err := <-ended; err != nil {
					t.Error(err)
				}
			})
			return c
		})
	})
}
