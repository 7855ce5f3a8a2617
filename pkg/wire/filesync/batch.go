package filesync

import "time"

// Batch is the result of one round. Fields with a JSON name are in the Target's report to the Source.
type Batch struct {
	Files   int   `json:"files"`   // written: files, links and directories
	Removed int   `json:"removed"` // files, links and directories
	Bytes   int64 `json:"bytes"`   // content of the files that were written

	// Complete is true once for each connection: when the Target first has everything that can be copied.
	Complete bool `json:"-"`

	// Took is the time from the first change to the Target's acknowledgement. Only the Source sets it.
	Took time.Duration `json:"-"`

	// Failed names the paths that the Source could not read or the Target could not write, at most 100 of them. Other
	// paths are not affected. Only the Source sets it.
	Failed []Failure `json:"-"`

	// Rejected counts the paths that the Target could not write, including those that Failed does not name. Only the
	// Source sets it.
	Rejected int `json:"-"`
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
