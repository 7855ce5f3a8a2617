//go:build linux

package daemon

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"net/http/httptest"
	"testing"
	"time"

	"kubevpn/internal/api"
	"kubevpn/internal/testenv"
	"kubevpn/pkg/protocol/dns"
)

func TestQueryLogRemembersTheLastQueriesToClusters(t *testing.T) {
	l := new(queryLog)
	if !l.Wants(false) || l.Wants(true) {
		t.Error("it must want queries to clusters only")
	}
	for n := range maxQueries + 10 {
		l.Observe(dns.Query{Name: fmt.Sprint(n), Zone: "c1"})
	}
	l.Observe(dns.Query{Name: "private.example"}) // a follower left meanwhile
	recent, f, end := l.follow(false)
	if len(recent) != maxQueries || recent[0].Name != "10" || recent[maxQueries-1].Name != fmt.Sprint(maxQueries+9) {
		t.Errorf("%d queries, from %q", len(recent), recent[0].Name)
	}
	l.Observe(dns.Query{Name: "private.example"})
	l.Observe(dns.Query{Name: "web", Zone: "c1"})
	if q := <-f.queue; q.Name != "web" || q.Connection != "c1" {
		t.Errorf("a follower of clusters got %+v", q)
	}
	end()
	l.clear()
	recent, all, end := l.follow(true)
	if len(recent) != 0 || !l.Wants(true) {
		t.Errorf("after clear: %d, wants outside: %v", len(recent), l.Wants(true))
	}
	l.Observe(dns.Query{Name: "private.example"})
	if q := <-all.queue; q.Name != "private.example" {
		t.Errorf("%+v", q)
	}
	end()
	if recent, _, end := l.follow(false); len(recent) != 0 || l.Wants(true) {
		t.Errorf("after --all: %+v, wants outside: %v", recent, l.Wants(true))
	} else {
		end()
	}
}

func TestSlowFollowerLearnsHowManyQueriesItMissed(t *testing.T) {
	l := new(queryLog)
	_, f, end := l.follow(false)
	defer end()
	for range maxQueriesQueue + 5 { // Observe never blocks
		l.Observe(dns.Query{Zone: "c1"})
	}
	<-f.queue
	l.Observe(dns.Query{Name: "last", Zone: "c1"})
	for range maxQueriesQueue - 1 {
		<-f.queue
	}
	if q := <-f.queue; q.Name != "last" || q.Missed != 5 {
		t.Errorf("%+v", q)
	}
}

func TestQueriesAreServedUntilTheClientHasGone(t *testing.T) {
	d := newDaemon(Config{}, nil, Owner{}, discard())
	log := &d.connections.queries
	log.Observe(dns.Query{Name: "web", Zone: "c1"})
	server := httptest.NewServer(d.handler())
	t.Cleanup(server.Close)
	read := func(query string) (*bufio.Scanner, context.CancelFunc) {
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		req, err := http.NewRequestWithContext(ctx, http.MethodGet, server.URL+api.PathDNS+query, nil)
		if err != nil {
			t.Fatal(err)
		}
		resp, err := server.Client().Do(req)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { resp.Body.Close() })
		return bufio.NewScanner(resp.Body), cancel
	}
	next := func(lines *bufio.Scanner) (q api.DNSQuery) {
		if !lines.Scan() {
			t.Fatal(lines.Err())
		}
		if err := json.Unmarshal(lines.Bytes(), &q); err != nil {
			t.Fatal(err)
		}
		return q
	}
	lines, cancel := read("?" + api.ParamAll + "=true") // all without follow would remember what is private
	if q := next(lines); q.Name != "web" || lines.Scan() || log.Wants(true) {
		t.Errorf("%+v, wants outside: %v", q, log.Wants(true))
	}
	cancel()
	lines, cancel = read("?" + api.ParamFollow + "=true&" + api.ParamAll + "=true")
	next(lines)
	log.Observe(dns.Query{Name: "private.example"})
	if q := next(lines); q.Name != "private.example" {
		t.Errorf("%+v", q)
	}
	cancel()
	testenv.Eventually(t, time.Minute, func() error {
		if log.Wants(true) {
			return errors.New("the follower has not ended")
		}
		return nil
	})
}
