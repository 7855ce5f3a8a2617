package netfilter

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
	"golang.org/x/sys/unix"

	"kubevpn/internal/testenv"
)

func openTable(t *testing.T, name string) *Table {
	t.Helper()
	table, err := OpenTable(name)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { table.Close() })
	return table
}

func TestTableAppliesRulesAtFlush(t *testing.T) {
	if !testenv.InNamespace(t, "nft") {
		return
	}
	table := openTable(t, "test-1")
	c := table.Chain("c", nftables.ChainTypeFilter, nftables.ChainHookOutput, *nftables.ChainPriorityFilter)
	table.Rule(c, MetaIsNot(expr.MetaKeyOIFNAME, InterfaceName("lo")), DestinationIs(netip.MustParseAddr("192.0.2.1")), Verdict(expr.VerdictDrop))
	if got := testenv.Ruleset(t); strings.Contains(got, "chain c") {
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
	if err := table.MarshaledRule(c, mark, is); err != nil {
		t.Fatal(err)
	}
	want := `table inet test-1 {
	flags owner

	chain c {
		type filter hook output priority filter; policy accept;
		oifname != "lo" ip daddr 192.0.2.1 drop
		meta l4proto tcp
	}
}
`
	if diff := cmp.Diff(want, testenv.Ruleset(t)); diff != "" {
		t.Errorf("-want +got\n%s", diff)
	}
	// No other process can remove the table, or a part of it.
	testenv.Run(t, "nft flush ruleset")
	if diff := cmp.Diff(want, testenv.Ruleset(t)); diff != "" {
		t.Errorf("after the flush of another process: -want +got\n%s", diff)
	}
	if err := table.Close(); err != nil {
		t.Fatal(err)
	}
	if got := testenv.Ruleset(t); got != "" {
		t.Errorf("after Close there is:\n%s", got)
	}
}

func TestTablesHaveOneOwner(t *testing.T) {
	if !testenv.InNamespace(t, "nft") {
		return
	}
	first := openTable(t, "test-1")
	if second, err := OpenTable("test-1"); !errors.Is(err, os.ErrPermission) { // first owns it
		t.Errorf("the same name again: %v, %v", second, err)
	}
	second := openTable(t, "test-2")
	openTable(t, "other-3")
	openTable(t, "test-")
	others, err := first.Others("test-")
	if err != nil || !slices.Equal(others, []string{"test-2"}) {
		t.Errorf("beside the first there are %q, %v", others, err)
	}
	// A change that fails changes nothing.
	c := second.Chain("c", nftables.ChainTypeFilter, nftables.ChainHookOutput, *nftables.ChainPriorityFilter)
	second.Rule(&nftables.Chain{Name: "missing"}, Verdict(expr.VerdictDrop))
	second.Rule(c, Verdict(expr.VerdictDrop))
	if err := second.Flush(); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("a rule without its chain: %v", err)
	}
	if got := testenv.Ruleset(t); strings.Contains(got, "chain") {
		t.Errorf("a part of the change was applied:\n%s", got)
	}
	// The table can change afterwards, and outlives the other.
	second.Chain("c", nftables.ChainTypeFilter, nftables.ChainHookOutput, *nftables.ChainPriorityFilter)
	if err := second.Flush(); err != nil {
		t.Fatal(err)
	}
	if err := first.Close(); err != nil {
		t.Fatal(err)
	}
	if got := testenv.Ruleset(t); strings.Contains(got, "table inet test-1 ") || !strings.Contains(got, "chain c") {
		t.Errorf("after the first one's Close there is:\n%s", got)
	}
}

func TestReasonNamesTheKernel(t *testing.T) {
	release := strings.TrimSpace(testenv.Run(t, "uname -r"))
	for _, err := range []error{unix.EINVAL, unix.EOPNOTSUPP} { // before 5.12; without nf_tables
		want := "a table with an owner needs Linux 5.12 with nf_tables, and this is " + release
		if got := new(Table).reason(err); got != want {
			t.Errorf("%v: %q, want %q", err, got, want)
		}
	}
}
