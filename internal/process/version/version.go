// Package version contains the version of this build. Both programs, the image tag and the messages between laptop and
// cluster use String, so that both ends of a connection can tell whether they have the same release.
package version

import (
	"runtime/debug"
	"strings"
)

// The linker sets these variables: the Makefile passes commit, version if VERSION is set, and image for a release.
// Nothing else assigns them.
var (
	version = "0.1.0-dev"
	commit  = ""
	image   = ""
)

// Image returns the image of the traffic manager of this release, REPOSITORY@sha256:DIGEST. It is empty for other
// builds, which have no trustworthy default.
func Image() string { return image }

// String returns the release: a semantic version without "v" and without build metadata, so that it is a valid image
// tag.
func String() string { return version }

// Commit returns the revision of the source, with "-dirty" if the tree had changes, or "" if it is unknown.
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

// Full returns String and the commit, for people: "0.1.0 (3f2a91c04b7e)".
func Full() string {
	if c := Commit(); c != "" {
		return version + " (" + c + ")"
	}
	return version
}

// commitOf returns the revision that the go command recorded. With -buildvcs=false it records none, so the linker sets
// commit.
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
