package daemon

import (
	"errors"
	"fmt"
	"os"
	"strconv"
)

// lock makes this process the only daemon, or returns ErrRunning. The system unlocks the file when the process ends.
// The file stays: after its removal, two processes could lock two files of the same name.
func lock(path string) (unlock func() error, err error) {
	f, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		return nil, fmt.Errorf("cannot open the daemon's lock: %w", err)
	}
	if err = lockFile(f); err == nil {
		err = f.Truncate(0)
	}
	if err == nil { // the CLI shows the PID of a daemon that does not answer
		_, err = f.WriteString(strconv.Itoa(os.Getpid()) + "\n")
	}
	if err != nil {
		f.Close()
		if errors.Is(err, ErrRunning) {
			return nil, err
		}
		return nil, fmt.Errorf("cannot lock %s: %w", path, err)
	}
	return f.Close, nil
}
