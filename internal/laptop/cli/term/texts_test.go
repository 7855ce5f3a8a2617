package term

import (
	"bytes"
	"testing"

	"kubevpn/internal/api"
)

func TestErrorIsPrintedWithItsHint(t *testing.T) {
	var out bytes.Buffer
	PrintError(&out, api.Errorf(api.ExitUsage, "no such thing").WithHint("try\nanother"))
	if want := "Error: no such thing\n  try\n  another\n"; out.String() != want {
		t.Errorf("got %q, want %q", out.String(), want)
	}
}
