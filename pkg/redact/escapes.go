package redact

import (
	"slices"
	"strconv"
	"strings"
	"unicode/utf16"
	"unicode/utf8"
)

// view is a text in which some escapes are decoded.
type view struct {
	text string
	at   []int // offsets in the source of each byte of text and of its end; nil: the same as in text
}

func (v view) equal(w view) bool { return v.text == w.text && slices.Equal(v.at, w.at) }

// offset returns the offset in the source of a byte of the view's text.
func (v view) offset(i int) int {
	if v.at == nil {
		return i
	}
	return v.at[i]
}

// source returns the part of the source that a part of the view's text comes from. The part is not empty.
func (v view) source(s span) span {
	end := s.end
	for end < len(v.text) && v.offset(end) == v.offset(end-1) { // within a character that one escape decodes to
		end++
	}
	return span{v.offset(s.start), v.offset(end)}
}

// decodings returns the view with its percent-encoding and its backslash escapes decoded, up to depth times, in each
// order. It omits decodings that change nothing.
func (v view) decodings(depth int) (all []view) {
	if depth == 0 {
		return nil
	}
	for _, e := range []struct {
		sign   byte
		decode func(string) (string, int)
	}{{'%', percent}, {'\\', backslash}} {
		if strings.IndexByte(v.text, e.sign) < 0 {
			continue
		}
		if next, changed := v.decode(e.sign, e.decode); changed {
			all = append(append(all, next), next.decodings(depth-1)...)
		}
	}
	return all
}

// decode replaces escapes, which begin with sign. escape returns the decoded escape at the beginning of a text, and the
// length of the escape; 0: there is none.
func (v view) decode(sign byte, escape func(string) (string, int)) (next view, changed bool) {
	var b strings.Builder
	at := make([]int, 0, len(v.text)+1)
	for i := 0; i < len(v.text); {
		decoded, length := v.text[i:i+1], 1
		if v.text[i] == sign {
			if d, n := escape(v.text[i:]); n > 0 {
				decoded, length, changed = d, n, true
			}
		}
		b.WriteString(decoded)
		for range len(decoded) {
			at = append(at, v.offset(i))
		}
		i += length
	}
	return view{b.String(), append(at, v.offset(len(v.text)))}, changed
}

// percent decodes %2F.
func percent(text string) (string, int) {
	if len(text) < 3 {
		return "", 0
	}
	n, err := strconv.ParseUint(text[1:3], 16, 8)
	if err != nil {
		return "", 0
	}
	return string([]byte{byte(n)}), 3
}

// backslash decodes the escapes of JSON and Go.
func backslash(text string) (string, int) {
	if len(text) < 2 {
		return "", 0
	}
	if i := strings.IndexByte("abfnrtv", text[1]); i >= 0 {
		return "\a\b\f\n\r\t\v"[i : i+1], 2
	}
	switch c := text[1]; {
	case c == 'x':
		n, ok := digits(text, 2, 2, 16)
		return string([]byte{byte(n)}), ok
	case c == 'u':
		return unicodeEscape(text)
	case c == 'U':
		n, ok := digits(text, 2, 8, 16)
		return string(rune(n)), ok
	case c >= '0' && c <= '3':
		n, ok := digits(text, 1, 3, 8)
		return string([]byte{byte(n)}), ok
	case strings.IndexByte(`\"'/`, c) >= 0:
		return text[1:2], 2
	}
	return "", 0
}

// unicodeEscape decodes \u20ac, and two of them if they are a surrogate pair.
func unicodeEscape(text string) (string, int) {
	n, length := digits(text, 2, 4, 16)
	if utf16.IsSurrogate(rune(n)) && length > 0 && strings.HasPrefix(text[length:], `\u`) {
		low, more := digits(text[length:], 2, 4, 16)
		if r := utf16.DecodeRune(rune(n), rune(low)); more > 0 && r != utf8.RuneError {
			return string(r), length + more
		}
	}
	return string(rune(n)), length
}

// digits parses count digits at the offset from. It returns the number, and the offset behind it; 0: no number.
func digits(text string, from, count, base int) (number uint64, end int) {
	end = from + count
	if len(text) < end {
		return 0, 0
	}
	number, err := strconv.ParseUint(text[from:end], base, 32)
	if err != nil {
		return 0, 0
	}
	return number, end
}
