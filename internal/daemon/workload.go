package daemon

import "strings"

// sameWorkload reports whether a name that a user typed may mean the workload. It accepts the names of kinds that
// kubectl accepts: any case, singular, plural or short, with or without a group. It does not ask the cluster, which may
// be unreachable.
func sameWorkload(asked, workload string) bool {
	kindA, nameA, okA := strings.Cut(asked, "/")
	kindB, nameB, okB := strings.Cut(workload, "/")
	return okA && okB && nameA == nameB && sameKind(kindA, kindB)
}

func sameKind(a, b string) bool {
	builtinA, builtinB := builtinKind(a), builtinKind(b)
	if builtinA != "" || builtinB != "" {
		return builtinA == builtinB
	}
	// Only the cluster knows the plural of other kinds, but most end in s.
	nameA, groupA, _ := strings.Cut(strings.ToLower(a), ".")
	nameB, groupB, _ := strings.Cut(strings.ToLower(b), ".")
	return strings.TrimSuffix(nameA, "s") == strings.TrimSuffix(nameB, "s") &&
		(groupA == groupB || groupA == "" || groupB == "")
}

// builtinKind returns the canonical name of a built-in kind that runs pods or selects them, else "".
func builtinKind(kind string) string {
	name, group, _ := strings.Cut(strings.ToLower(kind), ".")
	group = strings.TrimPrefix(group, "v1.") // deployments.v1.apps
	for _, k := range []struct {
		group string
		names []string // the first is canonical
	}{
		{"apps", []string{"deployment", "deployments", "deploy"}},
		{"apps", []string{"statefulset", "statefulsets", "sts"}},
		{"apps", []string{"daemonset", "daemonsets", "ds"}},
		{"apps", []string{"replicaset", "replicasets", "rs"}},
		{"", []string{"replicationcontroller", "replicationcontrollers", "rc"}},
		{"batch", []string{"cronjob", "cronjobs", "cj"}},
		{"", []string{"pod", "pods", "po"}},
		{"", []string{"service", "services", "svc"}},
	} {
		for _, n := range k.names {
			if n == name && (group == "" || group == k.group) {
				return k.names[0]
			}
		}
	}
	return ""
}
