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

// pattern finds text that looks like a secret: the last group that takes part in a match, or the whole match without
// groups. No alternative of an expression may read on without limit and then yield to a shorter one: each match would
// read the rest of a hostile text again.
type pattern struct {
	hints      []string // a text has no match unless its lower case contains one; none: unknown
	expression *regexp.Regexp
	accept     func(secret string) bool // nil: each match is a secret
	guess      bool                     // it looks random, and may as well be an ID
}

// match returns the parts of the text that patterns find, with or without guesses.
func match(text string, guess bool) (spans []span) {
	lower := strings.ToLower(text)
	for _, p := range patterns() {
		hinted := func(hint string) bool { return strings.Contains(lower, hint) }
		if p.guess && !guess || len(p.hints) > 0 && !slices.ContainsFunc(p.hints, hinted) {
			continue
		}
		done := 0 // the end of the last block
		for _, m := range p.expression.FindAllStringSubmatchIndex(text, -1) {
			n := len(m) - 2
			for n > 2 && m[n] < 0 {
				n -= 2
			}
			s := span{m[n], m[n+1]}
			if s.start < s.end && s.end > done && strings.IndexByte("|>", text[s.start]) >= 0 { // a block of YAML
				s.end += indented(text[s.end:])
				done = s.end
			}
			if s.start < s.end && (p.accept == nil || p.accept(text[s.start:s.end])) {
				spans = append(spans, s)
			}
		}
	}
	return spans
}

// prefixes are those of tokens, from the rules of gitleaks v8.30.1 (config/gitleaks.toml, MIT,
// github.com/gitleaks/gitleaks) whose token begins with a fixed text. The regular expressions of the rules themselves
// take 20 s and more for 512 KiB, and require exact lengths, which a log that cuts its lines does not keep.
//
//go:embed prefixes.txt
var prefixes string

// patterns returns the patterns for secrets. Passwords may contain blanks, and tokens do not.
var patterns = sync.OnceValue(func() []pattern {
	const (
		passwords = `(?:passw(?:or)?[dt]|passphrase|pwd)[a-z0-9_-]*`
		tokens    = `(?:(?:access|account|api|client|encryption|master|private|session|shared|signing|storage)[_-]?` +
			`key|cookie|credential|secret|session[_-]?id|signature|ticket|token)[a-z0-9_-]*`
		name   = `(?:` + passwords + `|` + tokens + `)`
		named  = `["']?\s*[:=]\s*["']?[a-z0-9_.-]*?(?:authorization|` + name + `)`
		list   = `\[\s*(?:"((?:[^"\\]|\\.|"\s*,\s*")*)|([^\s"\]][^\]]*))` // its elements
		quoted = `"((?:[^"\\]|\\.)*)"?|'([^']*)'?|` + list
		word   = `(?:` + quoted + `|([^\s"'\[]\S*))`
		words  = `(?:` + quoted + `|([^\s"'\[]\S*(?:[ \t]+(?:[\w.-]+|(?:[\w.-]*[^\w.\s=-]|=)\S*))*)(?:\s|$))`
		json   = `["'\]]+\s*(?:[:=]|=>)\s*(?:` + quoted + `|([^\s"'\[{,;}\])][^\s,;}\])]*))`

		secrets = "secret token credential cookie ticket signature key sessionid session_id session-id"
	)
	sorted := slices.Sorted(strings.FieldsSeq(regexp.QuoteMeta(prefixes))) // faster
	find := func(hints, expression string, accept func(string) bool) pattern {
		return pattern{strings.Fields(hints), regexp.MustCompile(`(?i)` + expression), accept, false}
	}
	return []pattern{
		// a PEM block, or the part that is left of one that a limit has cut
		find("-----begin", `(?s)-----BEGIN [A-Z0-9 ]+-----.*?(?:-----END [A-Z0-9 ]+-----|\z)`, nil),
		find("-----end", `(?:[A-Za-z0-9+/=]{16,}\s+)+[A-Za-z0-9+/=]*\s*-----END [A-Z0-9 ]+-----`, nil),
		// HTTP headers: the value of JSON, or to the end of the line, or of a list
		find("authorization cookie dpop protocol x-", `(?:authorization|cookie|dpop|sec-websocket-protocol|x-[a-z-]*?`+
			`(?:auth|token|key|secret|jwt|assertion|cert|session|credential|csrf))[a-z-]*`+
			`(?:"\s*:\s*(?:`+quoted+`)|["']*\s*[:=]\s*(?:([^\[\n].*)|`+list+`))`, nil),
		// {"name": "DB_PASSWORD", "value": "x"} of environments and HAR, in any order, also in YAML and XML
		find("value", `(?:name|key)`+named+`["']?[\s,]*["']?value["']?\s*[:=]\s*`+word, nil),
		find("value", `value["']?\s*[:=]\s*(?:`+quoted+`|([^\s"',:=]+))[\s,]*["']?(?:name|key)`+named, nil),
		// JSON and pairs, also before a block of YAML, XML, flags
		find("passw passphrase pwd", passwords+`(?:`+json+`|\s*[:=]\s*`+words+`)`, nil),
		find(secrets, tokens+`(?:`+json+`|\s*[:=]\s*`+word+`)`, nil),
		find("</", `>([^<]+)</[\w.:-]*?`+name, nil),
		find("--", `--[a-z-]*`+name+`\s+`+word, nil),
		find("pass", `pass(?:word|phrase) for [^:\n]*:\s*(.+)`, nil),
		// parameters of URLs and forms
		find("key= auth= jwt= assertion= sig= psk= x-", `(?:[?&](?:key|auth|jwt)|assertion|sig|psk|`+
			`x-(?:amz|goog)-[a-z-]*)=(?:"([^"]+)|([^&\s"'<>#]+))`, nil),
		find("code=", `[?&]code=([^&\s"'<>#]{4,})`, nil),
		// users with their passwords: of URLs, of MySQL, of commands, of Docker, of headers
		find("://", `://(\S*@)`, nil),
		find("@tcp( @unix(", `([^\s"'=:]*:[^\s"']*)@(?:tcp|unix)\(`, nil),
		find("-u", ` (?:-u|--user|--proxy-user)[\s=]?["']?([\w.@-]*[a-z][\w.@-]*:[^\s"']+)`, nil),
		find("sshpass mysql", `(?:sshpass|mysql|mysqldump) (?:.*?\s)??-p\s?(\S+)`, nil),
		find("auth", `auth["']*\s*[:=]\s*["']?([a-z0-9+/_-]{6,}={0,2})`, basic),
		find("bearer basic negotiate digest", `(?:bearer|basic|negotiate|digest)[ \t]+([\w.~+/=-]{6,})`, notWord),
		// tokens that have a form: JWT, of Kubernetes, of Telegram, of Entra ID, of many others
		find(".", `(?-i)\b[a-z0-9]{6}\.[a-z0-9]{16}\b`, notWord),
		find("eyj", `(?-i)\beyJ[\w-]{6,}\.[\w-]*(?:\.[\w-]*)?`, nil),
		find(":aa q~", `(?-i)\b[0-9]{6,12}:AA[\w-]{6,}|[\w.~]{3}[0-9]Q~[\w.~-]{20,}`, nil),
		find(strings.ToLower(prefixes), `(?-i)\b(?:`+strings.Join(sorted, "|")+`)[\w.=+/-]{7,}[\w=]`, notWord),
		// session keys and tickets; digests of images are no secrets
		{guess: true, expression: regexp.MustCompile(`sha256:[0-9A-Fa-f]*|([0-9A-Fa-f]{32,})`)},
		{guess: true, expression: regexp.MustCompile(`sha256:[0-9A-Fa-f]*|([A-Za-z0-9+/_-]{40,})`), accept: random},
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

// indented returns the length of the lines at the beginning of a text that are blank, or have the indentation of the
// first that is not.
func indented(text string) (n int) {
	blank := text[:len(text)-len(strings.TrimLeft(text, " \t\n"))]
	indent := blank[strings.LastIndexByte(blank, '\n')+1:]
	for line := range strings.Lines(text) {
		if indent == "" || strings.TrimSpace(line) != "" && !strings.HasPrefix(line, indent) {
			break
		}
		n += len(line)
	}
	return len(strings.TrimRight(text[:n], "\n"))
}

// basic reports whether the text is a user and a password in base64.
func basic(text string) bool {
	plain, err := base64.RawStdEncoding.DecodeString(strings.NewReplacer("-", "+", "_", "/", "=", "").Replace(text))
	return err == nil && strings.Contains(string(plain), ":")
}

// notWord reports whether the text has digits, or is long and has letters of both cases. A name has not.
func notWord(text string) bool {
	return strings.ContainsAny(text, "0123456789") || len(text) >= 12 && strings.ToLower(text) != text
}

// random reports whether a long word looks like random bytes in base64.
func random(word string) bool {
	return strings.ContainsAny(word, "0123456789") && strings.ToLower(word) != word && strings.ToUpper(word) != word
}
