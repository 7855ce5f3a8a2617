package cluster

import (
	"crypto/tls"
	"crypto/x509"
	"encoding/base64"
	"encoding/json"
	"fmt"
	"net/http"
	"net/url"
	"os"
	"regexp"
	"strings"
	"time"

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

// String is "create pods/portforward in namespace web".
func (p Permission) String() string {
	if p.Namespace == "" {
		return fmt.Sprintf("%s %s in the whole cluster", p.Verb, p.Resource)
	}
	return fmt.Sprintf("%s %s in namespace %s", p.Verb, p.Resource, p.Namespace)
}

// resource is what kubectl create role wants: "deployments.apps", "pods/portforward". kubectl puts the group
// before a subresource.
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

// GrantCommands are the two kubectl commands with which an admin gives user the permission.
func (p Permission) GrantCommands(user string) string {
	name := "kubevpn-" + strings.NewReplacer("/", "-", ".", "-").Replace(p.Verb+"-"+p.Resource)
	subject := subject(user)
	if p.Namespace == "" {
		return fmt.Sprintf("kubectl create clusterrole %s --verb=%s --resource=%s\n"+
			"kubectl create clusterrolebinding %s --clusterrole=%s %s", name, p.Verb, p.resource(), name, name, subject)
	}
	return fmt.Sprintf("kubectl create role %s --namespace=%s --verb=%s --resource=%s\n"+
		"kubectl create rolebinding %s --namespace=%s --role=%s %s", name, p.Namespace, p.Verb, p.resource(), name, p.Namespace, name, subject)
}

// BindCommand is the kubectl command with which an admin gives user an existing Role. An empty user leaves a
// place for the name.
func BindCommand(namespace, role, user string) string {
	name := role
	if user != "" {
		last := user[strings.LastIndex(user, ":")+1:]
		name += "-" + strings.Map(func(r rune) rune {
			if r >= 'a' && r <= 'z' || r >= '0' && r <= '9' {
				return r
			}
			return '-'
		}, strings.ToLower(last))
	} else {
		user = "USER"
	}
	return fmt.Sprintf("kubectl create rolebinding %s --namespace=%s --role=%s %s", name, namespace, role, subject(user))
}

// subject is kubectl's flag for a user or a ServiceAccount.
func subject(user string) string {
	if account, ok := strings.CutPrefix(user, "system:serviceaccount:"); ok {
		return "--serviceaccount=" + account
	}
	return "--user=" + quote(user)
}

// quote makes a word safe for a shell.
func quote(s string) string {
	if strings.IndexFunc(s, func(r rune) bool {
		return !(r >= 'a' && r <= 'z' || r >= 'A' && r <= 'Z' || r >= '0' && r <= '9' || strings.ContainsRune("@%+=:,./-_", r))
	}) < 0 {
		return s
	}
	return "'" + strings.ReplaceAll(s, "'", `'\''`) + "'"
}

// rbacDenial is the text with which every authorizer of Kubernetes denies.
var rbacDenial = regexp.MustCompile(`User "([^"]*)" cannot (\S+) resource "([^"]+)" in API group "([^"]*)"(?: in the namespace "([^"]+)"| at the cluster scope)?`)

// ParseDenial reads who lacks which permission from an API server's message. ok is false when the message is
// a denial of another kind: an admission plugin's, or of escalation.
func ParseDenial(message string) (user string, p Permission, ok bool) {
	m := rbacDenial.FindStringSubmatch(message)
	if m == nil {
		return "", Permission{}, false
	}
	return m[1], Permission{Verb: m[2], Resource: m[3], Group: m[4], Namespace: m[5]}, true
}

// forbidden explains a 403: RBAC's, or an admission plugin's, which answers with the same code.
func forbidden(message string) *api.Error {
	if user, p, ok := ParseDenial(message); ok {
		return api.Errorf(api.ExitPermission, "%s may not %s", user, p).
			WithHint("Ask a cluster admin to run:\n%s", p.GrantCommands(user))
	}
	switch {
	case strings.Contains(message, "violates PodSecurity"):
		return api.Errorf(api.ExitInstall, "the namespace's pod security forbids it: %s", message).
			WithHint("Ask a cluster admin to install the traffic manager elsewhere: `kubevpn install`.")
	case strings.Contains(message, "exceeded quota"):
		return api.Errorf(api.ExitInstall, "the namespace's quota is used up: %s", message).
			WithHint("Free something there, or ask a cluster admin for a larger quota or for `kubevpn install`.")
	case strings.Contains(message, "denied the request"):
		return api.Errorf(api.ExitInstall, "the cluster's policy forbids it: %s", message).
			WithHint("Ask a cluster admin, who knows the policy that the message names.")
	case strings.Contains(message, "attempting to grant RBAC permissions not currently held"):
		return api.Errorf(api.ExitPermission, "only those who hold a permission may grant it: %s", message).
			WithHint("Ask a cluster admin to run `kubevpn install`.")
	}
	return api.Errorf(api.ExitPermission, "the API server forbids it: %s", message).
		WithHint("Ask a cluster admin to look at the message.")
}

// expiry says that the configuration's token or certificate has expired by now, or "".
func expiry(config *rest.Config, now time.Time) string {
	token := config.BearerToken
	if config.BearerTokenFile != "" {
		if data, err := os.ReadFile(config.BearerTokenFile); err == nil {
			token = strings.TrimSpace(string(data))
		}
	}
	if exp, ok := tokenExpiry(token); ok && exp.Before(now) {
		return fmt.Sprintf("the token expired %v ago", now.Sub(exp).Truncate(time.Second))
	}
	if cert, err := tls.X509KeyPair(config.CertData, config.KeyData); err == nil {
		if leaf, err := x509.ParseCertificate(cert.Certificate[0]); err == nil && leaf.NotAfter.Before(now) {
			return fmt.Sprintf("the client certificate expired on %s", stamp(leaf.NotAfter))
		}
	}
	return ""
}

// tokenExpiry reads a JWT's exp claim without trusting anything.
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

func requestTo(server *url.URL) *http.Request { return &http.Request{URL: server} }
