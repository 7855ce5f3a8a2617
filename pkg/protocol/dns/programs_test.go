package dns

import (
	"slices"
	"testing"

	"github.com/miekg/dns"
)

func TestProgramsGetNoNamespaceAndTheirOwnCluster(t *testing.T) {
	index := func(services map[string][]string) *Index {
		i := new(Index)
		i.Apply(true, services, nil)
		return i
	}
	var list zones
	for name, services := range map[string]map[string][]string{"a": {"default": {"db"}, "billing": {"db"}}, "b": {"billing": {"db", "web"}}} {
		z, err := newZone(Zone{Name: name, Domain: "cluster.local", Services: index(services), Cluster: System{}})
		if err != nil {
			t.Fatal(err)
		}
		list = append(list, z)
	}
	slices.SortFunc(list, func(x, y *zone) int { return int(x.name[0]) - int(y.name[0]) })
	for _, of := range list {
		for name, want := range map[string]string{"db": "", "db.billing": of.name, "db.billing.svc": of.name, "db.billing.svc.cluster.local": of.name, "www.example.com": ""} {
			got := ""
			for _, a := range list.programs(of).route(question{key: name, qtype: dns.TypeA, qclass: dns.ClassINET}).asks {
				got += a.zone.name
			}
			if got != want {
				t.Errorf("%s of %s is asked of %q, want %q", name, of.name, got, want)
			}
		}
	}
	blind, err := newZone(Zone{Domain: "cluster.local", Cluster: System{}})
	if err != nil {
		t.Fatal(err)
	}
	if rt := (zones{blind}).programs(blind).route(question{key: "db", qtype: dns.TypeA, qclass: dns.ClassINET}); len(rt.asks) > 0 {
		t.Errorf("without an index, db is asked of %v", rt.asks)
	}
}
