//go:build e2e && linux

package e2e

import (
	"strings"
	"testing"
	"time"

	"kubevpn/internal/api"
	"kubevpn/test/lab"
)

// flagsSuite connects with the identities that the flags of kubectl give, and with flags that a connection does not
// honour.
func flagsSuite(t *testing.T, w *world) {
	l := w.newUser(t, lab.Admin)
	before := l.snapshot(t)
	t.Run("impersonated_user_has_its_own_rights", func(t *testing.T) {
		failure{code: api.ExitPermission, message: `nobody-in-particular`, within: 30 * time.Second}.
			check(t, l.run(t, "kubevpn", "reset", "deployment/web", "--as", "nobody-in-particular"))
		dev := w.newUser(t, lab.Developer)
		failure{code: api.ExitPermission, message: "dev may not impersonate users", hint: "kubectl create clusterrole", within: 30 * time.Second}.
			check(t, dev.run(t, "kubevpn", "connect", "--as", "admin"))
		l.sameAs(t, before)
	})
	t.Run("connects_as_an_impersonated_user", func(t *testing.T) {
		l.connect(t, "--as", "somebody", "--as-group", "system:masters")
		l.reachesWeb(t, w)
		c := l.connection(t)
		failure{code: api.ExitOverlap, message: "already connected as another user", hint: "kubevpn disconnect " + c.ID, within: 30 * time.Second}.
			check(t, l.run(t, "kubevpn", "connect"))
		l.must(t, "kubevpn", "connect", "--as", "somebody", "--as-group", "system:masters")
		if now := l.connection(t); now.ID != c.ID || now.ClusterID == c.ID {
			t.Errorf("%+v", now)
		}
		l.must(t, "kubevpn", "disconnect", "--all")
		l.sameAs(t, before)
	})
	t.Run("flags_that_the_connection_does_not_honour", func(t *testing.T) {
		l.connect(t)
		other := map[string]string{api.NetstackGVisor: api.NetstackSystem, api.NetstackSystem: api.NetstackGVisor}[l.connection(t).Netstack]
		failure{code: api.ExitUsage, message: "--netstack " + other + ", and it has ", hint: "--reconnect", within: 30 * time.Second}.
			check(t, l.run(t, "kubevpn", "connect", "--netstack", other))
		failure{code: api.ExitUsage, message: "--scheduler sh, and it has rr", hint: "kubevpn connect --reconnect", within: 30 * time.Second}.
			check(t, l.run(t, "kubevpn", "proxy", "deployment/web", "--scheduler", "sh"))
		l.reachesWeb(t, w)
		l.connect(t, "--scheduler", "sh", "--reconnect")
		l.must(t, "kubevpn", "connect", "--scheduler", "sh")
		l.reachesWeb(t, w)
		l.must(t, "kubevpn", "disconnect", "--all")
		l.sameAs(t, before)
	})
	t.Run("connects_with_a_token_and_stores_it_nowhere", func(t *testing.T) {
		w.kubectl(t, "create", "serviceaccount", "boss")
		w.kubectl(t, "create", "clusterrolebinding", "boss", "--clusterrole=cluster-admin", "--serviceaccount=default:boss")
		defer w.kubectl(t, "delete", "serviceaccount/boss", "clusterrolebinding/boss")
		token := w.kubectl(t, "create", "token", "boss")
		l.connect(t, "--token", token)
		l.reachesWeb(t, w)
		if r := l.run(t, "grep", "-rlF", token, l.home); r.code != 1 {
			t.Errorf("files with the token: %v", strings.ReplaceAll(r.String(), token, "TOKEN"))
		}
		l.must(t, "kubevpn", "disconnect", "--all")
		l.sameAs(t, before)
	})
}
