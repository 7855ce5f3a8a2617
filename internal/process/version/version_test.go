package version

import (
	"regexp"
	"runtime/debug"
	"testing"
)

func TestStringIsAnImageTag(t *testing.T) {
	if !regexp.MustCompile(`^[0-9][0-9A-Za-z_.-]{0,127}$`).MatchString(String()) {
		t.Errorf("String() = %q, which cannot be the tag of an image", String())
	}
}

func TestCommitOfNamesRevisionAndChanges(t *testing.T) {
	revision := debug.BuildSetting{Key: "vcs.revision", Value: "3F2a91c04b7e55aa"}
	tests := []struct {
		name     string
		settings []debug.BuildSetting
		want     string
	}{
		{"not-recorded", nil, ""},
		{"clean", []debug.BuildSetting{revision, {Key: "vcs.modified", Value: "false"}}, "3f2a91c04b7e"},
		{"dirty", []debug.BuildSetting{revision, {Key: "vcs.modified", Value: "true"}}, "3f2a91c04b7e-dirty"},
		{"short", []debug.BuildSetting{{Key: "vcs.revision", Value: "3f2"}}, "3f2"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			if got := commitOf(tt.settings); got != tt.want {
				t.Errorf("commitOf = %q, want %q", got, tt.want)
			}
		})
	}
}
