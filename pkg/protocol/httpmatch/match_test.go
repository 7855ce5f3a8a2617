package httpmatch

import (
	"bufio"
	"net/http"
	"net/url"
	"slices"
	"strings"
	"testing"
)

// request reads a request as a server does.
func request(t testing.TB, lines ...string) *http.Request {
	t.Helper()
	r, err := http.ReadRequest(bufio.NewReader(strings.NewReader(strings.Join(lines, "\r\n") + "\r\n\r\n")))
	if err != nil {
		t.Fatal(err)
	}
	return r
}

func get(t testing.TB, path string, headers ...string) *http.Request {
	t.Helper()
	return request(t, append([]string{"GET " + path + " HTTP/1.1", "Host: web.default:8080"}, headers...)...)
}

func mustNew(t testing.TB, s Spec) *Match {
	t.Helper()
	m, err := New(s)
	if err != nil {
		t.Fatal(err)
	}
	return m
}

func headers(lines ...string) Spec {
	var s Spec
	for _, l := range lines {
		h, err := ParseNamed(l)
		if err != nil {
			panic(err)
		}
		s.Headers = append(s.Headers, h)
	}
	return s
}

func TestMatchesRequiresAllFields(t *testing.T) {
	tests := []struct {
		name string
		spec Spec
		r    *http.Request
		want bool
	}{
		{"zero", Spec{}, get(t, "/"), true},

		{"header", headers("x-user=me"), get(t, "/", "X-USER: me"), true},
		{"header-absent", headers("x-user=me"), get(t, "/"), false},
		{"header-longer", headers("x-user=me"), get(t, "/", "X-User: me2"), false},
		{"header-case", headers("x-user=me"), get(t, "/", "X-User: Me"), false},
		{"header-repeated", headers("x-user=me"), get(t, "/", "X-User: you", "X-User: me"), true},
		{"header-list", headers("x-user=me"), get(t, "/", "X-User: you, me"), false},
		{"header-empty", headers("x-debug="), get(t, "/", "X-Debug:"), true},
		{"header-empty-absent", headers("x-debug="), get(t, "/"), false},
		{"header-equals", headers("cookie=user=me"), get(t, "/", "Cookie: user=me"), true},
		{"headers-both", headers("x-user=me", "x-team=red"), get(t, "/", "X-User: me", "X-Team: red"), true},
		{"headers-one", headers("x-user=me", "x-team=red"), get(t, "/", "X-User: me"), false},
		{"headers-same-name", headers("x-user=me", "x-user=you"), get(t, "/", "X-User: me", "X-User: you"), true},

		{"host", headers("host=web.default:8080"), get(t, "/"), true},
		{"host-other", headers("Host=web.default"), get(t, "/"), false},
		{"host-regexp", headers("host=~web\\..*"), get(t, "/"), true},

		{"regexp", headers("x-user=~m[ey]"), get(t, "/", "X-User: my"), true},
		{"regexp-whole-begin", headers("x-user=~m[ey]"), get(t, "/", "X-User: not-my"), false},
		{"regexp-whole-end", headers("x-user=~m[ey]"), get(t, "/", "X-User: myself"), false},
		{"regexp-alternatives", headers("x-user=~me|you"), get(t, "/", "X-User: meyou"), false},
		{"regexp-alternatives-take", headers("x-user=~me|you"), get(t, "/", "X-User: you"), true},
		{"regexp-flags", headers("x-user=~(?i)me"), get(t, "/", "X-User: ME"), true},
		{"regexp-lines", headers("x-user=~(?m)^me$"), get(t, "/", "X-User: me"), true},
		{"regexp-open-quote", headers(`x-user=~\Qa.b`), get(t, "/", "X-User: a.b"), true},
		{"regexp-open-quote-whole", headers(`x-user=~\Qa.b`), get(t, "/", "X-User: a.b)"), false},

		{"baggage", Spec{Baggage: []Named{{"user", "me"}}}, get(t, "/", "Baggage: team=red,user=me"), true},
		{"baggage-lines", Spec{Baggage: []Named{{"user", "me"}}}, get(t, "/", "Baggage: team=red", "Baggage: user=me"), true},
		{"baggage-properties", Spec{Baggage: []Named{{"user", "me"}}}, get(t, "/", "Baggage: user = me ;ttl=3; x , y=z"), true},
		{"baggage-encoded", Spec{Baggage: []Named{{"user", "me, myself"}}}, get(t, "/", "Baggage: user=me%2C%20myself"), true},
		{"baggage-substring", Spec{Baggage: []Named{{"user", "me"}}}, get(t, "/", "Baggage: user=me2,xuser=me"), false},
		{"baggage-property-is-none", Spec{Baggage: []Named{{"user", "me"}}}, get(t, "/", "Baggage: a=b;user=me"), false},
		{"baggage-key-case", Spec{Baggage: []Named{{"user", "me"}}}, get(t, "/", "Baggage: User=me"), false},
		{"baggage-plus", Spec{Baggage: []Named{{"user", "a+b"}}}, get(t, "/", "Baggage: user=a+b"), true},
		{"baggage-malformed", Spec{Baggage: []Named{{"user", "%zz"}}}, get(t, "/", "Baggage: ,=,user=%zz"), true},
		{"baggage-regexp", Spec{Baggage: []Named{{"user", "=~m."}}}, get(t, "/", "Baggage: user=me"), true},
		{"baggage-regexp-whole", Spec{Baggage: []Named{{"user", "=~m."}}}, get(t, "/", "Baggage: user=me,a=b"), true},
		{"cookie", Spec{Cookies: []Named{{"user", "me"}}}, get(t, "/", "Cookie: a=b; user=me"), true},
		{"cookie-lines", Spec{Cookies: []Named{{"user", "me"}}}, get(t, "/", "Cookie: a=b", "Cookie: user=me"), true},
		{"cookie-quotes", Spec{Cookies: []Named{{"user", "me"}}}, get(t, "/", `Cookie: user="me"`), true},
		{"cookie-other", Spec{Cookies: []Named{{"user", "me"}}}, get(t, "/", "Cookie: user=me2; xuser=me"), false},
		{"cookie-equals", Spec{Cookies: []Named{{"user", "a=b"}}}, get(t, "/", "Cookie: user=a=b"), true},
		{"query", Spec{Query: []Named{{"user", "me"}}}, get(t, "/?a=b&user=me"), true},
		{"query-encoded", Spec{Query: []Named{{"the user", "a&b"}}}, get(t, "/?the+user=a%26b"), true},
		{"query-repeated", Spec{Query: []Named{{"user", "me"}}}, get(t, "/?user=you&user=me"), true},
		{"query-absent", Spec{Query: []Named{{"user", ""}}}, get(t, "/"), false},
		{"query-empty", Spec{Query: []Named{{"user", ""}}}, get(t, "/?user"), true},
		{"query-regexp", Spec{Query: []Named{{"user", "=~m.*"}}}, get(t, "/?user=me"), true},
		{"path", Spec{Path: "/api"}, get(t, "/api"), true},
		{"path-below", Spec{Path: "/api"}, get(t, "/api/v1?x=y"), true},
		{"path-query", Spec{Path: "/api"}, get(t, "/api?x=y"), true},
		{"path-sibling", Spec{Path: "/api"}, get(t, "/apix"), false},
		{"path-within", Spec{Path: "/api"}, get(t, "/v1/api"), false},
		{"path-slash", Spec{Path: "/api/"}, get(t, "/api"), true},
		{"path-slash-below", Spec{Path: "/api/"}, get(t, "/api/v1"), true},
		{"path-root", Spec{Path: "/"}, get(t, "/apix"), true},
		{"path-root-asterisk", Spec{Path: "/"}, request(t, "OPTIONS * HTTP/1.1", "Host: web"), false},
		{"path-encoded", Spec{Path: "/a b"}, get(t, "/a%20b/c"), true},
		{"path-absolute-form", Spec{Path: "/api"}, get(t, "http://web/api"), true},
		{"path-regexp", Spec{Path: "=~/v[0-9]+/.*"}, get(t, "/v12/x?y"), true},
		{"path-regexp-whole", Spec{Path: "=~/v[0-9]+"}, get(t, "/v12/x"), false},

		{"method", Spec{Methods: []string{"post", "GET"}}, get(t, "/"), true},
		{"method-other", Spec{Methods: []string{"POST"}}, get(t, "/"), false},
		{"all-three", Spec{Headers: headers("x-user=me").Headers, Path: "/api", Methods: []string{"GET"}}, get(t, "/api", "X-User: me"), true},
		{"all-but-path", Spec{Headers: headers("x-user=me").Headers, Path: "/api", Methods: []string{"GET"}}, get(t, "/", "X-User: me"), false},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			m := mustNew(t, tt.spec)
			if got := m.Matches(tt.r); got != tt.want {
				t.Errorf("%s matches: %v, want %v", m, got, tt.want)
			}
			encoded := strings.HasSuffix(tt.name, "-encoded") || tt.name == "baggage-malformed"
			if allocs := testing.AllocsPerRun(10, func() { m.Matches(tt.r) }); allocs != 0 && !encoded {
				t.Errorf("%v allocations", allocs)
			}
		})
	}
}

func TestZeroMatchesEverything(t *testing.T) {
	var m Match
	if !m.All() || !m.Matches(get(t, "/", "X-User: me")) || m.String() != "everything" {
		t.Errorf("the zero Match is %s", &m)
	}
	for _, s := range []Spec{headers("x-user=me"), {Path: "/"}, {Methods: []string{"GET"}}} {
		if m := mustNew(t, s); m.All() {
			t.Errorf("%s matches everything", m)
		}
	}
}

// What Added returns makes a request match.
func TestAddedHeadersMatch(t *testing.T) {
	for _, tt := range []struct {
		spec Spec
		want int
	}{
		{Spec{}, 0},
		{headers("x-user=me", "x-team=red"), 2},
		{Spec{Headers: headers("x-user=me").Headers, Baggage: []Named{{"user", `a b,"c;d\é%+=`}}}, 2},
		{headers("x-user=~me"), 0},
		{headers("host=web"), 0},
		{Spec{Cookies: []Named{{"user", "me"}}}, 0},
	} {
		added := tt.spec.Added()
		if len(added) != tt.want {
			t.Errorf("%+v: %v", tt.spec, added)
		}
		r := get(t, "/")
		for _, h := range added {
			r.Header.Add(h.Name, h.Value)
		}
		if m := mustNew(t, tt.spec); len(added) > 0 && !m.Matches(r) {
			t.Errorf("%s does not match %v", m, added)
		}
	}
}

func TestNewRejectsInvalidSpecs(t *testing.T) {
	tests := []struct {
		spec Spec
		want string
	}{
		{headers("x user=me"), `header "x user": not a name that HTTP allows`},
		{headers(":path=/"), `header ":path": not a name that HTTP allows`},
		{headers("x-user= me"), `header "x-user": " me" is no value that a request can have`},
		{headers("x-user=a\nb"), `header "x-user": "a\nb" is no value that a request can have`},
		{headers("x-user=~"), `header "x-user": an empty regular expression`},
		{headers("x-user=~("), "header \"x-user\": error parsing regexp: missing closing ): `(`"},
		{headers("x-user=~a)(b"), "header \"x-user\": error parsing regexp: unexpected ): `a)(b`"},
		{headers("x-user=~(?!a)"), "header \"x-user\": error parsing regexp: invalid or unsupported Perl syntax: `(?!`"},
		{Spec{Baggage: []Named{{"a b", "x"}}}, `baggage "a b": not a name that HTTP allows`},
		{Spec{Cookies: []Named{{"user", "a;b"}}}, `cookie "user": "a;b" is no value that a request can have`},
		{Spec{Query: []Named{{"", "x"}}}, `query "": not a name that HTTP allows`},
		{Spec{Query: []Named{{"user", "=~("}}}, "query \"user\": error parsing regexp: missing closing ): `(`"},
		{Spec{Path: "api"}, `path "api": it must begin with a slash`},
		{Spec{Path: "/api?x=y"}, `path "/api?x=y": the query is no part of it`},
		{Spec{Path: "=~["}, "path \"=~[\": error parsing regexp: missing closing ]: `[`"},
		{Spec{Methods: []string{"GET", ""}}, `method "": not a word that HTTP allows`},
		{Spec{Methods: []string{"GET POST"}}, `method "GET POST": not a word that HTTP allows`},
	}
	for _, tt := range tests {
		if m, err := New(tt.spec); err == nil || err.Error() != tt.want {
			t.Errorf("%+v: %v, %v\nwant %s", tt.spec, m, err, tt.want)
		}
	}
}

func TestParseNamedSplitsAtTheFirstEqualsSign(t *testing.T) {
	tests := []struct {
		in   string
		want Named
	}{
		{"x-user=me", Named{"x-user", "me"}},
		{"x-user=", Named{"x-user", ""}},
		{"x-user=~m.*", Named{"x-user", "=~m.*"}},
		{"cookie=a=b", Named{"cookie", "a=b"}},
	}
	for _, tt := range tests {
		if got, err := ParseNamed(tt.in); err != nil || got != tt.want {
			t.Errorf("%q: %+v, %v", tt.in, got, err)
		}
	}
	for _, in := range []string{"", "x-user", "=me", "x-user: me"} {
		if got, err := ParseNamed(in); err == nil {
			t.Errorf("%q: %+v", in, got)
		}
	}
}

func TestStringNormalizesTheSpec(t *testing.T) {
	full := headers("X-User=me", "x-team=~r.*")
	full.Baggage, full.Cookies, full.Query = []Named{{"user", "me"}}, []Named{{"S", "=~x"}}, []Named{{"q", ""}}
	full.Path, full.Methods = "/api/", []string{"get", "Post", "GET", "PUT"}
	tests := []struct {
		spec Spec
		want string
	}{
		{Spec{}, "everything"},
		{full, "x-user=me, x-team=~r.*, baggage user=me, cookie S=~x, query q=, path /api, GET, POST or PUT"},
		{Spec{Path: "/"}, "path /"},
		{Spec{Path: "=~/v[12]"}, "path =~/v[12]"},
		{Spec{Methods: []string{"GET", "POST"}}, "GET or POST"},
	}
	for _, tt := range tests {
		if got := mustNew(t, tt.spec).String(); got != tt.want {
			t.Errorf("%q, want %q", got, tt.want)
		}
	}
}

func TestDisjointIsConservative(t *testing.T) {
	tests := []struct {
		name string
		a, b Spec
		want bool
	}{
		{"both-zero", Spec{}, Spec{}, false},
		{"zero", Spec{}, headers("x-user=me"), false},
		{"same-value", headers("x-user=me"), headers("X-User=me"), false},
		{"two-values", headers("x-user=me"), headers("X-User=you"), true},
		{"two-names", headers("x-user=me"), headers("x-team=red"), false},
		{"one-name-of-two", headers("x-user=me", "x-team=red"), headers("x-team=blue"), true},
		{"regexp-takes", headers("x-user=me"), headers("x-user=~m."), false},
		{"regexp-does-not-take", headers("x-user=you"), headers("x-user=~m."), true},
		{"two-regexps", headers("x-user=~a"), headers("x-user=~b"), true},
		{"regexps-prefix", headers("x-user=~me-.*"), headers("x-user=~you-.*"), true},
		{"regexps-suffix", headers("x-user=~.*-me"), headers("x-user=~.*-you"), true},
		{"regexps-suffix-of-other", headers("x-user=~.*me"), headers("x-user=~.*some"), false},
		{"regexps-anywhere", headers("baggage=~.*session=x.*"), headers("baggage=~.*session=y.*"), false},
		{"regexps-fold", headers("x-user=~(?i)me"), headers("x-user=~ME|x"), false},
		{"regexps-kelvin", headers("x-user=~(?i)k"), headers("x-user=~\u212a"), false},
		{"regexps-line", headers("x-user=~a.b"), headers("x-user=~a\nb"), true},
		{"regexps-any-line", headers("x-user=~(?s)a.b"), headers("x-user=~a\nb"), false},
		{"regexps-classes", headers("x-user=~[a-m]+"), headers("x-user=~[n-z]+"), true},
		{"regexps-counts", headers("x-user=~a{1,3}"), headers("x-user=~a{4,6}"), true},
		{"regexps-lengths", headers("x-user=~(aa)*"), headers("x-user=~a(aa)*"), true},
		{"regexps-empty", headers("x-user=~a*"), headers("x-user=~b*"), false},
		{"regexps-assertions", headers(`x-user=~a\b.*`), headers("x-user=~ab"), false}, // not provable without \b
		{"regexps-too-large", headers("x-user=~.*(a|b){400}x"), headers("x-user=~.*(a|b){400}y"), false},
		{"regexps-same-path", Spec{Path: "=~/a/.*"}, Spec{Path: "=~/./b"}, false},
		{"regexps-paths", Spec{Path: "=~/v1/.*"}, Spec{Path: "=~/v[2-9]/.*"}, true},
		{"baggage", Spec{Baggage: []Named{{"user", "me"}}}, Spec{Baggage: []Named{{"user", "you"}}}, true},
		{"baggage-keys", Spec{Baggage: []Named{{"user", "me"}}}, Spec{Baggage: []Named{{"User", "you"}}}, false},
		{"baggage-and-cookie", Spec{Baggage: []Named{{"user", "me"}}}, Spec{Cookies: []Named{{"user", "you"}}}, false},
		{"cookies", Spec{Cookies: []Named{{"user", "me"}}}, Spec{Cookies: []Named{{"user", "=~you.*"}}}, true},
		{"query", Spec{Query: []Named{{"user", "me"}}}, Spec{Query: []Named{{"user", "=~m."}}}, false},
		{"paths", Spec{Path: "/api"}, Spec{Path: "/web"}, true},
		{"paths-same", Spec{Path: "/api"}, Spec{Path: "/api/"}, false},
		{"path-below", Spec{Path: "/api"}, Spec{Path: "/api/v1"}, false},
		{"path-sibling", Spec{Path: "/api"}, Spec{Path: "/apix"}, true},
		{"path-root", Spec{Path: "/"}, Spec{Path: "/api"}, false},
		{"path-regexp", Spec{Path: "/api"}, Spec{Path: "=~/web"}, true},
		{"path-regexp-below", Spec{Path: "/api"}, Spec{Path: "=~/api/.*"}, false},
		{"path-regexp-sibling", Spec{Path: "/api"}, Spec{Path: "=~/apix.*"}, true},
		{"path-and-header", Spec{Path: "/api"}, headers("x-user=me"), false},
		{"methods", Spec{Methods: []string{"GET", "HEAD"}}, Spec{Methods: []string{"POST"}}, true},
		{"methods-shared", Spec{Methods: []string{"GET", "HEAD"}}, Spec{Methods: []string{"HEAD"}}, false},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			a, b := mustNew(t, tt.a), mustNew(t, tt.b)
			if got := Disjoint(a, b); got != tt.want {
				t.Errorf("%s | %s: %v, want %v", a, b, got, tt.want)
			}
			if Disjoint(b, a) != Disjoint(a, b) {
				t.Errorf("%s | %s: the order matters", a, b)
			}
		})
	}
}

// The test tries every request without a repeated header from a small set of values.
func TestNoRequestFitsDisjointMatches(t *testing.T) {
	var requests []*http.Request
	for _, method := range []string{"GET", "POST"} {
		for _, path := range []string{"/", "/a", "/a/b", "/ab"} {
			for _, user := range []string{"", "me", "you"} {
				r := request(t, method+" "+path+" HTTP/1.1", "Host: web")
				if user != "" {
					r.Header.Set("X-User", user)
				}
				requests = append(requests, r)
			}
		}
	}
	var matches []*Match
	for _, h := range []Spec{{}, headers("x-user=me"), headers("x-user=you"), headers("x-user=~m.*")} {
		for _, path := range []string{"", "/", "/a", "/ab", "=~/a.*"} {
			for _, methods := range [][]string{nil, {"GET"}, {"POST"}} {
				matches = append(matches, mustNew(t, Spec{Headers: h.Headers, Path: path, Methods: methods}))
			}
		}
	}
	disjoint := 0
	for _, a := range matches {
		for _, b := range matches {
			if !Disjoint(a, b) {
				continue
			}
			disjoint++
			for _, r := range requests {
				if a.Matches(r) && b.Matches(r) {
					t.Errorf("%s | %s: both match %s %s %s", a, b, r.Method, r.URL, r.Header)
				}
			}
		}
	}
	if disjoint == 0 {
		t.Error("no two matches are disjoint")
	}
}

func FuzzNew(f *testing.F) {
	for _, s := range []string{"me", "=~m.*", "=~a|b", `=~\Qa`, "=~(?i)x$", "/api", "=~/v[0-9]", "=~[[:alpha:]]{2,3}?"} {
		f.Add(s, "me", "/api/v1")
	}
	f.Fuzz(func(t *testing.T, spec, value, path string) {
		m, err := New(Spec{Headers: []Named{{"x-user", spec}}, Path: spec})
		if err != nil {
			return
		}
		r := get(t, "/", "X-User: me")
		r.Header["X-User"], r.URL.Path = []string{value}, path
		m.Matches(r)
		if m.String() == "" || m.All() || m.Matches(r) && Disjoint(m, m) {
			t.Errorf("%q makes %s", spec, m)
		}
	})
}

// FuzzDisjoint looks for a text that two expressions match although they count as disjoint.
func FuzzDisjoint(f *testing.F) {
	for _, s := range [][3]string{{"m.*", "me|you", "me"}, {"(?i)k", "\u212a", "K"}, {"a{2,3}", "(aa)*", "aa"},
		{`a\b.*`, "a .", "a x"}, {"[^a]", "(?s).", "\n"}, {"^a$", "(?m)^a$", "a"}, {"\ufffd", ".", "\xff"}} {
		f.Add(s[0], s[1], s[2])
	}
	f.Fuzz(func(t *testing.T, x, y, value string) {
		var both [2]*Match
		for i, s := range []string{x, y} {
			m, err := New(Spec{Query: []Named{{"user", "=~" + s}}})
			if err != nil {
				return
			}
			both[i] = m
		}
		r := get(t, "/")
		r.URL.RawQuery = "user=" + url.QueryEscape(value)
		if both[0].Matches(r) && both[1].Matches(r) && Disjoint(both[0], both[1]) {
			t.Errorf("%q and %q both match %q", x, y, value)
		}
	})
}

// FuzzMatches compares the readers of cookies and of queries with those of net/http.
func FuzzMatches(f *testing.F) {
	for _, s := range []string{"a=b; user=me", `user="me"`, "a&user=me;x", "user=m%65&x", ";;=,user = me;p=1"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, line string) {
		r := get(t, "/")
		r.Header["Cookie"], r.Header["Baggage"], r.URL.RawQuery = []string{line}, []string{line}, line
		cookie := mustNew(t, Spec{Cookies: []Named{{"user", "me"}}})
		if want := slices.ContainsFunc(r.CookiesNamed("user"), func(c *http.Cookie) bool { return c.Value == "me" }); want && !cookie.Matches(r) {
			t.Errorf("no cookie user=me in %q", line)
		}
		query := mustNew(t, Spec{Query: []Named{{"user", "me"}}})
		if values, err := url.ParseQuery(line); err == nil && slices.Contains(values["user"], "me") != query.Matches(r) {
			t.Errorf("user=me in the query %q: %v", line, query.Matches(r))
		}
		mustNew(t, Spec{Baggage: []Named{{"user", "me"}}}).Matches(r)
	})
}

func BenchmarkMatches(b *testing.B) {
	spec := headers("x-user=me", "x-team=~r.*")
	spec.Path, spec.Methods = "/api", []string{"GET", "POST"}
	m, r := mustNew(b, spec), get(b, "/api/v1", "X-User: me", "X-Team: red")
	b.ReportAllocs()
	for b.Loop() {
		if !m.Matches(r) {
			b.Fatal("not taken")
		}
	}
}
