package api

import (
	"net/netip"
	"time"
)

// DNSQueryList is the output of `kubevpn dns`.
type DNSQueryList struct {
	TypeMeta
	Items []DNSQuery `json:"items"` // the oldest first
}

// DNSQuery is a query that the resolver of this machine has answered, and a line of PathDNS.
type DNSQuery struct {
	TypeMeta
	Time    time.Time `json:"time"` // when the query came
	Name    string    `json:"name"` // in lower case, without a final dot
	Type    string    `json:"type"`
	Network string    `json:"network"` // "udp" or "tcp"
	// From is who answered: "cluster" (cluster DNS), "cache" (its earlier answer), "stale" (the same, after its TTL),
	// "nameserver" (one that this machine has without kubevpn) or "nobody".
	From       string         `json:"from"`
	Server     netip.AddrPort `json:"server,omitzero"`      // that answered; absent if unknown, as for the cache
	Connection string         `json:"connection,omitempty"` // ID of the connection whose cluster was asked
	Domain     string         `json:"domain,omitempty"`     // of the cluster, or an extra domain with the name
	Rcode      string         `json:"rcode"`                // "NOERROR", "NXDOMAIN", "SERVFAIL"
	Answers    []string       `json:"answers,omitempty"`    // the first records: "A 10.96.0.80"
	Records    int            `json:"records"`              // in the answer
	Seconds    float64        `json:"seconds"`
	// Missed is the number of queries before this one that the reader was too slow for.
	Missed int `json:"missed,omitempty"`
}
