package redact

import (
	"regexp"
	"slices"
	"strings"
	"sync"
)

// reach says whether a match of a pattern can extend across lines.
type reach int

const (
	within reach = iota
	across
)

// pattern finds text that looks like a secret: its last group, or the whole match without groups.
type pattern struct {
	reach      reach
	hints      []string // a text has no match unless its lower case contains one; none: unknown
	expression *regexp.Regexp
	accept     func(secret string) bool // nil: each match is a secret
}

// match returns the parts of the text that patterns with the given reach find.
func match(text string, r reach) (spans []span) {
	lower := strings.ToLower(text)
	for _, p := range patterns() {
		hinted := func(hint string) bool { return strings.Contains(lower, hint) }
		if p.reach != r || len(p.hints) > 0 && !slices.ContainsFunc(p.hints, hinted) {
			continue
		}
		for _, m := range p.expression.FindAllStringSubmatchIndex(text, -1) {
			s := span{m[len(m)-2], m[len(m)-1]} // the last group
			if s.start < s.end && (p.accept == nil || p.accept(text[s.start:s.end])) {
				spans = append(spans, s)
			}
		}
	}
	return spans
}

// patterns returns the patterns for secrets.
var patterns = sync.OnceValue(func() []pattern {
	const (
		header = `\b(?:(?:proxy-)?authorization|(?:set-)?cookie2?|x-[a-z-]*(?:auth|token|key|secret)[a-z-]*)` +
			`["']*\s*[:=]\s*`
		// the end of a name such as DB_PASSWORD or session-key
		name = `(?:passw(?:or)?d|passphrase|pwd|secret|token|credential|cookie|ticket|signature|` +
			`(?:api|access|private|client|session|secret|signing|encryption)[_-]?key|session[_-]?id)[a-z0-9_-]*`
		value = `("(?:[^"\\]|\\.)*"?|'[^']*'?|\[[^\]]*\]?|[^\s,;&"'\])}]+)`
	)
	headers := []string{"authorization", "cookie", "auth", "token", "key", "secret"}
	names := []string{"pass", "pwd", "secret", "token", "credential", "cookie", "ticket", "signature", "key", "id"}
	compile := regexp.MustCompile
	return []pattern{
		// a PEM block, or the part that is left of one that a limit has cut
		{across, []string{"-----begin"},
			compile(`(?s)-----BEGIN [A-Z0-9 ]+-----.*?(?:-----END [A-Z0-9 ]+-----|\z)`), nil},
		{across, []string{"-----end"},
			compile(`(?:[A-Za-z0-9+/=]{16,}\s+)+[A-Za-z0-9+/=]*\s*-----END [A-Z0-9 ]+-----`), nil},
		// HTTP headers: to the end of the line, or of a list
		{within, headers, compile(`(?i)` + header + `([^\[\n].*)`), nil},
		{across, headers, compile(`(?i)` + header + `(\[[^\]]*\]?)`), nil},
		// {"name": "DB_PASSWORD", "value": "x"} of environments and HAR, also in YAML
		{across, []string{"value"}, compile(`(?i)\bname["']?\s*:\s*["']?[a-z0-9_.-]*(?:authorization|` + name +
			`)["']?[\s,]*["']?value["']?\s*:\s*` + value), nil},
		{across, names, compile(`(?i)` + name + `["']*\s*[:=]\s*` + value), nil},
		{within, []string{"--"}, compile(`(?i)--[a-z-]*` + name + `\s+` + value), nil},
		{within, []string{"bearer", "basic", "negotiate", "digest"},
			compile(`(?i)\b(?:bearer|basic|negotiate|digest)\s+([A-Za-z0-9._~+/=-]{6,})`), nil},
		// JWT
		{within, []string{"eyj"}, compile(`\beyJ[A-Za-z0-9_-]{6,}\.[A-Za-z0-9_-]*(?:\.[A-Za-z0-9_-]*)?`), nil},
		// the user of a URL
		{within, []string{"://"}, compile(`://(\S*@)`), nil},
		// keys and tokens of AWS, GitHub, GitLab, Slack, Google
		{within, []string{"ia", "k8s-aws", "gh", "glpat", "xox", "ya29"}, compile(`\b(?:A[KS]IA[0-9A-Z]{16}|` +
			`k8s-aws-v1\.[\w-]+|gh[a-z]_\w{20,}|github_pat_\w+|glpat-[\w-]+|xox[a-z]-[\w-]+|ya29\.[\w-]+)`), nil},
		// session keys and tickets; digests of images are no secrets
		{within, nil, compile(`(?:sha256:)?[0-9A-Fa-f]{32,}`), noDigest},
		{within, nil, compile(`(?:sha256:)?[A-Za-z0-9+/_-]{40,}`), random},
	}
})

func noDigest(word string) bool { return !strings.HasPrefix(word, "sha256:") }

// random reports whether a long word looks like random bytes in base64.
func random(word string) bool {
	lower, upper, digit := false, false, false
	for _, c := range []byte(word) {
		lower = lower || c >= 'a' && c <= 'z'
		upper = upper || c >= 'A' && c <= 'Z'
		digit = digit || c >= '0' && c <= '9'
	}
	return lower && upper && digit && noDigest(word)
}
