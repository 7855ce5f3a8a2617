package httpmatch

import (
	"regexp/syntax"
	"slices"
	"unicode"
)

// maxPairs limits the search for a text that two expressions match.
const maxPairs = 1 << 14

// Disjoint reports whether provably no request fits both: if both name methods and share none, or if no path, or no
// value of a name that both have, fits both.
//
// A request that repeats a name can have two values of it, and fit both. No client sends one by accident, and if such
// matches counted as overlapping, no two users could share a workload by a header. So they count as disjoint, and the
// first match wins.
func Disjoint(a, b *Match) bool {
	if len(a.methods) > 0 && len(b.methods) > 0 &&
		!slices.ContainsFunc(a.methods, func(m string) bool { return slices.Contains(b.methods, m) }) {
		return true
	}
	if a.path != nil && b.path != nil && disjointTexts(a.path.asPath(), b.path.asPath()) {
		return true
	}
	for _, x := range a.fields {
		for _, y := range b.fields {
			if x.in == y.in && x.name == y.name && disjointTexts(x.text.expression(), y.text.expression()) {
				return true
			}
		}
	}
	return false
}

// expression returns the expression of a text, for values.
func (t *text) expression() *syntax.Regexp {
	if t.re == nil {
		return literal(t.exact)
	}
	return parsed(t.re.String())
}

// asPath returns the expression of a path: an exact one also matches the paths below it.
func (t *text) asPath() *syntax.Regexp {
	if t.re != nil {
		return parsed(t.re.String())
	}
	below := parsed(`(?s:/.*)?`)
	return &syntax.Regexp{Op: syntax.OpConcat, Sub: []*syntax.Regexp{literal(t.exact), below}}
}

func literal(s string) *syntax.Regexp {
	return &syntax.Regexp{Op: syntax.OpLiteral, Rune: []rune(s)}
}

// parsed returns a parsed expression, or nil for one that is invalid, which package regexp has accepted.
func parsed(expression string) *syntax.Regexp {
	re, err := syntax.Parse(expression, syntax.Perl)
	if err != nil {
		return nil
	}
	return re
}

// disjointTexts reports whether provably no text matches both expressions as a whole. It follows both automata at the
// same time, over every rune that both accept:
//
//	(start, start) ── runes that both accept ──▶ (x, y) ──▶ ... ──▶ (match, match): a text that both match
//
// Assertions such as \b count as fulfilled, so that the answer errs on the side of "not disjoint".
func disjointTexts(a, b *syntax.Regexp) bool {
	if a == nil || b == nil {
		return false
	}
	x, errX := syntax.Compile(a.Simplify())
	y, errY := syntax.Compile(b.Simplify())
	if errX != nil || errY != nil {
		return false
	}
	type pair struct{ x, y uint32 }
	seen := map[pair]bool{}
	next := []pair{{uint32(x.Start), uint32(y.Start)}}
	for len(next) > 0 {
		p := next[len(next)-1]
		next = next[:len(next)-1]
		if seen[p] {
			continue
		}
		if seen[p] = true; len(seen) > maxPairs {
			return false
		}
		i, j := &x.Inst[p.x], &y.Inst[p.y]
		if to, free := freeSteps(i); free {
			for _, out := range to {
				next = append(next, pair{out, p.y})
			}
			continue
		}
		if to, free := freeSteps(j); free {
			for _, out := range to {
				next = append(next, pair{p.x, out})
			}
			continue
		}
		switch {
		case i.Op == syntax.InstMatch && j.Op == syntax.InstMatch:
			return false
		case i.Op != syntax.InstMatch && j.Op != syntax.InstMatch && shareRune(runes(i), runes(j)):
			next = append(next, pair{i.Out, j.Out})
		}
	}
	return true
}

// freeSteps returns where an instruction leads without a rune. free is false if it needs a rune, or is a match.
func freeSteps(i *syntax.Inst) (to []uint32, free bool) {
	switch i.Op {
	case syntax.InstAlt, syntax.InstAltMatch:
		return []uint32{i.Out, i.Arg}, true
	case syntax.InstCapture, syntax.InstEmptyWidth, syntax.InstNop:
		return []uint32{i.Out}, true
	case syntax.InstFail:
		return nil, true
	}
	return nil, false
}

// runes returns the ranges of runes that an instruction accepts, first and last of each.
func runes(i *syntax.Inst) []rune {
	switch {
	case i.Op == syntax.InstRuneAny:
		return []rune{0, unicode.MaxRune}
	case i.Op == syntax.InstRuneAnyNotNL:
		return []rune{0, '\n' - 1, '\n' + 1, unicode.MaxRune}
	case len(i.Rune) != 1:
		return i.Rune
	}
	r := i.Rune[0]
	all := []rune{r, r}
	if syntax.Flags(i.Arg)&syntax.FoldCase != 0 {
		for f := unicode.SimpleFold(r); f != r; f = unicode.SimpleFold(f) {
			all = append(all, f, f)
		}
	}
	return all
}

func shareRune(a, b []rune) bool {
	for i := 0; i+1 < len(a); i += 2 {
		for j := 0; j+1 < len(b); j += 2 {
			if a[i] <= b[j+1] && b[j] <= a[i+1] {
				return true
			}
		}
	}
	return false
}
