// Package redact removes secrets from text: values that it knows, and text that looks like a secret (patterns.go). It
// also finds both in text that percent-encodes, backslash-escapes (JSON, Go) or base64-encodes them, nested a few
// times. It masks too much rather than too little.
package redact

import (
	"bytes"
	"encoding/base64"
	"slices"
	"strings"
)

// Mark replaces a secret.
const Mark = "[redacted]"

const (
	// Shortest is the length in bytes of the shortest value that a Redactor knows. A shorter one would mask parts of
	// ordinary words.
	Shortest = 4
	// maxEscapes and maxEncodings limit the nesting of escapes, and of base64, that a Redactor decodes.
	maxEscapes   = 3
	maxEncodings = 2
	// shortestRun is the length of the shortest base64 text that a Redactor decodes to look for patterns. Known values
	// are found in shorter ones.
	shortestRun = 16
	// shortestText is the number of text characters in a row by which decoded base64 counts as text.
	shortestText = 8
)

// Redactor knows secret values. The zero value knows none, and finds patterns. It is safe for concurrent use after the
// last Add.
type Redactor struct {
	// Named leaves random text that may as well be an ID: it masks only what a name or a form shows to be a secret.
	Named bool

	known map[[Shortest]byte][]needle // by their first bytes
}

// needle is a text whose occurrences are masked.
type needle struct {
	text    string
	encoded bool // part of a base64 text, which is masked as a whole
}

// Add makes values known, except those that are shorter than Shortest. It also adds each long line of a value.
func (r *Redactor) Add(values ...string) {
	if r.known == nil {
		r.known = map[[Shortest]byte][]needle{}
	}
	for _, value := range values {
		value = strings.TrimSpace(value)
		parts := []string{value, strings.ReplaceAll(value, " ", "+")} // a URL query has + for a space
		for line := range strings.Lines(value) {
			if line = strings.TrimSpace(line); len(line) >= shortestRun {
				parts = append(parts, line)
			}
		}
		for _, part := range parts {
			if len(part) < Shortest {
				continue
			}
			r.add(needle{text: part})
			for _, text := range encodings(part) {
				r.add(needle{text, true})
			}
		}
	}
}

func (r *Redactor) add(n needle) {
	if len(n.text) < Shortest {
		return
	}
	key := [Shortest]byte([]byte(n.text))
	if !slices.Contains(r.known[key], n) {
		r.known[key] = append(r.known[key], n)
	}
}

// encodings returns the texts by which base64 encodes the value: one for each of three alignments in both alphabets. It
// omits characters that also encode neighbors of the value.
func encodings(value string) (texts []string) {
	for before, skip := range []int{0, 2, 3} {
		padded := append(make([]byte, before), value...)
		whole := len(padded) * 8 / 6
		for _, e := range []*base64.Encoding{base64.RawStdEncoding, base64.RawURLEncoding} {
			texts = append(texts, e.EncodeToString(padded)[skip:whole])
		}
	}
	return texts
}

// Text returns the text with Mark in place of each secret.
func (r *Redactor) Text(text string) string {
	spans := r.find(text, maxEncodings)
	slices.SortFunc(spans, func(a, b span) int { return a.start - b.start })
	var b strings.Builder
	at := 0
	for i := 0; i < len(spans); {
		start, end := spans[i].start, spans[i].end
		for ; i < len(spans) && spans[i].start <= end; i++ {
			end = max(end, spans[i].end)
		}
		b.WriteString(text[at:start])
		b.WriteString(Mark)
		at = end
	}
	b.WriteString(text[at:])
	return b.String()
}

// span is a part of a text.
type span struct{ start, end int }

// find returns the secrets in the text, in any order. It decodes escapes line by line, and base64 depth times.
func (r *Redactor) find(text string, depth int) []span {
	spans := slices.Concat(r.scanKnown(text), r.scanBase64(text, depth), match(text, !r.Named))
	at := 0
	for line := range strings.Lines(text) {
		views := view{text: line}.decodings(maxEscapes)
		for n, v := range views {
			if slices.IndexFunc(views, v.equal) < n {
				continue // another order of decoding led to the same
			}
			for _, s := range slices.Concat(r.scanKnown(v.text), r.scanBase64(v.text, depth), match(v.text, !r.Named)) {
				s = v.source(s)
				spans = append(spans, span{s.start + at, s.end + at})
			}
		}
		at += len(line)
	}
	return spans
}

// scanBase64 returns the base64 texts that contain secrets.
func (r *Redactor) scanBase64(text string, depth int) (spans []span) {
	for start := 0; start < len(text) && depth > 0; {
		end := start
		for end < len(text) && isBase64(text[end]) {
			end++
		}
		if end-start >= shortestRun && r.encodes(text[start:end], depth) {
			spans = append(spans, span{start, end})
		}
		start = end + 1
	}
	return spans
}

// scanKnown returns the known values in a text.
func (r *Redactor) scanKnown(text string) (spans []span) {
	masked := 0 // the end of the last base64 text
	for i := 0; i+Shortest <= len(text); i++ {
		for _, n := range r.known[[Shortest]byte([]byte(text[i:i+Shortest]))] {
			if n.encoded && i < masked || !strings.HasPrefix(text[i:], n.text) {
				continue
			}
			s := span{i, i + len(n.text)}
			for n.encoded && s.start > 0 && isBase64(text[s.start-1]) {
				s.start--
			}
			for n.encoded && s.end < len(text) && isBase64(text[s.end]) {
				s.end++
			}
			if n.encoded {
				masked = s.end
			}
			spans = append(spans, s)
		}
	}
	return spans
}

// encodes reports whether a base64 text contains a secret.
func (r *Redactor) encodes(run string, depth int) bool {
	run = strings.NewReplacer("-", "+", "_", "/").Replace(run)
	for offset := range 4 {
		part := run[offset:]
		if len(part)%4 == 1 {
			part = part[:len(part)-1]
		}
		decoded, err := base64.RawStdEncoding.DecodeString(part)
		if err == nil && hasText(decoded) && len(r.find(string(decoded), depth-1)) > 0 {
			return true
		}
	}
	return false
}

// hasText reports whether the data contains text. Words that are not base64 rarely decode to text.
func hasText(data []byte) bool {
	length := 0
	return bytes.ContainsFunc(data, func(c rune) bool {
		length++
		if (c < ' ' || c > '~') && c != '\n' && c != '\r' && c != '\t' {
			length = 0
		}
		return length == shortestText
	})
}

func isBase64(c byte) bool {
	return c >= 'a' && c <= 'z' || c >= 'A' && c <= 'Z' || c >= '0' && c <= '9' || strings.IndexByte("+/-_", c) >= 0
}
