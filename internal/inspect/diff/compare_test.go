package diff

import (
	"bytes"
	"compress/gzip"
	"fmt"
	"net/http"
	"slices"
	"strings"
	"testing"

	"kubevpn/internal/api"
)

// answered returns an exchange with this body, whose Content-Type is kind.
func answered(kind, body string) *api.Exchange {
	return &api.Exchange{To: api.ToApplication, Request: api.ExchangeRequest{Method: "GET", Scheme: "http", Host: "web", Path: "/price"},
		Response: &api.ExchangeResponse{Status: 200, Headers: http.Header{"Content-Type": {kind}},
			Body: api.ExchangeBody{Size: int64(len(body)), Data: []byte(body)}}}
}

// ignoring returns what --ignore with these texts ignores.
func ignoring(t testing.TB, texts ...string) *Ignored {
	t.Helper()
	i := new(Ignored)
	for _, text := range texts {
		if err := i.Parse(text); err != nil {
			t.Fatal(err)
		}
	}
	return i
}

// lines returns differences as text.
func lines(all []Difference) []string {
	texts := []string{}
	for _, d := range all {
		texts = append(texts, d.Where+" "+d.From+" -> "+d.To)
	}
	return texts
}

func TestCompareBodies(t *testing.T) {
	const json, text = "application/json", "text/plain"
	long := strings.Repeat("x", 1000)
	for name, test := range map[string]struct {
		kind, from, to string
		ignore         []string
		want           []string
	}{
		"number text":       {json, `{"total":10.5}`, `{"total":10.50}`, nil, []string{"body $.total 10.5 -> 10.50"}},
		"order and spaces":  {json, `{"a":1,"b":[true,null]}`, "{ \"b\" : [true, null],\n\"a\":1}", nil, nil},
		"escapes":           {json, `{"a":"\u00e9"}`, `{"a":"é"}`, nil, nil},
		"type":              {json, `{"a":1}`, `{"a":"1"}`, nil, []string{`body $.a 1 -> "1"`}},
		"null is not false": {json, `[null]`, `[false]`, nil, []string{`body $[*] null -> false`}},
		"members":           {json, `{"a":1}`, `{"b c":{}}`, nil, []string{"body $.a 1 -> absent", `body $["b c"] absent -> {0 members}`}},
		"items":             {json, `[{"id":1}]`, `[{"id":2},{}]`, nil, []string{"body $ 1 items -> 2 items", "body $[*].id 1 -> 2"}},
		"object for list":   {json, `{}`, `[]`, nil, []string{"body $ {0 members} -> [0 items]"}},
		"ignored":           {json, `{"a":{"b":1},"c":[{"id":1}],"d":1}`, `{"a":{"b":2},"c":[{"id":2}]}`, []string{"$.a", "$.c[*].id", "$['d']"}, nil},
		"ignored anywhere":  {json, `{"a":[{"id":1,"x":1}]}`, `{"a":[{"id":2,"x":2}]}`, []string{"$..id"}, []string{"body $.a[*].x 1 -> 2"}},
		"ignored element":   {json, `[1,1]`, `[2,2]`, []string{"$[1]"}, []string{"body $[*] 1 -> 2"}},
		"not JSON":          {json, `{"a":1`, `{"a":2`, nil, []string{`body line 1 "{\"a\":1" -> "{\"a\":2"`}},
		"JSON by its looks": {text, `{"a":1}`, `{ "a":1}`, nil, nil},
		"line":              {text, "a\nb\r\nc", "a\nB\r\nc", nil, []string{`body line 2 "b\r" -> "B\r"`}},
		"more lines":        {text, "a\nb", "a\nx\nb", nil, []string{`body lines line 2 of 2: "b" -> line 2 of 3: "x"`}},
		"no more lines":     {text, "a", "a\n", nil, []string{`body lines line 2 of 1: absent -> line 2 of 2: ""`}},
		"far in a line":     {text, long + "1", long + "2", nil, []string{"body line 1 …" + strings.Repeat("x", 50) + `1" -> …` + strings.Repeat("x", 50) + `2"`}},
		"bytes":             {"image/png", "\xff\x00\x01", "\xff\x02", nil, []string{"body bytes 3 bytes, 00 01 at byte 1 -> 2 bytes, 02 at byte 1"}},
		"body ignored":      {text, "a", "b", []string{"$"}, nil},
	} {
		t.Run(name, func(t *testing.T) {
			all, incomplete := Compare(answered(test.kind, test.from), answered(test.kind, test.to), ignoring(t, test.ignore...))
			if got := lines(all); !slices.Equal(got, test.want) && len(got)+len(test.want) > 0 || incomplete {
				t.Errorf("got %q, %v\nwant %q", got, incomplete, test.want)
			}
			if same, _ := Compare(answered(test.kind, test.from), answered(test.kind, test.from), new(Ignored)); len(same) > 0 {
				t.Errorf("differs from itself: %q", same)
			}
		})
	}
}

func TestCompareHeads(t *testing.T) {
	a, b := answered("text/plain", "same"), answered("text/html", "same")
	a.Response.Headers["Date"], a.Response.Headers["X-Old"] = []string{"now"}, []string{"1", "2"}
	b.Response.Headers["Server"], b.Response.Trailers = []string{"new"}, http.Header{"X-Sum": {"1"}}
	got, _ := Compare(a, b, ignoring(t, "server"))
	want := []string{"header Content-Type text/plain -> text/html", "header X-Old 1, 2 -> absent", "trailer X-Sum absent -> 1"}
	if !slices.Equal(lines(got), want) {
		t.Errorf("%q", lines(got))
	}
	b.Response.Status = 500
	if got, _ := Compare(a, b, new(Ignored)); !slices.Equal(lines(got), []string{"status 200 -> 500"}) {
		t.Errorf("%q", lines(got))
	}
	b.Response, b.Error = nil, "refused"
	if got, _ := Compare(a, b, new(Ignored)); !slices.Equal(lines(got), []string{"answer status 200 -> none: refused"}) {
		t.Errorf("%q", lines(got))
	}
}

func TestCompareOfHEADIgnoresTheBody(t *testing.T) {
	a, b := answered("text/plain", ""), answered("text/plain", "")
	a.Request.Method, b.Response.Body.Size = "HEAD", 7
	if got, incomplete := Compare(a, b, new(Ignored)); len(got) > 0 || incomplete {
		t.Errorf("%q, %v", got, incomplete)
	}
}

// Of a body that was not recorded as a whole, only what is known is compared.
func TestCompareTruncatedBodies(t *testing.T) {
	for name, test := range map[string]struct {
		kind, from, to string
		rest           int64
		want           []string
	}{
		"JSON":           {"application/json", `{"a":1,`, `{"a":2,`, 5, nil},
		"text":           {"text/plain", "a\nb", "a\nB", 5, []string{`body line 2 "b" -> "B"`}},
		"same beginning": {"text/plain", "same", "same", 5, nil},
		"rune":           {"text/plain", "a\xc3", "a\xc3", 5, nil},
	} {
		t.Run(name, func(t *testing.T) {
			a, b := answered(test.kind, test.from), answered(test.kind, test.to)
			a.Response.Body.Size += test.rest
			b.Response.Body.Size += test.rest
			got, incomplete := Compare(a, b, new(Ignored))
			if !incomplete || !slices.Equal(lines(got), test.want) && len(got)+len(test.want) > 0 {
				t.Errorf("%q, %v", lines(got), incomplete)
			}
		})
	}
	a, b := answered("text/plain", "same"), answered("text/plain", "same")
	a.Response.Body.Size = 10
	if got, incomplete := Compare(a, b, new(Ignored)); !incomplete || !slices.Equal(lines(got), []string{"body bytes 10 bytes -> 4 bytes"}) {
		t.Errorf("%q, %v", lines(got), incomplete)
	}
}

func TestCompareUnpacksGzip(t *testing.T) {
	packed := func(body string, level int) *api.Exchange {
		var b bytes.Buffer
		z, err := gzip.NewWriterLevel(&b, level)
		if err != nil {
			t.Fatal(err)
		}
		fmt.Fprint(z, body)
		z.Close()
		e := answered("application/json", b.String())
		e.Response.Headers["Content-Encoding"] = []string{"gzip"}
		return e
	}
	body := `{"a":"` + strings.Repeat("abc", 100) + `"}`
	if got, incomplete := Compare(packed(body, gzip.NoCompression), packed(body, gzip.BestCompression), new(Ignored)); len(got) > 0 || incomplete {
		t.Errorf("%q, %v", lines(got), incomplete)
	}
	if got, _ := Compare(packed(`[1]`, gzip.BestSpeed), packed(`[2]`, gzip.BestSpeed), new(Ignored)); !slices.Equal(lines(got), []string{"body $[*] 1 -> 2"}) {
		t.Errorf("%q", lines(got))
	}
	bomb := packed(strings.Repeat("0", 2*maxUnpacked), gzip.BestCompression)
	if _, incomplete := Compare(bomb, packed("1", gzip.BestSpeed), new(Ignored)); !incomplete {
		t.Error("a long body counts as compared")
	}
	broken := packed(`[1]`, gzip.BestSpeed)
	broken.Response.Body.Data = []byte("no gzip")
	if _, incomplete := Compare(broken, packed(`[1]`, gzip.BestSpeed), new(Ignored)); !incomplete {
		t.Error("a broken body counts as compared")
	}
}

func TestIgnoredRejectsOtherText(t *testing.T) {
	for _, text := range []string{"", "a b", "$a", "$.", "$..", "$.a.", "$.a..", "$[", "$[a]", "$[-1]", `$["a`, "$[99999999999]", "$" + strings.Repeat(".a", 200)} {
		if err := new(Ignored).Parse(text); err == nil {
			t.Errorf("%q is accepted", text)
		}
	}
}

func FuzzIgnored(f *testing.F) {
	for _, text := range []string{"$", "$.a.b", "$.items[*].id", "$..id", "$..[0]", `$["a.b"]['c']`, "Server", "$..a..b.*"} {
		f.Add(text, `{"a":{"b":[1,{"id":2}]},"items":[{"id":1}]}`, `{"a":{"b":[2,{"id":3}]},"items":[]}`)
	}
	f.Fuzz(func(t *testing.T, text, from, to string) {
		i := new(Ignored)
		if i.Parse(text) != nil {
			return
		}
		a, b := answered("application/json", from), answered("application/json", to)
		whole, _ := Compare(a, b, new(Ignored))
		rest, _ := Compare(a, b, i)
		if len(rest) > len(whole) {
			t.Errorf("%q adds differences: %q, %q", text, whole, rest)
		}
	})
}

func FuzzCompare(f *testing.F) {
	f.Add("application/json", `{"a":1}`, `[{"a":[null]}]`, int64(0))
	f.Add("text/html", "a\nb", "\xff\n", int64(9))
	f.Add("", "{}{}", "\u2028\x00", int64(1))
	f.Fuzz(func(t *testing.T, kind, from, to string, rest int64) {
		a, b := answered(kind, from), answered(kind, to)
		if rest > 0 {
			a.Response.Body.Size += rest % (1 << 40)
		}
		all, _ := Compare(a, b, new(Ignored))
		for _, d := range all {
			if len(d.Where) > maxText+8 || len(d.From) > maxText+8 || len(d.To) > maxText+8 {
				t.Errorf("too long: %q", d)
			}
		}
		if same, _ := Compare(a, a, new(Ignored)); len(same) > 0 {
			t.Errorf("%q differs from itself: %q", from, same)
		}
		back, _ := Compare(b, a, new(Ignored))
		if len(back) != len(all) {
			t.Errorf("%q, but backwards %q", all, back)
		}
	})
}
