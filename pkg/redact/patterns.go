package redact

import (
	_ "embed"
	"encoding/base64"
	"net/http"
	"regexp"
	"slices"
	"strings"
	"sync"
)

// pattern finds text that looks like a secret. Each of its forms takes linear time, also in a hostile text: after a
// start, what a form repeats and may then reject is bounded.
type pattern struct {
	starts []string // in lower case: a match is one of these, in any case, and then one of the forms
	exact  bool     // starts are not in lower case, and begin a word
	hints  []string // without starts: a text has no match unless its lower case contains one; none: unknown
	forms  []form
	guess  bool // it looks random, and may as well be an ID
}

// form is an expression whose last group that takes part is the secret, or the whole match.
type form struct {
	*regexp.Regexp
	cut func(match string) int // the length of the secret at its beginning, or 0; nil: all of it
}

// secret returns the secret of a match of the form in text[from:], which may be empty. A match without groups begins at
// start.
func (f form) secret(text string, m []int, start, from int) span {
	n := len(m) - 2
	for m[n] < 0 {
		n -= 2
	}
	s := span{m[n] + from, m[n+1] + from}
	if n == 0 {
		s.start = start
	}
	if f.cut != nil {
		s.end = s.start + f.cut(text[s.start:s.end])
	}
	return s
}

// match returns the parts of the text that patterns find, with or without guesses.
func match(text string, guess bool) (spans []span) {
	lower := lowerCase(text)
	spans = matchStarts(text, lower)
	for _, p := range patterns() {
		hinted := func(hint string) bool { return strings.Contains(lower, hint) }
		if p.starts != nil || p.guess && !guess || p.hints != nil && !slices.ContainsFunc(p.hints, hinted) {
			continue
		}
		for _, m := range p.forms[0].FindAllStringSubmatchIndex(text, -1) {
			spans = append(spans, p.forms[0].secret(text, m, m[0], 0))
		}
	}
	return slices.DeleteFunc(spans, func(s span) bool { return s.start >= s.end })
}

// lowerCase changes ASCII only. Unlike that of strings.ToLower, its result has the length of the text.
func lowerCase(text string) string {
	lower := []byte(text)
	for i, c := range lower {
		if c >= 'A' && c <= 'Z' {
			lower[i] = c + 'a' - 'A'
		}
	}
	return string(lower)
}

// start is how a match of a pattern begins.
type start struct {
	text    string
	pattern int // its index
}

// starts returns the starts of all patterns by their first two bytes, in lower case.
var starts = sync.OnceValue(func() map[[2]byte][]start {
	all := map[[2]byte][]start{}
	for n, p := range patterns() {
		for _, text := range p.starts {
			key := [2]byte([]byte(lowerCase(text)))
			all[key] = append(all[key], start{text, n})
		}
	}
	return all
})

// matchStarts returns what patterns with starts find.
func matchStarts(text, lower string) (spans []span) {
	all, starts := patterns(), starts()
	done := make([]int, len(all)) // the end of the last match of each pattern
	for i := 0; i+2 < len(text); i++ {
		for _, s := range starts[[2]byte{lower[i], lower[i+1]}] {
			p, from := &all[s.pattern], lower
			if p.exact {
				from = text
			}
			if i < done[s.pattern] || !strings.HasPrefix(from[i:], s.text) ||
				p.exact && i > 0 && isWord(text[i-1]) {
				continue
			}
			next := i + len(s.text)
			for _, f := range p.forms {
				if m := f.FindStringSubmatchIndex(text[next:]); m != nil {
					spans, done[s.pattern] = append(spans, f.secret(text, m, i, next)), next+m[1]
					break
				}
			}
		}
	}
	return spans
}

func isWord(c byte) bool { return isBase64(c) && c != '+' && c != '/' && c != '-' }

// Parts of patterns.
const (
	end    = `^[a-z0-9_-]{0,30}` // of a name
	quoted = `"((?:[^"\\]|\\.)*)"?|'([^']*)'?|(\[[^\]]*\]?)`
	word   = `(?:` + quoted + `|([^\s"'\[]\S*))`
	name   = `(?:passw(?:or)?[dt]|passphrase|pwd|secret|token|credential|cookie|ticket|signature|session[_-]?id|` +
		`(?:api|access|account|private|client|session|signing|encryption|shared|storage|master)[_-]?key)` +
		`[a-z0-9_-]{0,30}`
)

// names returns the beginnings of name: passwords may contain blanks, and tokens do not.
func names() (passwords, tokens []string) {
	keys := strings.Fields("api access account private client session signing encryption shared storage master")
	tokens = []string{"secret", "token", "credential", "cookie", "ticket", "signature"}
	for _, sign := range []string{"", "-", "_"} {
		tokens = append(tokens, "session"+sign+"id")
		for _, of := range keys {
			tokens = append(tokens, of+sign+"key")
		}
	}
	return []string{"password", "passwort", "passwd", "passphrase", "pwd"}, tokens
}

//go:embed prefixes.txt
var prefixes string

// tokenPrefixes returns the words of prefixes.txt.
func tokenPrefixes() (all []string) {
	for line := range strings.Lines(prefixes) {
		if !strings.HasPrefix(line, "#") {
			all = append(all, strings.Fields(line)...)
		}
	}
	return all
}

// patterns returns the patterns for secrets.
var patterns = sync.OnceValue(func() []pattern {
	const header = `^[a-z-]{0,40}["']*\s*[:=]\s*(?:([^\[\n].*)|(\[[^\]]*\]?))` // to the end of the line, or of a list
	one := func(expression string, cut func(string) int) []form {
		return []form{{regexp.MustCompile(`(?i)` + expression), cut}}
	}
	passwords, tokens := names()
	// JSON, blocks of YAML, XML
	named := slices.Concat(one(end+`["'\]]+\s*(?:[:=]|=>)\s*(?:`+quoted+`|([^\s"'\[{,;}\])][^\s,;}\])]*))`, nil),
		one(end+`:[ \t]*[|>][-+0-9]*[ \t]*\n((?:[ \t]+.*\n?|\n)+)`, indented),
		one(end+`(?:\s[^<>]{0,40})?>([^<]+)</`, nil))
	return []pattern{
		// a PEM block, or the part that is left of one that a limit has cut
		{starts: []string{"-----begin"},
			forms: one(`(?s)^ [A-Z0-9 ]{1,60}-----.*?(?:-----END [A-Z0-9 ]+-----|\z)`, nil)},
		{hints: []string{"-----end"},
			forms: one(`(?:[A-Za-z0-9+/=]{16,}\s+)+[A-Za-z0-9+/=]*\s*-----END [A-Z0-9 ]+-----`, nil)},
		{starts: []string{"authorization", "cookie", "dpop", "sec-websocket-protocol"},
			forms: one(header, nil)},
		{starts: []string{"x-"}, forms: one(`^[a-z-]{0,40}?(?:auth|token|key|secret|jwt|assertion|cert|`+
			`session|credential|csrf)`+header[1:], nil)},
		// {"name": "DB_PASSWORD", "value": "x"} of environments and HAR, in any order, also in YAML and XML
		{starts: []string{"name", "key"},
			forms: one(`^["']?\s*[:=]\s*["']?[a-z0-9_.-]{0,60}?(?:authorization|`+
				name+`)["']?[\s,]*["']?value["']?\s*[:=]\s*`+word, nil)},
		{starts: []string{"value"}, forms: one(`^["']?\s*[:=]\s*(?:"((?:[^"\\]|\\.)*)"|'([^']*)'|`+
			`([^\s"',:=]+))[\s,]*["']?(?:name|key)["']?\s*[:=]\s*["']?[a-z0-9_.-]{0,60}?(?:authorization|`+
			name+`)`, nil)},
		{starts: passwords,
			forms: slices.Concat(named, one(end+`\s*[:=]\s*(?:`+quoted+`|([^\s"'\[].*))`, pairs))},
		{starts: tokens, forms: slices.Concat(named, one(end+`\s*[:=]\s*`+word, nil))},
		{starts: []string{"password for ", "passphrase for "}, forms: one(`^[^:\n]{0,60}:\s*(.+)`, nil)},
		{hints: []string{"--"}, forms: one(`--[a-z-]*`+name+`\s+`+word, nil)},
		// parameters of URLs and forms
		{starts: strings.Fields("?key= &key= ?auth= &auth= ?jwt= &jwt= assertion= sig= psk="),
			forms: one(`^(?:"([^"]+)|([^&\s"'<>#]+))`, nil)},
		{starts: []string{"x-amz-", "x-goog-"}, forms: one(`^[a-z-]{0,30}=([^&\s"'<>#]+)`, nil)},
		{starts: []string{"?code=", "&code="}, forms: one(`^([^&\s"'<>#]{4,})`, nil)},
		// users with their passwords: of URLs, of MySQL, of commands, of Docker
		{hints: []string{"://"}, forms: one(`://(\S*@)`, nil)},
		{hints: []string{"@tcp(", "@unix("}, forms: one(`([^\s"'=:]*:[^\s"']*)@(?:tcp|unix)\(`, nil)},
		{starts: []string{" -u", " --user", " --proxy-user"},
			forms: one(`^[\s=]?["']?([\w.@-]{0,40}[a-z][\w.@-]{0,40}:[^\s"']+)`, nil)},
		{starts: []string{"sshpass ", "mysql ", "mysqldump "}, forms: one(`^(?:[^\n]{0,40}?\s)??-p\s?(\S+)`, nil)},
		{starts: []string{"auth"}, forms: one(`^["']*\s*[:=]\s*["']?([a-z0-9+/_-]{6,}={0,2})`, basic)},
		{starts: []string{"bearer", "basic", "negotiate", "digest"},
			forms: one(`^[ \t]+([A-Za-z0-9._~+/=-]{6,})`, notWords)},
		// tokens that have a form: JWT, of Kubernetes, of Telegram, of Entra ID, of many others
		{hints: []string{"eyj"}, forms: one(`(?-i)\beyJ[A-Za-z0-9_-]{6,}\.[A-Za-z0-9_-]*(?:\.[A-Za-z0-9_-]*)?`, nil)},
		{hints: []string{"."}, forms: one(`(?-i)\b[a-z0-9]{6}\.[a-z0-9]{16}\b`, notWords)},
		{hints: []string{":aa"}, forms: one(`(?-i)\b[0-9]{6,12}:AA[\w-]{6,}`, nil)},
		{hints: []string{"q~"}, forms: one(`(?-i)[\w.~]{3}[0-9]Q~[\w.~-]{20,}`, nil)},
		{starts: tokenPrefixes(), exact: true, forms: one(`^[\w.=+/-]{7,}[\w=]`, notWords)},
		// session keys and tickets; digests of images are no secrets
		{forms: one(`(?:sha256:)?[0-9A-Fa-f]{32,}`, noDigest), guess: true},
		{forms: one(`(?:sha256:)?[A-Za-z0-9+/_-]{40,}`, random), guess: true},
	}
})

// The names of headers whose values are secrets, as far as a name can tell, and exceptions in their canonical form.
var (
	secretHeader = regexp.MustCompile(`(?i)auth(?:$|-|oriz|entication)|token|key|secret|cookie|jwt|assertion|session|` +
		`credential|signature|passw|passphrase|pwd|csrf|xsrf|dpop|ticket|saml|client-cert|^sec-websocket-protocol$`)
	harmless = []string{"Access-Control-Allow-Credentials", "Idempotency-Key", "Sec-Websocket-Key"}
)

// Header reports whether the value of a header, of metadata of gRPC, or of a field of JSON is secret by its name.
func Header(name string) bool {
	return secretHeader.MatchString(name) && !slices.Contains(harmless, http.CanonicalHeaderKey(name))
}

// indented returns the length of the lines of a block of YAML.
func indented(block string) (n int) {
	indent := -1
	for line := range strings.Lines(block) {
		if text := strings.TrimLeft(line, " \t"); text != "\n" {
			if indent < 0 {
				indent = len(line) - len(text)
			}
			if len(line)-len(text) < indent {
				break
			}
		}
		n += len(line)
	}
	return len(strings.TrimRight(block[:n], "\n"))
}

var nextPair = regexp.MustCompile(`\s[\w.-]+=`)

// pairs returns the length of a value before the next pair of a log line.
func pairs(value string) int {
	if next := nextPair.FindStringIndex(value); next != nil {
		return next[0]
	}
	return len(value)
}

// basic returns 0 unless the text is a user and a password in base64.
func basic(text string) int {
	standard := strings.NewReplacer("-", "+", "_", "/", "=", "").Replace(text)
	plain, err := base64.RawStdEncoding.DecodeString(standard)
	if err != nil || !strings.Contains(string(plain), ":") {
		return 0
	}
	return len(text)
}

// notWords returns 0 for text without digits that has only letters of one case, such as a name.
func notWords(text string) int {
	if !strings.ContainsAny(text, "0123456789") && (strings.ToLower(text) == text || len(text) < 12) {
		return 0
	}
	return len(text)
}

func noDigest(word string) int {
	if strings.HasPrefix(word, "sha256:") {
		return 0
	}
	return len(word)
}

// random returns 0 unless a long word looks like random bytes in base64.
func random(word string) int {
	lower, upper, digit := false, false, false
	for _, c := range []byte(word) {
		lower = lower || c >= 'a' && c <= 'z'
		upper = upper || c >= 'A' && c <= 'Z'
		digit = digit || c >= '0' && c <= '9'
	}
	if !lower || !upper || !digit {
		return 0
	}
	return noDigest(word)
}
