package config

import (
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"

	"k8s.io/apimachinery/pkg/util/validation"
)

// MatchRule says in which namespaces an intercept must have a match: headers, a path or methods. The zero value
// requires none.
type MatchRule struct {
	All        bool            // in the namespaces that Namespaces does not name
	Namespaces map[string]bool // the others
}

// Requires reports whether an intercept in the namespace must have a match.
func (r MatchRule) Requires(namespace string) bool {
	if required, named := r.Namespaces[namespace]; named {
		return required
	}
	return r.All
}

// parseMatchRule parses values: true or false for all namespaces, NAMESPACE, or NAMESPACE=true or NAMESPACE=false.
func parseMatchRule(values []string) (MatchRule, error) {
	var r MatchRule
	for _, v := range values {
		namespace, required, given := strings.Cut(v, "=")
		if !given && (v == "true" || v == "false") {
			r.All = v == "true"
			continue
		}
		if len(validation.IsDNS1123Label(namespace)) > 0 || given && required != "true" && required != "false" {
			return r, fmt.Errorf("%q is invalid: must be true, false, NAMESPACE or NAMESPACE=false", v)
		}
		if r.Namespaces == nil {
			r.Namespaces = map[string]bool{}
		}
		r.Namespaces[namespace] = required != "false"
	}
	return r, nil
}

// String returns the values that parseMatchRule parses, separated by commas.
func (r MatchRule) String() string {
	out := []string{strconv.FormatBool(r.All)}
	for _, namespace := range slices.Sorted(maps.Keys(r.Namespaces)) {
		out = append(out, namespace+"="+strconv.FormatBool(r.Namespaces[namespace]))
	}
	return strings.Join(out, ",")
}
