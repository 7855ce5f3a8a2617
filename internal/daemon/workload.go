package daemon

import "strings"

// sameWorkload reports whether a name that a user gives may mean the workload, without asking the cluster, which may be out of
// reach: kubectl's names of the built-in kinds, any case, plural or singular, with a group or not.
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
	// Another kind: what its plural is only the cluster knows, but most end in s.
	nameA, groupA, _ := strings.Cut(strings.ToLower(a), ".")
	nameB, groupB, _ := strings.Cut(strings.ToLower(b), ".")
	return strings.TrimSuffix(nameA, "s") == strings.TrimSuffix(nameB, "s") && (groupA == groupB || groupA == "" || groupB == "")
}

// builtinKind is the one name of a kind of Kubernetes' own that runs pods, or leads to them, else "".
func builtinKind(kind string) string {
	name, group, _ := strings.Cut(strings.ToLower(kind), ".")
	group = strings.TrimPrefix(group, "v1.") // deployments.v1.apps
	for _, k := range []struct {
		group string
		names []string // the first is the one
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
