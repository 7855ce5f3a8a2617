package main

import (
	"bytes"
	"encoding/json"
	"net"
	"net/netip"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/miekg/dns"
)

// answerer stores the answer that a handler writes.
type answerer struct {
	dns.ResponseWriter
	remote net.Addr
	answer *dns.Msg
}

func (a *answerer) RemoteAddr() net.Addr           { return a.remote }
func (a *answerer) WriteMsg(answer *dns.Msg) error { a.answer = answer; return nil }

func TestServeDNSAnswersForTheZone(t *testing.T) {
	var logged bytes.Buffer
	z := &zoneHandler{
		zone:      "outside.test.",
		addresses: []netip.Addr{netip.MustParseAddr("203.0.113.10"), netip.MustParseAddr("2001:db8:113::10")},
		log:       &logged,
	}
	for _, test := range []struct {
		name   string
		kind   uint16
		rcode  int
		answer []string
	}{
		{"www.outside.test.", dns.TypeA, dns.RcodeSuccess, []string{"203.0.113.10"}},
		{"WWW.Outside.Test.", dns.TypeAAAA, dns.RcodeSuccess, []string{"2001:db8:113::10"}},
		{"outside.test.", dns.TypeA, dns.RcodeSuccess, []string{"203.0.113.10"}},
		{"ipv4.outside.test.", dns.TypeAAAA, dns.RcodeSuccess, nil},
		{"ipv6.outside.test.", dns.TypeA, dns.RcodeSuccess, nil},
		{"ipv6.outside.test.", dns.TypeAAAA, dns.RcodeSuccess, []string{"2001:db8:113::10"}},
		{"www.outside.test.", dns.TypeMX, dns.RcodeSuccess, nil},
		{"10.113.0.203.in-addr.arpa.", dns.TypePTR, dns.RcodeSuccess, []string{"www.outside.test."}},
		{"nothing.outside.test.", dns.TypeA, dns.RcodeNameError, nil},
		{"notoutside.test.", dns.TypeA, dns.RcodeNameError, nil},
		{"web.default.svc.cluster.local.", dns.TypeA, dns.RcodeNameError, nil},
		{"1.0.96.10.in-addr.arpa.", dns.TypePTR, dns.RcodeNameError, nil},
	} {
		w := &answerer{remote: &net.UDPAddr{IP: net.IPv4(10, 98, 0, 2), Port: 5000}}
		z.ServeDNS(w, new(dns.Msg).SetQuestion(test.name, test.kind))
		var got []string
		for _, rr := range w.answer.Answer {
			if rr.Header().Name != test.name {
				t.Errorf("%s: the answer is for %s", test.name, rr.Header().Name)
			}
			switch rr := rr.(type) {
			case *dns.A:
				got = append(got, rr.A.String())
			case *dns.AAAA:
				got = append(got, rr.AAAA.String())
			case *dns.PTR:
				got = append(got, rr.Ptr)
			}
		}
		if diff := cmp.Diff(test.answer, got); diff != "" || w.answer.Rcode != test.rcode {
			t.Errorf("%s %s: %s (-want +got):\n%s", test.name, dns.TypeToString[test.kind], dns.RcodeToString[w.answer.Rcode], diff)
		}
		if len(got) == 0 && (len(w.answer.Ns) != 1 || w.answer.Ns[0].Header().Rrtype != dns.TypeSOA) {
			t.Errorf("%s: a negative answer without SOA", test.name)
		}
	}
	var first query
	if err := json.NewDecoder(&logged).Decode(&first); err != nil {
		t.Fatal(err)
	}
	if first.From != "10.98.0.2:5000" || first.Proto != "udp" || first.Name != "www.outside.test." || first.Type != "A" || first.Rcode != "NOERROR" {
		t.Errorf("logged %+v", first)
	}
}

// TestTruncationNeedsTCP checks that an answer that is too long for UDP is truncated, and complete over TCP.
func TestTruncationNeedsTCP(t *testing.T) {
	z := &zoneHandler{zone: "outside.test.", log: new(bytes.Buffer)}
	question := new(dns.Msg).SetQuestion("big.outside.test.", dns.TypeTXT)
	udp := &answerer{remote: &net.UDPAddr{}}
	z.ServeDNS(udp, question)
	if !udp.answer.Truncated || udp.answer.Len() > dns.MinMsgSize {
		t.Errorf("over UDP: %d bytes, truncated %v", udp.answer.Len(), udp.answer.Truncated)
	}
	tcp := &answerer{remote: &net.TCPAddr{}}
	z.ServeDNS(tcp, question)
	if tcp.answer.Truncated || len(tcp.answer.Answer) != 20 {
		t.Errorf("over TCP: %d records, truncated %v", len(tcp.answer.Answer), tcp.answer.Truncated)
	}
	two := new(dns.Msg).SetQuestion("www.outside.test.", dns.TypeA)
	two.Question = append(two.Question, two.Question[0])
	z.ServeDNS(tcp, two)
	if tcp.answer.Rcode != dns.RcodeFormatError {
		t.Errorf("two questions: %s", dns.RcodeToString[tcp.answer.Rcode])
	}
}
