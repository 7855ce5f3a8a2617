package connection

import "testing"

// A manager that learns its client's identity must not be able to use it at another one.
func TestClientIDDiffersByManager(t *testing.T) {
	id := func(secret, cluster, namespace string) string {
		t.Helper()
		id, err := clientID([]byte(secret), cluster, namespace)
		if err != nil || len(id) != 32 {
			t.Fatalf("clientID = %q, %v; want 32 digits", id, err)
		}
		return id
	}
	first := id("secret", "c1", "kubevpn")
	if again := id("secret", "c1", "kubevpn"); again != first {
		t.Errorf("clientID = %q, then %q; want one identity", first, again)
	}
	for name, other := range map[string]string{
		"another cluster":   id("secret", "c2", "kubevpn"),
		"another namespace": id("secret", "c1", "team"),
		"another key":       id("other", "c1", "kubevpn"),
	} {
		if other == first {
			t.Errorf("%s has the same identity", name)
		}
	}
}
