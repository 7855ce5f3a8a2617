//go:build !linux

package doctor

import (
	"context"
	"runtime"

	"kubevpn/internal/api"
)

func kernel(context.Context, *facts) api.Finding { return ok("%s/%s", runtime.GOOS, runtime.GOARCH) }

func device(context.Context, *facts) api.Finding {
	return skipped("a device on %s is not checked; `%s` needs none", runtime.GOOS, withoutDevice)
}

// onLinux is the finding of a check that needs Linux.
func onLinux() api.Finding { return skipped("only Linux has what this checks") }

func nftables(context.Context, *facts) api.Finding { return onLinux() }
func storage(context.Context, *facts) api.Finding  { return onLinux() }
func ports(context.Context, *facts) api.Finding    { return onLinux() }

func rootCapability() api.Finding { return ok("this is root") }

func release() string { return "" }

func lacksNFTables(string) (err error, known bool) { return nil, false }
