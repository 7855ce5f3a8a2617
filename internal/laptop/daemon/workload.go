package daemon

import (
	"strings"

	"kubevpn/internal/kube/workloads"
)

// sameWorkload reports whether a name that a user typed may mean the workload. It accepts the names of kinds that
// kubectl accepts: any case, singular, plural or short, with or without a group. It does not ask the cluster, which may
// be unreachable.
func sameWorkload(asked, workload string) bool {
	kindA, nameA, okA := strings.Cut(asked, "/")
	kindB, nameB, okB := strings.Cut(workload, "/")
	return okA && okB && nameA == nameB && sameKind(kindA, kindB)
}

func sameKind(a, b string) bool {
	builtinA, isA := workloads.BuiltinKind(a)
	builtinB, isB := workloads.BuiltinKind(b)
	if isA || isB {
		return builtinA == builtinB
	}
	// Only the cluster knows the plural of other kinds, but most end in s.
	nameA, groupA, _ := strings.Cut(strings.ToLower(a), ".")
	nameB, groupB, _ := strings.Cut(strings.ToLower(b), ".")
	return strings.TrimSuffix(nameA, "s") == strings.TrimSuffix(nameB, "s") &&
		(groupA == groupB || groupA == "" || groupB == "")
}
