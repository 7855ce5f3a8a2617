// Outside is the world beyond the lab's cluster: a DNS server with its own zone, and a web server. Tests use it to
// check that names and addresses outside of the cluster still work. It logs every query, so that tests see a cluster
// name that leaks out, and an outside name that no longer arrives.
//
//	outside -dns 10.98.0.1:53 -address 203.0.113.10 -zone outside.test -log queries.jsonl
//
// The zone has www (and the zone's name itself) at the given addresses, ipv4 and ipv6 with one family only, and big,
// whose TXT answer does not fit a UDP datagram. The addresses resolve back to www. Nothing else exists.
package main

import (
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"log"
	"net"
	"net/http"
	"net/netip"
	"os"
	"os/signal"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/miekg/dns"
	"golang.org/x/sync/errgroup"
)

func main() { os.Exit(run()) }

func run() int {
	log.SetFlags(log.LstdFlags | log.Lmicroseconds)
	listen := flag.String("dns", "", "comma-separated `ADDRESS:PORT`s that the DNS server listens on")
	addresses := flag.String("address", "",
		"comma-separated `ADDRESS`es of www; the web server listens on their port 80")
	zone := flag.String("zone", "outside.test", "the `ZONE` to serve")
	queries := flag.String("log", "", "`FILE` that each query is appended to, a JSON object a line")
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM)
	defer stop()
	if err := serve(ctx, *listen, *addresses, dns.Fqdn(*zone), *queries); err != nil {
		log.Print(err)
		return 1
	}
	return 0
}

func serve(ctx context.Context, listen, addresses, zone, queries string) error {
	z := &zoneHandler{zone: zone}
	for s := range strings.SplitSeq(addresses, ",") {
		a, err := netip.ParseAddr(s)
		if err != nil {
			return err
		}
		z.addresses = append(z.addresses, a)
	}
	file, err := os.OpenFile(queries, os.O_APPEND|os.O_CREATE|os.O_WRONLY, 0o644)
	if err != nil {
		return err
	}
	defer file.Close()
	z.log = file

	group, ctx := errgroup.WithContext(ctx)
	for address := range strings.SplitSeq(listen, ",") {
		for _, network := range []string{"udp", "tcp"} {
			server := &dns.Server{Addr: address, Net: network, Handler: z}
			group.Go(server.ListenAndServe)
			group.Go(func() error { <-ctx.Done(); return server.Shutdown() })
		}
	}
	for _, a := range z.addresses {
		server := &http.Server{Addr: netip.AddrPortFrom(a, 80).String(), Handler: http.HandlerFunc(page),
			ReadHeaderTimeout: time.Minute}
		group.Go(server.ListenAndServe)
		group.Go(func() error { <-ctx.Done(); return server.Close() })
	}
	if err := group.Wait(); !errors.Is(err, http.ErrServerClosed) {
		return err
	}
	return nil
}

func page(w http.ResponseWriter, r *http.Request) {
	fmt.Fprintf(w, "outside: %s %s%s, asked by %s\n", r.Method, r.Host, r.URL.Path, r.RemoteAddr)
}

// zoneHandler answers for the zone and its reverse names, NXDOMAIN for all other names.
type zoneHandler struct {
	zone      string // "outside.test."
	addresses []netip.Addr

	mu  sync.Mutex // log
	log io.Writer
}

// query is one line of the log.
type query struct {
	Time  time.Time `json:"time"`
	From  string    `json:"from"`  // the client's address and port
	Proto string    `json:"proto"` // udp or tcp
	Name  string    `json:"name"`  // lower case, with the final dot
	Type  string    `json:"type"`
	Rcode string    `json:"rcode"`
}

// ServeDNS implements dns.Handler.
func (z *zoneHandler) ServeDNS(w dns.ResponseWriter, r *dns.Msg) {
	answer := new(dns.Msg)
	if len(r.Question) != 1 {
		answer.SetRcode(r, dns.RcodeFormatError)
		if err := w.WriteMsg(answer); err != nil {
			log.Print(err)
		}
		return
	}
	answer.SetReply(r)
	answer.Authoritative = true
	q := r.Question[0]
	name := strings.ToLower(q.Name)
	records, exists := z.lookup(name, q)
	answer.Answer = records
	if !exists {
		answer.Rcode = dns.RcodeNameError
	}
	if len(records) == 0 {
		answer.Ns = []dns.RR{z.soa()}
	}
	proto := w.RemoteAddr().Network()
	if proto == "udp" {
		size := uint16(dns.MinMsgSize)
		if o := r.IsEdns0(); o != nil {
			size = max(size, o.UDPSize())
			answer.SetEdns0(1232, false)
		}
		answer.Truncate(int(size))
	}
	z.record(query{time.Now(), w.RemoteAddr().String(), proto, name, dns.TypeToString[q.Qtype],
		dns.RcodeToString[answer.Rcode]})
	if err := w.WriteMsg(answer); err != nil {
		log.Print(err)
	}
}

// lookup returns the requested records, and reports whether the name exists.
func (z *zoneHandler) lookup(name string, q dns.Question) (records []dns.RR, exists bool) {
	header := dns.RR_Header{Name: q.Name, Rrtype: q.Qtype, Class: dns.ClassINET, Ttl: 5}
	if label, in := strings.CutSuffix(name, z.zone); in {
		label = strings.TrimSuffix(label, ".")
		switch {
		case label == "big":
			if q.Qtype == dns.TypeTXT {
				for i := range 20 {
					records = append(records,
						&dns.TXT{Hdr: header, Txt: []string{fmt.Sprintf("%02d ", i) + strings.Repeat("x", 197)}})
				}
			}
			return records, true
		case label == "" && q.Qtype == dns.TypeSOA:
			return []dns.RR{z.soa()}, true
		case !slices.Contains([]string{"", "www", "ipv4", "ipv6"}, label):
			return nil, false
		}
		for _, a := range z.addresses {
			if (label == "ipv4" && !a.Is4()) || (label == "ipv6" && a.Is4()) {
				continue
			}
			switch {
			case q.Qtype == dns.TypeA && a.Is4():
				records = append(records, &dns.A{Hdr: header, A: net.IP(a.AsSlice())})
			case q.Qtype == dns.TypeAAAA && a.Is6():
				records = append(records, &dns.AAAA{Hdr: header, AAAA: net.IP(a.AsSlice())})
			}
		}
		return records, true
	}
	for _, a := range z.addresses {
		if reverse, err := dns.ReverseAddr(a.String()); err == nil && reverse == name {
			if q.Qtype == dns.TypePTR {
				records = append(records, &dns.PTR{Hdr: header, Ptr: "www." + z.zone})
			}
			return records, true
		}
	}
	return nil, false
}

func (z *zoneHandler) soa() dns.RR {
	return &dns.SOA{
		Hdr: dns.RR_Header{Name: z.zone, Rrtype: dns.TypeSOA, Class: dns.ClassINET, Ttl: 5},
		Ns:  "ns." + z.zone, Mbox: "root." + z.zone, Serial: 1, Refresh: 60, Retry: 60, Expire: 60, Minttl: 5,
	}
}

// record logs a query before its answer is sent, so that a client that has the answer finds the line.
func (z *zoneHandler) record(q query) {
	line, err := json.Marshal(q)
	if err != nil {
		log.Print(err)
		return
	}
	z.mu.Lock()
	defer z.mu.Unlock()
	if _, err := z.log.Write(append(line, '\n')); err != nil {
		log.Print(err)
	}
}
