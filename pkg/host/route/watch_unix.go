//go:build linux || darwin

package route

import (
	"context"
	"errors"
	"fmt"
	"os"

	"golang.org/x/sys/unix"
)

// notice calls event at once, and for each message of the kernel that may be about addresses or routes, until ctx ends.
// If the kernel has dropped messages, one call stands for them.
func notice(ctx context.Context, event func()) error {
	fd, err := openNotices()
	if err != nil {
		return fmt.Errorf("following the changes of this machine's network: %w", err)
	}
	f := os.NewFile(uintptr(fd), "network changes")
	defer f.Close()
	defer context.AfterFunc(ctx, func() { f.Close() })()
	event() // what has changed before
	for b := make([]byte, 64<<10); ; {
		n, err := f.Read(b)
		switch {
		case ctx.Err() != nil:
			return ctx.Err()
		case err != nil && !errors.Is(err, unix.ENOBUFS):
			return fmt.Errorf("following the changes of this machine's network: %w", err)
		case err != nil || isChange(b[:n]):
			event()
		}
	}
}
