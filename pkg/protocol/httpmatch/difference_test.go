package httpmatch

import (
	"fmt"
	"net/http"
	"strings"
	"testing"
)

func TestDifferencesNameWhatDoesNotMatch(t *testing.T) {
	m, err := New(Spec{Headers: []Named{{Name: "X-User", Value: "me"}, {Name: "x-team", Value: "=~a|b"}}, Path: "/api",
		Methods: []string{"get", "PUT"}})
	if err != nil {
		t.Fatal(err)
	}
	for _, tt := range []struct {
		method, path string
		header       []string
		want         string
	}{
		{"GET", "/api/x", []string{"x-user", "me", "x-team", "a"}, "[]"},
		{"GET", "/api", []string{"x-team", "b"}, "[header x-user is absent]"},
		{"GET", "/api", []string{"x-user", "you", "x-team", "c"},
			`[header x-user is "you", not "me" header x-team is "c", not "=~a|b"]`},
		{"POST", "/", []string{"x-user", "me", "x-team", "a"},
			`[method is "POST", not "GET or PUT" path is "/", not "/api"]`},
	} {
		r, err := http.NewRequest(tt.method, "http://web"+tt.path, nil)
		if err != nil {
			t.Fatal(err)
		}
		for i := 0; i < len(tt.header); i += 2 {
			r.Header.Add(tt.header[i], tt.header[i+1])
		}
		got := m.Differences(r)
		if fmt.Sprint(got) != tt.want || len(got) == 0 != m.Matches(r) {
			t.Errorf("%s %s %q: got %v, want %s", tt.method, tt.path, tt.header, got, tt.want)
		}
	}
	r, err := http.NewRequest("GET", "http://web/api", nil)
	if err != nil {
		t.Fatal(err)
	}
	r.Header.Set("X-User", strings.Repeat("x", 1<<20))
	for _, d := range m.Differences(r) {
		if len(d.Got) > maxGot {
			t.Errorf("%d bytes of %s", len(d.Got), d.Part)
		}
	}
}
