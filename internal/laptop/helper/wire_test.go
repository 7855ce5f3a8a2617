package helper

import (
	"bytes"
	"encoding/json"
	"testing"
)

// A request of any daemon must not make the helper panic, and means the same after it is sent again.
func FuzzRequest(f *testing.F) {
	for _, message := range []any{
		request{ID: 1, Op: opTUN, Name: "kubevpn0", MTU: 1500}, request{ID: 2, Op: opApply}, []int{1}, "text", nil,
	} {
		b, err := json.Marshal(message)
		if err != nil {
			f.Fatal(err)
		}
		f.Add(b)
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		var r, again request
		if json.Unmarshal(b, &r) != nil {
			return
		}
		if r.State != nil {
			_ = check(*r.State, &Policy{})
		}
		first, err := json.Marshal(r)
		if err != nil {
			t.Fatal(err)
		}
		if err := json.Unmarshal(first, &again); err != nil {
			t.Fatal(err)
		}
		if second, err := json.Marshal(again); err != nil || !bytes.Equal(first, second) {
			t.Fatalf("sent %q, received %q, %v", first, second, err)
		}
	})
}
