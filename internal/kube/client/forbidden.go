package client

import (
	"cmp"
	"encoding/base64"
	"encoding/json"
	"fmt"
	"os"
	"regexp"
	"slices"
	"strings"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/util/duration"
	"k8s.io/client-go/rest"

	"kubevpn/internal/api"
)

// Permission is a right that RBAC can grant.
type Permission struct {
	Verb      string
	Group     string // API group; "" is core
	Resource  string // with the subresource: "pods/portforward"
	Namespace string // empty: cluster-wide
}

// String returns for example "create pods/portforward in namespace web".
func (p Permission) String() string {
	if p.Namespace == "" {
		return fmt.Sprintf("%s %s in the whole cluster", p.Verb, p.Resource)
	}
	return fmt.Sprintf("%s %s in namespace %s", p.Verb, p.Resource, p.Namespace)
}

// resource returns the argument of `kubectl create role`: "deployments.apps", "pods/portforward". The group comes
// before the subresource.
func (p Permission) resource() string {
	if p.Group == "" {
		return p.Resource
	}
	base, sub, found := strings.Cut(p.Resource, "/")
	base += "." + p.Group
	if found {
		base += "/" + sub
	}
	return base
}

// GrantCommands returns the two kubectl commands with which an admin grants the permission to the user. It quotes all
// values, because they may come from the API server. If user is empty, the commands contain a placeholder.
func (p Permission) GrantCommands(user string) string {
	user = cmp.Or(user, "USER")
	name := "kubevpn-" + label(p.Verb+"-"+p.Resource)
	rule := "--verb=" + api.ShellQuote(p.Verb) + " --resource=" + api.ShellQuote(p.resource())
	if p.Namespace == "" {
		return fmt.Sprintf("kubectl create clusterrole %s %s\n"+
			"kubectl create clusterrolebinding %s --clusterrole=%s %s", name, rule, name, name, subject(user))
	}
	ns := api.ShellQuote(p.Namespace)
	return fmt.Sprintf("kubectl create role %s --namespace=%s %s\n"+
		"kubectl create rolebinding %s --namespace=%s --role=%s %s", name, ns, rule, name, ns, name, subject(user))
}

// label converts s to a part of an object's name.
func label(s string) string {
	return strings.Map(func(r rune) rune {
		if r >= 'a' && r <= 'z' || r >= '0' && r <= '9' {
			return r
		}
		return '-'
	}, strings.ToLower(s))
}

// BindCommand returns the kubectl command with which an admin binds an existing Role to the user. If user is empty, the
// command contains a placeholder.
func BindCommand(namespace, role, user string) string {
	name := role
	if user != "" {
		name += "-" + label(user[strings.LastIndex(user, ":")+1:])
	} else {
		user = "USER"
	}
	return fmt.Sprintf("kubectl create rolebinding %s --namespace=%s --role=%s %s", name, api.ShellQuote(namespace),
		role, subject(user))
}

// subject returns kubectl's flag for a user or a ServiceAccount.
func subject(user string) string {
	if account, ok := strings.CutPrefix(user, "system:serviceaccount:"); ok {
		return "--serviceaccount=" + api.ShellQuote(account)
	}
	return "--user=" + api.ShellQuote(user)
}

// rbacDenial matches the message of every authorizer of Kubernetes.
var rbacDenial = regexp.MustCompile(`User "([^"]*)" cannot (\S+) resource "([^"]+)" in API group "([^"]*)"` +
	`(?: in the namespace "([^"]+)"| at the cluster scope)?`)

// Denial returns the user and the missing permission from the error of a request. ok is false for other errors, for
// example the denial of an admission plugin.
func Denial(err error) (user string, p Permission, ok bool) {
	if !apierrors.IsForbidden(err) {
		return "", Permission{}, false
	}
	return parseDenial(err.Error())
}

// parseDenial is Denial for an API server's message.
func parseDenial(message string) (user string, p Permission, ok bool) {
	m := rbacDenial.FindStringSubmatch(message)
	if m == nil {
		return "", Permission{}, false
	}
	if strings.HasPrefix(m[2], "impersonate-on:") { // constrained impersonation (KEP-5284), after the general right
		return m[1], Permission{Verb: "impersonate", Resource: "users"}, true
	}
	return m[1], Permission{Verb: m[2], Resource: m[3], Group: m[4], Namespace: m[5]}, true
}

// PodSecurityLabel is the label of a namespace with the Pod Security level that it enforces.
const PodSecurityLabel = "pod-security.kubernetes.io/enforce"

// PodSecurityViolation returns the part of an API server's message that says which rules of the namespace's Pod
// Security level a pod violates: `violates PodSecurity "restricted:latest": ...`. It returns "" for another message.
func PodSecurityViolation(message string) string {
	const begin = "violates PodSecurity"
	_, rules, found := strings.Cut(message, begin)
	if !found {
		return ""
	}
	return begin + rules
}

// PolicyHint says how to comply with a rule of the namespace, such as a quota or an admission policy.
const PolicyHint = "If the rule demands labels, annotations, requests or limits, set them: --labels team=shop, " +
	"--annotations, --resources limits.cpu=500m, or in the configuration file. --image names another registry."

// isPolicy reports whether an admission plugin or a policy rejected a request.
func isPolicy(message string) bool {
	return slices.ContainsFunc([]string{"denied the request", "denied request: ", "failed quota", "per Container is",
		"per Pod is", "limit to request ratio"}, func(part string) bool { return strings.Contains(message, part) })
}

// forbidden explains a 403 of RBAC or of an admission plugin.
func forbidden(message string) *api.Error {
	if user, p, ok := parseDenial(message); ok {
		return api.Errorf(api.ExitPermission, "%s may not %s", user, p).
			WithHint("Ask a cluster admin to run:\n%s", p.GrantCommands(user))
	}
	switch {
	case PodSecurityViolation(message) != "":
		return api.Errorf(api.ExitInstall, "the namespace's pod security forbids it: %s", message).
			WithHint("Ask a cluster admin to install the traffic manager elsewhere: `kubevpn install`.")
	case strings.Contains(message, "exceeded quota"):
		return api.Errorf(api.ExitInstall, "the namespace's quota is used up: %s", message).
			WithHint("Free resources there, or ask a cluster admin for a larger quota or for `kubevpn install`.")
	case isPolicy(message):
		return api.Errorf(api.ExitInstall, "the cluster's policy forbids it: %s", message).
			WithHint("Ask a cluster admin about the policy that the message names. %s", PolicyHint)
	case strings.Contains(message, "attempting to grant RBAC permissions not currently held"):
		return api.Errorf(api.ExitPermission, "you can grant only permissions that you hold: %s", message).
			WithHint("Ask a cluster admin to run `kubevpn install`.")
	}
	return api.Errorf(api.ExitPermission, "the API server forbids it: %s", message).
		WithHint("Ask a cluster admin to look at the message.")
}

// expiry describes when the configuration's token or certificate expired. It returns "" if they are valid.
func expiry(config *rest.Config, now time.Time) string {
	if exp, ok := tokenExpiry(tokenOf(config)); ok && exp.Before(now) {
		return fmt.Sprintf("the token expired %s ago", duration.HumanDuration(now.Sub(exp)))
	}
	if leaf := certificateOf(config.CertData, config.KeyData); leaf != nil && leaf.NotAfter.Before(now) {
		return fmt.Sprintf("the client certificate expired on %s", stamp(leaf.NotAfter))
	}
	return ""
}

// tokenOf returns the configuration's token, or "".
func tokenOf(config *rest.Config) string {
	if config.BearerTokenFile != "" {
		if data, err := os.ReadFile(config.BearerTokenFile); err == nil {
			return strings.TrimSpace(string(data))
		}
	}
	return config.BearerToken
}

// tokenExpiry returns the exp claim of a JWT, without verifying the token.
func tokenExpiry(token string) (time.Time, bool) {
	parts := strings.Split(token, ".")
	if len(parts) != 3 {
		return time.Time{}, false
	}
	payload, err := base64.RawURLEncoding.DecodeString(parts[1])
	if err != nil {
		return time.Time{}, false
	}
	var claims struct {
		Exp int64 `json:"exp"`
	}
	if json.Unmarshal(payload, &claims) != nil || claims.Exp == 0 {
		return time.Time{}, false
	}
	return time.Unix(claims.Exp, 0), true
}
