package intercept

import (
	"strings"
	"testing"
)

// FuzzParseInfo parses any line of a container's log.
func FuzzParseInfo(f *testing.F) {
	for _, seed := range []string{
		`{"protocol":2,"version":"1","port":10803,"key":"abc"}`, `{"error":{"code":14,"message":"another agent has this pod"}}`,
		`{"protocol":0,"port":1,"key":"x"}`, `{"port":99999}`, `{"protocol":2,"port":-1,"key":"x"}`, `level=INFO msg=leader`, `{`, `null`, ``,
	} {
		f.Add(seed)
	}
	f.Fuzz(func(t *testing.T, line string) {
		g, ok := parseInfo(line)
		if !ok {
			return
		}
		if !strings.HasPrefix(line, "{") {
			t.Errorf("parseInfo accepts %q", line)
		}
		if g.Error == nil && (g.Key == "" || g.Port == 0 || g.Protocol == 0) {
			t.Errorf("parseInfo(%q) is incomplete: %+v", line, g)
		}
	})
}
