//go:build !linux

package doctor

import (
	"context"
	"runtime"

	"kubevpn/internal/api"
	"kubevpn/internal/inspect/check"
)

func kernel(context.Context, *facts) api.Finding {
	return check.OK("%s/%s", runtime.GOOS, runtime.GOARCH)
}

func device(context.Context, *facts) api.Finding {
	return check.Skipped("a device on %s is not checked; `%s` needs none", runtime.GOOS, withoutDevice)
}

// onLinux is the finding of a check that needs Linux.
func onLinux() api.Finding { return check.Skipped("only Linux has what this checks") }

func nftables(context.Context, *facts) api.Finding { return onLinux() }
func storage(context.Context, *facts) api.Finding  { return onLinux() }
func ports(context.Context, *facts) api.Finding    { return onLinux() }

func rootCapability() api.Finding { return check.OK("this is root") }

func release() string { return "" }

func lacksNFTables(string) (err error, known bool) { return nil, false }
