// Package remotefs gives one end of a stream the files below a directory of the other end.
//
//	program ─ FUSE, or cp ─▶ Client ══ requests, answered in any order ══▶ Server ─▶ os.Root
//
// It is about single operations, at any offset, and about what a file system must keep: links, modes, errors, locks.
// OpPut is for whole files, so that nobody sees a part of one: package filesync uses it.
//
// # Consistency
//
// A Client remembers attributes and directories for a second (Fresh), and its own changes at once. Content is not kept:
// a file that is opened has what it has at the other end (close-to-open), or, if it is small and files are opened in
// order, had less than Fresh ago. What was read ahead of an open file may be older than what the other end has by now.
//
// # Few round trips
//
// An answer to OpList also has the directories below, as far as they fit, so that `ls -lR` and `git status` do not wait
// for each directory; an answer to OpOpen has the content of a small file, and small files are opened early if others
// were opened in the order of their names. Reads in order are asked for ahead of time,
// and writes are answered before they have arrived: Flush returns the error of one that failed.
//
// # Trust
//
// Neither end trusts the other: frames, names and lists are bounded, and os.Root keeps the Server's operations below
// its directory, whatever its symbolic links say.
package remotefs
