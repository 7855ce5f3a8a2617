package filesync

import "time"

// Batch is the result of one round.
type Batch struct {
	Files   int   // written: files, links and directories
	Removed int   // files, links and directories
	Bytes   int64 // content of the files that were written

	// Complete is true once for each connection: when the container first has everything that can be copied.
	Complete bool

	// Took is the time from the first change to the acknowledgement.
	Took time.Duration

	// Failed names the paths that could not be read or written, at most 100 of them. Other paths are not affected.
	Failed []Failure

	// Rejected counts the paths that could not be written, including those that Failed does not name.
	Rejected int
}

// Changed reports whether the round wrote or removed anything.
func (b Batch) Changed() bool { return b.Files > 0 || b.Removed > 0 }

// Failure is a path, relative to the directory, and why it could not be read or written.
type Failure struct {
	Path string
	Err  error
}

// maxFailures bounds Batch.Failed.
const maxFailures = 100
