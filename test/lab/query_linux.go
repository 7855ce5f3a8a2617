package lab

import (
	"bytes"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"time"
)

// Query is a DNS query that left the cluster and reached the router's DNS server.
type Query struct {
	Time  time.Time `json:"time"`
	From  string    `json:"from"`  // the client's address and port: of the laptop, or of a node for CoreDNS, containerd
	Proto string    `json:"proto"` // udp or tcp
	Name  string    `json:"name"`  // lower case, with the final dot
	Type  string    `json:"type"`  // A, AAAA, ...
	Rcode string    `json:"rcode"` // NOERROR, NXDOMAIN, ...
}

// Queries returns all queries so far, oldest first. The server adds a query before it answers.
func (l *Lab) Queries() ([]Query, error) {
	b, err := os.ReadFile(l.queryLog())
	if err != nil {
		return nil, err
	}
	var queries []Query
	for line := range bytes.Lines(b) {
		if !bytes.HasSuffix(line, []byte("\n")) {
			break // the last line is incomplete
		}
		var q Query
		if err := json.Unmarshal(line, &q); err != nil {
			return nil, fmt.Errorf("reading %s: %w", l.queryLog(), err)
		}
		queries = append(queries, q)
	}
	return queries, nil
}

func (l *Lab) queryLog() string { return filepath.Join(l.dir(), "log", "dns-queries.jsonl") }
