// Package version says which kubevpn this is. Both programs, the image's tag and the words between laptop and
// cluster use String, so the two ends of a connection can tell whether they were built from the same release.
package version

import (
	"runtime/debug"
	"strings"
)

// Set by the linker: the Makefile passes commit, and version too where VERSION is given. Nothing else
// assigns them.
var (
	version = "0.1.0-dev"
	commit  = ""
)

// String is the release: a semantic version without "v" and without build metadata, so that it can be the
// tag of an image.
func String() string { return version }

// Commit is the revision of the source, with "-dirty" where the tree had changes, or "" where it is unknown.
func Commit() string {
	if commit != "" {
		return commit
	}
	info, ok := debug.ReadBuildInfo()
	if !ok {
		return ""
	}
	return commitOf(info.Settings)
}

// Full is String with the commit, for people: "0.1.0 (3f2a91c04b7e)".
func Full() string {
	if c := Commit(); c != "" {
		return version + " (" + c + ")"
	}
	return version
}

// commitOf reads what the go command recorded about the version control system (it does not under
// -buildvcs=false, hence the linker's value).
func commitOf(settings []debug.BuildSetting) string {
	var revision, suffix string
	for _, s := range settings {
		switch s.Key {
		case "vcs.revision":
			revision = s.Value[:min(12, len(s.Value))]
		case "vcs.modified":
			if s.Value == "true" {
				suffix = "-dirty"
			}
		}
	}
	if revision == "" {
		return ""
	}
	return strings.ToLower(revision) + suffix
}
