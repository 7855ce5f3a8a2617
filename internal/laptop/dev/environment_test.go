package dev

import (
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"

	"kubevpn/internal/kube/podenv"
)

func TestForMachineLeavesOutVariablesThatRunCode(t *testing.T) {
	taken, left := forMachine([]podenv.Variable{{Name: "COLOR"}, {Name: "LD_PRELOAD"}, {Name: "PATH", Image: true}, {Name: "PORT"}})
	if want := []podenv.Variable{{Name: "COLOR"}, {Name: "PORT"}}; !cmp.Equal(want, taken) || !slices.Equal(left, []string{"LD_PRELOAD", "PATH"}) {
		t.Errorf("taken %+v, left %v", taken, left)
	}
}
