//go:build !linux

package doctor

import (
	"context"
	"os"
	"runtime"

	"kubevpn/internal/api"
)

func kernel(context.Context, *facts) api.Finding { return ok("%s/%s", runtime.GOOS, runtime.GOARCH) }

func device(context.Context, *facts) api.Finding {
	if runtime.GOOS == "darwin" {
		return skipped("macOS creates utun devices; whether it can is not checked")
	}
	return skipped("kubevpn has no TUN device on %s: use `%s`", runtime.GOOS, withoutDevice)
}

func nftables(context.Context, *facts) api.Finding { return skipped("nftables exists on Linux only") }

func rootCapability() api.Finding { return ok("this is root") }

func storage(_ context.Context, f *facts) api.Finding {
	dir := ancestor(f.Paths.StateDir)
	if _, err := os.ReadDir(dir); err != nil {
		return failed(api.Errorf(api.ExitDaemon, "cannot read %s: %w", dir, err).
			WithHint("set XDG_STATE_HOME to a directory that you may write to"), "the daemon cannot write its log")
	}
	return skipped("free space is checked on Linux only")
}

func ports(context.Context, *facts) api.Finding {
	return skipped("the range of ports is checked on Linux only")
}

func lacksNFTables() (err error, known bool) { return nil, false }
