package redact

import (
	"bytes"
	"encoding/base64"
	"encoding/json"
	"fmt"
	"net/url"
	"strconv"
	"strings"
	"testing"
	"unicode/utf8"
)

func TestTextMasksPatterns(t *testing.T) {
	tests := []struct{ text, want string }{
		{"Authorization: Basic YW5uOnB3\nnext", "Authorization: [redacted]\nnext"},
		{`{"Cookie":["a=b; c=d","e=f"],"Host":["web"]}`, `{"Cookie":["[redacted]"],"Host":["web"]}`},
		{`{"cookies": [ "a]b=c", "d\"e" ], "x": 1}`, `{"cookies": [ "[redacted]" ], "x": 1}`},
		{`{"Authorization": "Digest a=\"b\", c", "x": 1}`, `{"Authorization": "[redacted]", "x": 1}`},
		{`{\"Authorization\": \"Bearer a b\", \"x\": 1}`, `{\"Authorization\": \"[redacted]\", \"x\": 1}`},
		{"Set-Cookie: sid=1; Path=/\r\n", "Set-Cookie: [redacted]\n"},
		{"map[Cookie:[sid=1] Host:[web]]", "map[Cookie:[[redacted]] Host:[web]]"},
		{"X-Auth-Token: abc def", "X-Auth-Token: [redacted]"},
		{`request sent bearer="Bearer abc.def-1"`, `request sent bearer="Bearer [redacted]"`},
		{"got eyJhbGciOiJFUzI1NiJ9.eyJzdWIiOiJhbm4ifQ.c2ln!", "got [redacted]!"},
		{"dial http://ann:p/w@proxy:3128: refused", "dial http://[redacted]proxy:3128: refused"},
		{"password=hunter2 level=INFO", "password=[redacted] level=INFO"},
		{`"db_password": "a \"b\" c", "x": 1`, `"db_password": "[redacted]", "x": 1`},
		{"kubectl --token abc get pods", "kubectl --token [redacted] get pods"},
		{"- name: DB_PASSWORD\n  value: hunter2\n- name: A", "- name: DB_PASSWORD\n  value: [redacted]\n- name: A"},
		{`{"name":"Cookie","value":"a=b"}`, `{"name":"Cookie","value":"[redacted]"}`},
		{"a:\n  token: |\n    x\n\n    y\n  b: 1", "a:\n  token: [redacted]\n  b: 1"},
		{"clientKey: abcdef", "clientKey: [redacted]"},
		{"AKIAIOSFODNN7EXAMPLE.", "[redacted]."},
		{"a\n-----BEGIN EC PRIVATE KEY-----\nAAAA\n-----END EC PRIVATE KEY-----\nb", "a\n[redacted]\nb"},
		{"a\n-----BEGIN EC PRIVATE KEY-----\nAAAA\n", "a\n[redacted]"},
		{"QUJDREVGR0hJSktMTU5PUFFS\nQUJD\n-----END EC PRIVATE KEY-----\nb", "[redacted]\nb"},
		{"id 9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08", "id [redacted]"},
		{"secret32 dGhpcyBpcyBub3QgYSBzZWNyZXQsIG9yIGlzIGl0Pz8", "secret32 [redacted]"},
	}
	var r Redactor
	for _, tt := range tests {
		if got := r.Text(tt.text); got != tt.want {
			t.Errorf("%q: got %q, want %q", tt.text, got, tt.want)
		}
	}
}

// secretTexts are texts by the secret in them.
var secretTexts = []struct{ secret, text string }{
	{"AIzaSyD4x9Kf0Lm2Pq7Rs1Tu3Vw5Xy8Za6Bc0De", "using AIzaSyD4x9Kf0Lm2Pq7Rs1Tu3Vw5Xy8Za6Bc0De now"},
	{"AIzaSyD4x9Kf0Lm2Pq7Rs1Tu3Vw5Xy8Za6Bc0De", "GET /v1?key=AIzaSyD4x9Kf0Lm2Pq7Rs1Tu3Vw5Xy8Za6Bc0De&x=1"},
	{"4eC39HqLyjWDarjtT1zdp7dc", "stripe: sk_live_4eC39HqLyjWDarjtT1zdp7dc"},
	{"4eC39HqLyjWDarjtT1", "rk_test_4eC39HqLyjWDarjtT1"},
	{"Zk3x9Qw7", "//registry.npmjs.org/:_authToken=npm_Zk3x9Qw7Zk3x9Qw7Zk3x9Qw7Zk3x9Qw7"},
	{"Zk3x9Qw7", "found npm_Zk3x9Qw7Zk3x9Qw7Zk3x9Qw7Zk3x9Qw7"},
	{"CAESIJ3k", "vault login hvs.CAESIJ3kLm"},
	{"ngeVfQFYQlKU0ufo8x5d1A", "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"},
	{"0123456789abcdef", "kubeadm join 10.0.0.1:6443 abcdef.0123456789abcdef"},
	{"AAHdqTcvCH1vGWJxfSeofSAs0K5PALDsaw", "bot 123456789:AAHdqTcvCH1vGWJxfSeofSAs0K5PALDsaw"},
	{"glptt", "glptt-0123456789abcdef01"},
	{"S3cretPw", "dsn root:S3cretPw@tcp(10.0.0.1:3306)/db"},
	{"p@ss/w", "dsn root:p@ss/w@unix(/run/mysqld.sock)/db"},
	{"dXNlcjpodW50ZXIy", `{"auths":{"r.example":{"auth":"dXNlcjpodW50ZXIy"}}}`},
	{"dXNlcjpwdw", "auth: dXNlcjpwdw=="},
	{"a%2Fb", "GET https://x.blob.example/c?sv=2024&sig=a%2Fb%3D&se=1"},
	{"abcd1234", "sig=abcd1234"},
	{"aGVsbG8gd29ybGQ", "Endpoint=sb://x/;AccountName=n;AccountKey=aGVsbG8gd29ybGQ==;Suffix=y"},
	{"aGVsbG8gd29ybGQ", "SharedAccessKey=aGVsbG8gd29ybGQ="},
	{"hunter2", "curl -u admin:hunter2 https://x.example"},
	{"hunter2", "curl --user 'admin:hunter2' https://x.example"},
	{"hunter2", "ssh: password for x: hunter2"},
	{"words here", "password: two words here"},
	{"words", "msg=\"password: two words\" level=INFO"},
	{"def", "DB_PASSWORD=abc;def"},
	{"REST", "DB_PASSWORD=ab,REST&REST"},
	{"b,c", "SECRET_KEY=a,b,c"},
	{"hunter2", "db:\n  password: |\n    hunter2\n  name: x"},
	{"hunter2", "password: >-\n\n  more\n  hunter2\nnext: 1"},
	{"hunter2", "db:\n  token: |\n    x\n  secret: |\n    hunter2\n  name: x"},
	{"hunter2", "- name: DB_PASSWORD\n  value: |\n    hunter2"},
	{"hunter2", "password: |\n      \n  hunter2\nnext: 1"},
	{"hunter2", "password:\n  hunter2"},
	{"hunter2", `{"value":"hunter2","name":"DB_PASSWORD"}`},
	{"hunter2", "- value: hunter2\n  name: DB_PASSWORD"},
	{"hunter2", `<add key="Password" value="hunter2"/>`},
	{"hunter2", "<password>hunter2</password>"},
	{"hunter2", `<ns:clientSecret a="b">hunter2</ns:clientSecret>`},
	{"4/0AX4XfWh", "GET /callback?code=4/0AX4XfWh&state=1"},
	{"hunter2", "psk=hunter2"},
	{"hunter2", `psk="hunter2"`},
	{"hunter2", "sshpass -p hunter2 ssh x"},
	{"hunter2", "sshpass -phunter2 ssh x"},
	{"hunter2", "mysql -h db -uroot -phunter2"},
	{"c0ffee", "https://s3.example/o?X-Amz-Credential=AKIA%2F1&X-Amz-Signature=c0ffee"},
	{"abc-def", "GET /?access_token=abc-def HTTP/1.1"},
	{"hunter2", "user=ann&password=hunter2"},
	{"hunter2", `{"user":"ann","password":"hunter2"}`},
	{"12345", `{"pin":1,"password":12345,"x":2}`},
	{"eeee", "X-Forwarded-Client-Cert: By=x;Hash=eeee;Cert=\"y\""},
	{"hunter2", `map["token":"hunter2"]`},
	{"hunter2", "Pwd=hunter2;Uid=x"},
	{"ghp_abcdefgh0123", "git clone with ghp_abcdefgh0123"},
	{"QdsQKj0VxYz", "client: 1ab8Q~QdsQKj0VxYzAbCdEfGhIjKlMnOpQrStUvW now"},
}

func TestTextMasksSecretsOfEachForm(t *testing.T) {
	for _, named := range []bool{false, true} {
		r := Redactor{Named: named}
		for _, tt := range secretTexts {
			for _, text := range []string{tt.text, "time=2026-11-23T18:00:00Z level=INFO msg=x\n" + tt.text + "\nlast", strconv.Quote(tt.text)} {
				if got := r.Text(text); strings.Contains(got, tt.secret) {
					t.Errorf("named %t: %q became %q", named, text, got)
				}
			}
		}
	}
}

// A report that masks everything helps nobody.
func TestTextKeepsWhatFindsFaults(t *testing.T) {
	for _, text := range []string{
		"exit code=1 status code=200 code: 404", "auth: permission denied", `"auth": {"r.example": {}}`, "-u 1000:1000", "date -u",
		"token expired; log in again", "the key of the map", "cannot refresh the token", "secrets is forbidden: User \"ann\"",
		"image r.example/web@sha256:9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08",
		"uid 3f2504e0-4f89-11d3-9a0c-0305e82c3301 resourceVersion=123456789 generation=3",
		"pod web-898fcff7c-sdqgm of kubevpn-traffic-manager-58758f557b-czxgb", "commit aabcc48 at 90355b2",
		"fd00:1234:5678::1 2001:db8:85a3::8a2e:370:7334 00:1a:2b:3c:4d:5e", "took 3.4ms wait=1m3s backoff=500ms",
		"dial tcp 10.0.0.1:443: connect: connection refused", "listen tcp [::1]:8080: bind: address already in use",
		"server.internal.example ns1.dev.example registry.k8s.io/pause:3.10", "basic authentication is off", "digest mismatch of the layer",
		"npm_config_registry npm_lifecycle_event", "kubernetes.io/service-account.name", "key=value name=x", "signal: killed",
		"inet6 fe80::a00:27ff:fe4e:66a1/64 scope link", "table ip kubevpn { chain prerouting { type nat hook prerouting priority -100; } }",
		"go1.26.3 linux/amd64 kubevpn v2.3.4-rc.1+meta", "https://10.0.0.1:6443/api/v1/pods?limit=500&watch=true&timeoutSeconds=300",
		"AKIA is a prefix", "sg.corp.example hvs. pul-request", "a3-b4 ops_team",
	} {
		if got := new(Redactor).Text(text); got != text {
			t.Errorf("%q became %q", text, got)
		}
	}
	named := Redactor{Named: true}
	for _, text := range []string{
		"traceparent 00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01", "/orders/3f2504e04f8911d39a0c0305e82c3301",
		"W/\"x9Kf0Lm2Pq7Rs1Tu3Vw5Xy8Za6Bc0DeAbCdEfGh12\"", `{"id": 7, "total": 10.5, "key": "x"}`,
	} {
		if got := named.Text(text); got != text {
			t.Errorf("%q became %q", text, got)
		}
	}
}

func TestHeaderKnowsSecretsByName(t *testing.T) {
	for name, want := range map[string]bool{
		"Authorization": true, "proxy-authorization": true, "Cookie": true, "Set-Cookie": true, "X-Api-Key": true, "X-Auth-Token": true,
		"X-Amz-Security-Token": true, "X-Vault-Token": true, "X-Forwarded-Access-Token": true, "X-Auth-Request-Access-Token": true,
		"X-Goog-Iap-Jwt-Assertion": true, "Api-Key": true, "Private-Token": true, "Dpop": true, "X-Csrf-Token": true,
		"X-Forwarded-Client-Cert": true, "Sec-Websocket-Protocol": true, "$.user.password": true, "grpc-session-bin": true,
		"Accept": false, "Host": false, "X-Request-Id": false, "Traceparent": false, "Www-Authenticate": false, "X-Author": false,
		":authority": false, "Content-Type": false, "access-control-allow-credentials": false, "Etag": false, "Keep-Alive": false,
	} {
		if Header(name) != want {
			t.Errorf("%s: %t", name, !want)
		}
	}
}

func TestTextKeepsOrdinaryText(t *testing.T) {
	var r Redactor
	r.Add("", "abc", "   ")
	for _, text := range []string{
		"", "\n", "abc %zz \\q \\u12 %",
		`time=2026-11-23T18:00:00Z level=INFO msg="conn opened" session=42 transport=api-proxy addr=10.96.0.1:443`,
		"image registry.example/kubevpn@sha256:9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08",
		"GET https://10.0.0.1:6443/api/v1/namespaces/kubevpn/pods/kubevpn-traffic-manager-6d4f9c7b8-x2x9z/portforward",
		"10.96.0.0/12 dev kubevpn0 proto static scope link src 198.19.0.2 metric 50",
		"nameserver 127.0.0.53\nsearch corp.example\noptions edns0 trust-ad",
		`{"cidrs": ["10.244.0.0/16"], "clusterID": "0123456789ab"}`,
		"kubevpn/internal/laptop/connection.(*Connection).handshake(0xc000123456, 0x1)",
	} {
		if got := r.Text(text); got != text {
			t.Errorf("%q became %q", text, got)
		}
	}
}

func TestTextMasksKnownValues(t *testing.T) {
	const secret = `p%41ss "wörd" \n&/+<x>`
	for name, text := range encoded(secret, "ann:", " and more") {
		var r Redactor
		r.Add(secret, "another")
		if got := r.Text("before " + text + " after"); got != "before "+Mark+" after" &&
			(!strings.HasPrefix(got, "before ") || !strings.HasSuffix(got, " after") || holds(got, secret)) {
			t.Errorf("%s: %q became %q", name, text, got)
		}
	}
}

func TestTextMasksPatternsInBase64(t *testing.T) {
	var r Redactor
	for _, secret := range []string{"Authorization: Bearer abcdef", "password=correct-horse", "-----BEGIN KEY-----\nAAAA"} {
		for n := range 3 {
			text := base64.StdEncoding.EncodeToString([]byte("{xyz"[:n+1] + secret))
			twice := base64.URLEncoding.EncodeToString([]byte(text))
			for _, text := range []string{text, twice, url.QueryEscape(text), strings.ReplaceAll(text, "/", `\/`)} {
				if got := r.Text("data: " + text + "\n"); strings.Contains(got, text[:16]) {
					t.Errorf("%q in %q became %q", secret, text, got)
				}
			}
		}
	}
}

// encoded returns the text with a secret in each encoding that the Redactor decodes.
func encoded(secret, before, after string) map[string]string {
	all := map[string]string{"raw": before + secret + after}
	add := func(name string, encode func(string) string) { all[name] = encode(before + secret + after) }
	quote := func(html bool) func(string) string {
		return func(s string) string {
			var b bytes.Buffer
			enc := json.NewEncoder(&b)
			enc.SetEscapeHTML(html)
			enc.Encode(s)
			return strings.TrimSuffix(b.String(), "\n")
		}
	}
	lower := func(s string) string {
		var b strings.Builder
		for _, c := range []byte(s) {
			fmt.Fprintf(&b, "%%%02x", c)
		}
		return b.String()
	}
	add("percent", lower)
	add("query", url.QueryEscape)
	add("path", url.PathEscape)
	if utf8.ValidString(secret) {
		add("JSON", quote(true))
		add("JSON without HTML", quote(false))
		add("JSON in JSON", func(s string) string { return quote(true)(quote(true)(s)) })
		add("query in JSON", func(s string) string { return quote(true)(url.QueryEscape(s)) })
		add("JSON in a query", func(s string) string { return url.QueryEscape(quote(true)(s)) })
	}
	add("Go", strconv.Quote)
	add("ASCII of Go", strconv.QuoteToASCII)
	for n := range 3 {
		before := before + "xyz"[:n]
		for name, e := range map[string]*base64.Encoding{"standard": base64.StdEncoding, "URL": base64.RawURLEncoding} {
			text := e.EncodeToString([]byte(before + secret + after))
			all[fmt.Sprintf("base64 %s %d", name, n)] = text
			all[fmt.Sprintf("base64 %s %d in a query", name, n)] = url.QueryEscape(text)
			all[fmt.Sprintf("base64 %s %d in JSON", name, n)] = strings.ReplaceAll(text, "/", `\/`)
		}
	}
	return all
}

// holds reports whether the text contains a secret in an encoding, with any neighbors.
func holds(text, secret string) bool {
	for _, e := range encoded(secret, "", "") {
		if strings.Contains(text, e) {
			return true
		}
	}
	for _, e := range encodings(secret) {
		if strings.Contains(text, e) {
			return true
		}
	}
	return false
}

// FuzzText checks that no encoding of a known value remains, whatever surrounds the value.
func FuzzText(f *testing.F) {
	f.Add("hunter2!", "user=ann&pw=", "\nnext")
	f.Add("p%41ss \"w\\u00f6rd", "\\", "%")
	f.Add("\x00\xff\xfe\x80", "{", "}")
	f.Add("aaaaaaa", "aaa", "a")
	f.Add("%%%%41", "%", "41")
	f.Fuzz(func(t *testing.T, secret, before, after string) {
		secret = strings.TrimSpace(secret)
		if len(secret) < 6 || len(secret)+len(before)+len(after) > 1<<10 || strings.ContainsAny(secret, "[]") ||
			strings.Contains(Mark, secret) {
			t.Skip("short values are found too, but occur in other text by chance")
		}
		var r Redactor
		r.Add(secret)
		for name, text := range encoded(secret, before, after) {
			if got := r.Text("{ " + text + " }"); holds(got, secret) {
				t.Errorf("%s: %q became %q", name, text, got)
			}
		}
	})
}

func BenchmarkText(b *testing.B) {
	var r Redactor
	for n := range 200 {
		r.Add(fmt.Sprintf("value-of-variable-%d", n))
	}
	line := `time=2026-11-23T18:00:00.000Z level=INFO msg="conn opened" session=42 url="https://10.0.0.1/api?x=%20" err="\"x\""` + "\n"
	text := strings.Repeat(line, 1<<20/len(line))
	b.SetBytes(int64(len(text)))
	for b.Loop() {
		r.Text(text)
	}
}
