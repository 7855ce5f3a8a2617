package report

import (
	"slices"
	"testing"
)

func TestEnvironmentOmitsWhatIsNoSecret(t *testing.T) {
	got := Environment([]string{"PATH=/bin:/usr/bin", "HOME=/", "TERM=xterm", "LANG=en_US.UTF-8", "USER=ann-marie",
		"KUBEVPN_IMAGE=registry.example/kubevpn:1", "HOST=10.96.0.1", "A=" + t.TempDir(), "B=1234567",
		"C=12345678", "MY_KEY=12", "URL=https://ann:pw@host/", "SSH_AUTH_SOCK=/tmp/x"})
	if want := []string{"12345678", "12", "https://ann:pw@host/", "pw", "/tmp/x"}; !slices.Equal(got, want) {
		t.Errorf("got %q, want %q", got, want)
	}
}
