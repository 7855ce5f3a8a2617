package route

import "testing"

func TestTunnelTakesEverything(t *testing.T) {
	for name, tt := range map[string]struct {
		routes []string
		want   bool
	}{
		"a default route of IPv4": {[]string{"10.0.0.0/8", "0.0.0.0/0"}, true},
		"a default route of IPv6": {[]string{"::/0"}, true},
		"two halves":              {[]string{"128.0.0.0/1", "0.0.0.0/1"}, true},
		"two halves of IPv6":      {[]string{"::/1", "8000::/1"}, true},
		"halves of two families":  {[]string{"0.0.0.0/1", "8000::/1"}, false},
		"a part":                  {[]string{"10.0.0.0/8"}, false},
	} {
		t.Run(name, func(t *testing.T) {
			if got := (Tunnel{Routes: prefixes(tt.routes...)}).Everything(); got != tt.want {
				t.Errorf("Everything = %v, want %v", got, tt.want)
			}
		})
	}
}
