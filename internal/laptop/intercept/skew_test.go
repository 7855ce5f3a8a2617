package intercept

import (
	"errors"
	"testing"

	"kubevpn/internal/api"
)

// Agents one protocol ahead or behind serve intercepts. TestNeighboursWork of internal/repotest runs this also with a
// laptop of the next protocol.
func TestAgentOfNeighbouringMinorVersionIsUsed(t *testing.T) {
	for name, protocols := range map[string][2]int{"first": {3, 0}, "this": {3, 3}, "next": {4, 3}} {
		t.Run(name, func(t *testing.T) {
			w := newWorld(t, "web-1")
			w.protocols = protocols
			if _, _, err := begin(t, w, api.InterceptSpec{}); err != nil {
				t.Error(err)
			}
		})
	}
	w := newWorld(t, "web-1")
	w.protocols = [2]int{9, 8}
	var e *api.Error
	if _, _, err := begin(t, w, api.InterceptSpec{}); !errors.As(err, &e) || e.Code != api.ExitIncompatible || e.Hint == "" {
		t.Errorf("an agent two protocols ahead: %v", err)
	}
}
