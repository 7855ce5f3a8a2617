package filesync

import "time"

// Batch is what one round did. A Target gives one that says nothing changed after a comparison that found no difference, so that
// whoever waits for the first copy learns of it.
type Batch struct {
	Files    int   // written: files, links, and directories that were made
	Touched  int   // only their time or permissions were set
	Removed  int   // files, links, directories
	Bytes    int64 // of the files that were written
	Compared bool  // it followed a comparison of everything, on a new connection

	// Took is the time from the first change to the Target's acknowledgement, or of all of the comparison and the round. Only the
	// Source knows it.
	Took time.Duration

	// Failed is what is not as it should be: a Source names what it could not read and what the Target could not write.
	// The rest is not affected. Of many, it has the first hundred.
	Failed []Failure

	// Refused is how many of them the Target could not write, also of more than a hundred. Only the Source knows it.
	Refused int

	// Err is what the Target's OnSync said.
	Err error
}

// Changed reports whether there was anything to do.
func (b Batch) Changed() bool { return b.Files > 0 || b.Touched > 0 || b.Removed > 0 }

// Failure is a path, relative to the directory, and why it could not be read or written.
type Failure struct {
	Path string
	Err  error
}

// maxFailures is how many a Batch names.
const maxFailures = 100
