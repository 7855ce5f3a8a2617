package netfilter

import (
	"errors"

	nl "github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// deleteTries is how often DeleteFlows repeats a listing that a change of the table interrupted.
const deleteTries = 5

// DeleteFlows deletes the conntrack entries of this network namespace that filter selects, and returns their number.
func DeleteFlows(filter nl.CustomConntrackFilter) (n int, err error) {
	var errs []error
	for _, family := range []nl.InetFamily{unix.AF_INET, unix.AF_INET6} {
		var err error = nl.ErrDumpInterrupted
		for tries := 0; tries < deleteTries && errors.Is(err, nl.ErrDumpInterrupted); tries++ {
			var flows uint
			flows, err = nl.ConntrackDeleteFilters(nl.ConntrackTable, family, filter)
			n += int(flows)
		}
		errs = append(errs, err)
	}
	return n, errors.Join(errs...)
}
