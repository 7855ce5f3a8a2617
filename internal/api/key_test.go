package api

import "testing"

func TestKeyHash(t *testing.T) {
	const abc = "ungWv48Bz-pBQUDeXa4iI7ADYaOWF3qctBD_YfIAFa0" // FIPS 180-2, B.1
	if got := KeyHash([]byte("abc")); got != abc {
		t.Errorf("got %s, want %s", got, abc)
	}
}
