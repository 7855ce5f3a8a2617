package ownertable

import (
	"errors"
	"net/netip"
	"os"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/nftables"
	"github.com/google/nftables/expr"

	"kubevpn/internal/testenv"
)

func open(t *testing.T, name string) *Table {
	t.Helper()
	table, err := Open(name)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { table.Close() })
	return table
}

func ruleset(t *testing.T) string {
	t.Helper()
	var lines []string
	for line := range strings.Lines(testenv.Run(t, "nft list ruleset")) {
		line, _, _ = strings.Cut(line, " # progname") // which nft adds, where it knows the owner
		lines = append(lines, strings.TrimRight(line, "\n"))
	}
	return strings.Join(lines, "\n")
}

func TestTable(t *testing.T) {
	if !testenv.InNamespace(t, "nft") {
		return
	}
	table := open(t, "test-1")
	c := table.Chain("c", nftables.ChainTypeFilter, nftables.ChainHookOutput, *nftables.ChainPriorityFilter)
	table.Rule(c, Join(IsNot(expr.MetaKeyOIFNAME, Link("lo")), To(netip.MustParseAddr("192.0.2.1")), Verdict(expr.VerdictDrop))...)
	if got := ruleset(t); strings.Contains(got, "chain c") {
		t.Errorf("before Flush there is:\n%s", got)
	}
	if err := table.Flush(); err != nil {
		t.Fatal(err)
	}
	mark, err := expr.Marshal(byte(nftables.TableFamilyINet), &expr.Meta{Key: expr.MetaKeyL4PROTO, Register: 1})
	if err != nil {
		t.Fatal(err)
	}
	is, err := expr.Marshal(byte(nftables.TableFamilyINet), Equal([]byte{6}))
	if err != nil {
		t.Fatal(err)
	}
	if err := table.MarshalledRule(c, mark, is); err != nil {
		t.Fatal(err)
	}
	want := `table inet test-1 {
	flags owner

	chain c {
		type filter hook output priority filter; policy accept;
		oifname != "lo" ip daddr 192.0.2.1 drop
		meta l4proto tcp
	}
}`
	if diff := cmp.Diff(want, ruleset(t)); diff != "" {
		t.Errorf("-want +got\n%s", diff)
	}
	// Nobody else removes it, and none of it.
	testenv.Run(t, "nft flush ruleset")
	if diff := cmp.Diff(want, ruleset(t)); diff != "" {
		t.Errorf("after a flush of somebody else's: -want +got\n%s", diff)
	}
	if err := table.Close(); err != nil {
		t.Fatal(err)
	}
	if got := ruleset(t); got != "" {
		t.Errorf("after Close there is:\n%s", got)
	}
}

func TestTwoTables(t *testing.T) {
	if !testenv.InNamespace(t, "nft") {
		return
	}
	first := open(t, "test-1")
	if second, err := Open("test-1"); !errors.Is(err, os.ErrPermission) { // it is the first one's
		t.Errorf("the same name again: %v, %v", second, err)
	}
	second := open(t, "test-2")
	open(t, "other-3")
	open(t, "test-")
	others, err := first.Others("test-")
	if err != nil || !slices.Equal(others, []string{"test-2"}) {
		t.Errorf("beside the first there are %q, %v", others, err)
	}
	// A change that fails changes nothing.
	c := second.Chain("c", nftables.ChainTypeFilter, nftables.ChainHookOutput, *nftables.ChainPriorityFilter)
	second.Rule(&nftables.Chain{Name: "missing"}, Verdict(expr.VerdictDrop)...)
	second.Rule(c, Verdict(expr.VerdictDrop)...)
	if err := second.Flush(); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("a rule without its chain: %v", err)
	}
	if got := ruleset(t); strings.Contains(got, "chain") {
		t.Errorf("half of it is there:\n%s", got)
	}
	// Another may be changed afterwards, and ends by itself.
	second.Chain("c", nftables.ChainTypeFilter, nftables.ChainHookOutput, *nftables.ChainPriorityFilter)
	if err := second.Flush(); err != nil {
		t.Fatal(err)
	}
	if err := first.Close(); err != nil {
		t.Fatal(err)
	}
	if got := ruleset(t); strings.Contains(got, "table inet test-1 ") || !strings.Contains(got, "chain c") {
		t.Errorf("after the first one's Close there is:\n%s", got)
	}
}
