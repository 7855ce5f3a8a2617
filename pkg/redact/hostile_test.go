package redact

import (
	"encoding/base64"
	"strings"
	"testing"
)

// hostileTexts are texts of 512 KiB that make patterns start, repeat and reject as often as possible.
func hostileTexts() map[string]string {
	fill := func(part string) string { return strings.Repeat(part, 1<<19/len(part)+1)[:1<<19] }
	starts := `name=key:value="password>token: |` + "\n" + ` x-auth eyJ --secret ://a@tcp( -u mysql sshpass auth=bearer ?code= sig=` +
		`x-amz- q~ 1:aa -----BEGIN -----END password for authorization a.b </ `
	return map[string]string{
		"starts":                     fill(starts),
		"starts in one line":         fill(strings.ReplaceAll(starts, "\n", " ")),
		"starts without blanks":      fill(strings.ReplaceAll(strings.ReplaceAll(starts, "\n", ""), " ", "")),
		"starts, escaped":            fill(`%252525 \\\\\\\\ ` + strings.ReplaceAll(starts, "\n", " ")),
		"starts, escaped, in lines":  fill(`%252525 \\\\\\\\ ` + starts),
		"starts, escaped, in base64": fill(base64.StdEncoding.EncodeToString([]byte(fill(`%252525 \\\\ ` + starts)[:1<<18])) + "\n"),
		"elements":                   fill("password>"),
		"elements and pairs":         fill("password =x >"),
		"pairs":                      fill("password=x y="),
		"blocks":                     fill("token: |\n "),
		"blocks in blocks":           fill("token: |\n " + strings.Repeat(" ", 30) + "pwd: >\n"),
		"deeper and deeper blocks":   stairs(),
		"deep blocks":                fill("token: |\n" + strings.Repeat(" ", 60) + "x\n"),
		"lists":                      fill("token=[ cookie:[ "),
		"quotes":                     fill(`token="\" secret='`),
		"values":                     fill(`value="a,'value:'b "`),
		"values and names":           fill(`value=a name=token_a value='`),
		"names":                      fill("name=aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa"),
		"headers":                    fill("x-x-auth-"),
		"keys":                       fill("PRIVATE KEY-----AAAAAAAAAAAAAAAAAAAA\n"),
		"begins":                     fill("-----BEGIN A"),
		"users":                      fill("a:b@tcp"),
		"URLs":                       fill("://a"),
		"commands":                   fill("mysql -u a "),
		"prefixes":                   fill("npm_ ghp_ sk-ant- xoxe.xox "),
		"long prefixes":              fill("npm_abcdefghijklmnopqrstuvwxyz "),
		"prefixes without blanks":    fill("npm_ghp_sk-ant-xoxe.xox"),
		"hex":                        fill("0123456789abcdef0123456789abcde."),
		"words":                      fill("abcdefghijklmnopqrstuvwxyzabcdefghijklm."),
		"bytes":                      fill("\x00\xff\xfe\x80"),
	}
}

// stairs returns blocks of YAML, each in the one before.
func stairs() string {
	var b strings.Builder
	for n := 0; b.Len() < 1<<19; n++ {
		b.WriteString(strings.Repeat(" ", n) + "token: |\n")
	}
	return b.String()[:1<<19]
}

func BenchmarkTextOfHostileTexts(b *testing.B) {
	for name, text := range hostileTexts() {
		b.Run(strings.ReplaceAll(name, " ", "-"), func(b *testing.B) {
			var r Redactor
			b.SetBytes(int64(len(text)))
			for b.Loop() {
				r.Text(text)
			}
		})
	}
}
