package dns

import (
	"net/netip"
	"strings"
	"testing"

	"github.com/miekg/dns"
)

func TestFormsNameTheService(t *testing.T) {
	t.Parallel()
	for name, want := range map[string]form{
		"web.billing.svc":              {namespace: "billing", service: "web"},
		"db-0.db.billing.svc":          {namespace: "billing", service: "db"},
		"10-1-2-3.db.billing.svc":      {namespace: "billing", service: "db"},
		"_http._tcp.web.billing.svc":   {namespace: "billing", service: "web"},
		"http.tcp.web.billing.svc":     {},
		"_http._tcp.x.web.billing.svc": {},
		"billing.svc":                  {},
		"svc":                          {},
		"10-1-2-3.billing.pod":         {pod: netip.MustParseAddr("10.1.2.3")},
		"2001-db8--1.billing.pod":      {pod: netip.MustParseAddr("2001:db8::1")},
		"--ffff-10.1.2.3.billing.pod":  {},
		"10-1-2-300.billing.pod":       {},
		"fe80--1%eth0.billing.pod":     {},
		"web.billing.pod":              {},
		"x.10-1-2-3.billing.pod":       {},
		"web.billing.endpoints":        {},
	} {
		var buf [maxLabels]string
		n, ok := splitKey(name, &buf)
		var got form
		if ok {
			got, _ = formOf(buf[:n])
		}
		if got != want {
			t.Errorf("%s: %+v, want %+v", name, got, want)
		}
	}
}

func TestReversePrefixParsesReverseNames(t *testing.T) {
	t.Parallel()
	for name, want := range map[string]string{
		"4.3.2.10.in-addr.arpa":       "10.2.3.4/32",
		"3.2.10.in-addr.arpa":         "10.2.3.0/24",
		"10.in-addr.arpa":             "10.0.0.0/8",
		"in-addr.arpa":                "",
		"x.in-addr.arpa":              "",
		"0-25.3.2.10.in-addr.arpa":    "10.2.3.0/24", // RFC 2317
		"x.4.3.2.10.in-addr.arpa":     "10.2.3.4/32",
		"256.2.10.in-addr.arpa":       "10.2.0.0/16",
		"04.3.2.10.in-addr.arpa":      "10.2.3.0/24",
		"..in-addr.arpa":              "",
		"8.b.d.0.1.0.0.2.ip6.arpa":    "2001:db8::/32",
		"F.ip6.arpa":                  "", // keys are in lower case
		"ip6.arpa":                    "",
		"4.3.2.10.in-addr.arpa.local": "",
	} {
		got, ok := reversePrefix(name)
		if !ok {
			if want != "" {
				t.Errorf("%s: not an address, want %s", name, want)
			}
			continue
		}
		if got.String() != want {
			t.Errorf("%s: %v, want %s", name, got, want)
		}
	}
}

func TestPublicTLDsAreKnown(t *testing.T) {
	t.Parallel()
	for label, want := range map[string]bool{
		"com": true, "dev": true, "io": true, "arpa": true, "ck": true, "xn--p1ai": true, "app": true,
		"default": false, "kube-system": false, "local": false, "svc": false, "billing": false, "github": false,
	} {
		if got := isPublicTLD(label); got != want {
			t.Errorf("%s: %v", label, got)
		}
	}
}

func TestKeyOfNormalizesNames(t *testing.T) {
	t.Parallel()
	for name, want := range map[string]string{
		"Web.Default.":         "web.default",
		"web":                  "web",
		".":                    "",
		`a\.b.example.`:        "a\xffb.example",
		`\087\069\066.example`: "web.example",
	} {
		if got, err := keyOf(name); err != nil || got != want {
			t.Errorf("%s: %q, %v", name, got, err)
		}
	}
	for _, name := range []string{"a..b", strings.Repeat("a", 64), strings.Repeat("a.", 128)} {
		if got, err := keyOf(name); err == nil {
			t.Errorf("%s: %q", name, got)
		}
	}
}

// FuzzQuery compares the parser of queries with miekg's, and checks the replies.
func FuzzQuery(f *testing.F) {
	for _, name := range []string{"web", "WEB.default.svc.cluster.local", `a\.b.c`, ".", "4.3.2.10.in-addr.arpa"} {
		q := newQuery(name, dns.TypeA)
		q.SetEdns0(1232, true)
		packed, err := q.Pack()
		if err != nil {
			f.Fatal(err)
		}
		f.Add(packed)
	}
	f.Add([]byte("\x00\x01\x01\x00\x00\x01\x00\x00\x00\x00\x00\x01\x03web\x00\x00\x01\x00\x01\x00\x00\xff\x00\x01\x00\x00\x00\x00\x00\x00"))
	f.Fuzz(func(t *testing.T, m []byte) {
		q, err := parseQuery(m)
		msg := new(dns.Msg)
		whole := msg.Unpack(m) == nil
		if err != nil {
			// Other parsers refuse the same messages, except for compressed names and cut types in questions.
			if whole && !msg.Response && msg.Opcode == dns.OpcodeQuery && len(msg.Question) == 1 && !isOdd(m) {
				t.Fatalf("refused: %v: %v", err, msg)
			}
			return
		}
		if q.end > len(m) || q.end < headerLen+5 {
			t.Fatalf("the question ends at %d of %d", q.end, len(m))
		}
		if size := udpSize(m, q.end); size < 512 || size > 65535 {
			t.Fatalf("the UDP size is %d", size)
		}
		if whole {
			key, err := keyOf(msg.Question[0].Name)
			if err != nil || key != q.key || msg.Question[0].Qtype != q.qtype || msg.Question[0].Qclass != q.qclass {
				t.Fatalf("read as %+v; others read %v (%q, %v)", q, msg.Question[0], key, err)
			}
			if opt := msg.IsEdns0(); opt != nil && len(msg.Extra) == 1 && len(msg.Answer)+len(msg.Ns) == 0 {
				if got, want := udpSize(m, q.end), max(512, int(opt.UDPSize())); got != want {
					t.Fatalf("the UDP size is %d, others read %d", got, want)
				}
			}
		}
		r := replyTo(m, q.end, dns.RcodeServerFailure)
		if !answers(r, m, q.end) {
			t.Fatalf("%q is no reply to %q", r, m)
		}
		if reply := new(dns.Msg); reply.Unpack(r) != nil || !reply.Response || reply.Rcode != dns.RcodeServerFailure || len(reply.Question) != 1 {
			t.Fatalf("%q is not a reply", r)
		}
		if answers(m, m, q.end) {
			t.Fatal("a query is its own reply")
		}
	})
}

// isOdd reports whether the question is cut, or its name has a byte that the parser does not accept as the length of a
// label.
func isOdd(m []byte) bool {
	off := headerLen
	for off < len(m) && m[off] != 0 {
		if m[off] > 63 {
			return true
		}
		off += 1 + int(m[off])
	}
	return len(m) < off+5
}

// FuzzRoute checks the promises about routes that hold for all names.
func FuzzRoute(f *testing.F) {
	for _, name := range []string{"web", "web.billing", "db-0.db", "_http._tcp.web.billing.svc", "10-244-0-1.default.pod", "x.y.z.svc",
		"a.cluster.local", "cluster.local", "4.0.244.10.in-addr.arpa", "web.dev", "localhost", "wpad", "www.google.com", "lan", "git.corp"} {
		f.Add(name, uint16(1), uint16(1), true)
	}
	index := clusterServices()
	f.Fuzz(func(t *testing.T, name string, qtype, qclass uint16, indexed bool) {
		key, err := keyOf(name)
		if err != nil {
			return
		}
		zone := Zone{Domain: "cluster.local", Reverse: clusterPrefixes, Cluster: handlerFunc(brokenTunnel)}
		if indexed {
			zone.Services = index
		}
		z, err := newZone(zone)
		if err != nil {
			t.Fatal(err)
		}
		rt := zones{z}.route(question{key: key, qtype: qtype, qclass: qclass})
		inside := len(rt.asks) > 0
		if (key == "cluster.local" || strings.HasSuffix(key, ".cluster.local")) && (!inside || rt.short || rt.guess) {
			t.Fatalf("%q leaves the tunnel: %+v", key, rt)
		}
		if qclass == dns.ClassINET && strings.HasSuffix(key, ".svc") && (!inside || rt.guess) {
			t.Fatalf("%q leaves the tunnel: %+v", key, rt)
		}
		if !inside {
			return
		}
		labels := strings.Split(key, ".")
		last := labels[len(labels)-1]
		if rt.late != (rt.short && len(labels) > 1 && isPrivateTLD(last)) {
			t.Fatalf("%q: %+v", key, rt)
		}
		if rt.guess != (rt.late || rt.short && !indexed && !strings.Contains(key, ".")) {
			t.Fatalf("%q: %+v", key, rt)
		}
		if rt.short && len(labels) > 1 && isPublicTLD(last) || last == "localhost" || key == "wpad" || key == "isatap" {
			t.Fatalf("%q enters the tunnel: %+v", key, rt)
		}
		for _, a := range rt.asks {
			if rt.short != (a.suffix != "") || rt.short && !strings.HasSuffix(a.suffix, "cluster.local.") {
				t.Fatalf("%q: %+v", key, rt)
			}
		}
	})
}
