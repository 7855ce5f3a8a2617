//go:build e2e && linux

package e2e

import (
	"encoding/json"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"kubevpn/internal/api"
	"kubevpn/internal/testenv"
	"kubevpn/test/lab"
)

// whyServices are Services of the shop's namespace that each have one cause.
const whyServices = `
apiVersion: v1
kind: Service
metadata: {name: nobody, namespace: why-shop}
spec: {selector: {app: nobody}, ports: [{port: 80}]}
---
apiVersion: v1
kind: Service
metadata: {name: misnamed, namespace: why-shop}
spec: {selector: {app: shop}, ports: [{port: 80, targetPort: htpp}]}
---
apiVersion: v1
kind: Service
metadata: {name: unready, namespace: why-shop}
spec: {selector: {app: unready}, ports: [{port: 80, targetPort: 8080}]}
---
apiVersion: v1
kind: Pod
metadata: {name: unready, namespace: why-shop, labels: {app: unready}}
spec:
  terminationGracePeriodSeconds: 1
  containers:
  - name: app
    image: APP_IMAGE
    imagePullPolicy: Never
    ports: [{containerPort: 8080, name: http}]
    readinessProbe: {httpGet: {path: /, port: 1}, periodSeconds: 1}
`

// whyFront has a gateway in front of the shop, pods that the shop's Service selects but its Deployment does not own,
// and a workload with the proxy of a service mesh.
const whyFront = `
apiVersion: v1
kind: Service
metadata: {name: front, namespace: why-shop}
spec: {selector: {app: front}, ports: [{port: 80, targetPort: 8080}]}
---
apiVersion: v1
kind: Pod
metadata: {name: front, namespace: why-shop, labels: {app: front}}
spec:
  terminationGracePeriodSeconds: 1
  containers:
  - {name: app, image: APP_IMAGE, imagePullPolicy: Never, readinessProbe: {httpGet: {path: /, port: 8080}, periodSeconds: 1}}
---
apiVersion: apps/v1
kind: Deployment
metadata: {name: twin, namespace: why-shop}
spec:
  replicas: 0
  selector: {matchLabels: {twin: "yes"}}
  template:
    metadata: {labels: {app: shop, twin: "yes"}}
    spec:
      terminationGracePeriodSeconds: 1
      containers:
      - {name: app, image: APP_IMAGE, imagePullPolicy: Never, ports: [{containerPort: 8080, name: http}]}
---
apiVersion: v1
kind: Service
metadata: {name: meshed, namespace: why-shop}
spec: {selector: {app: meshed}, ports: [{port: 80, targetPort: 8080}]}
---
apiVersion: v1
kind: Pod
metadata: {name: meshed, namespace: why-shop, labels: {app: meshed}}
spec:
  terminationGracePeriodSeconds: 1
  containers:
  - {name: app, image: APP_IMAGE, imagePullPolicy: Never, ports: [{containerPort: 8080}]}
  - {name: istio-proxy, image: APP_IMAGE, imagePullPolicy: Never, args: [-mesh]}
`

// whyFrom is a namespace with a pod that sends requests, and a user who may read it. The pod has the name of a mesh's
// container.
const whyFrom = `
apiVersion: v1
kind: Namespace
metadata: {name: why-from, labels: {pod-security.kubernetes.io/enforce: restricted}}
---
apiVersion: v1
kind: Pod
metadata: {name: source, namespace: why-from, labels: {app: source}}
spec:
  terminationGracePeriodSeconds: 1
  securityContext: {runAsNonRoot: true, runAsUser: 1337, seccompProfile: {type: RuntimeDefault}}
  containers:
  - name: istio-proxy
    image: APP_IMAGE
    imagePullPolicy: Never
    securityContext: {allowPrivilegeEscalation: false, capabilities: {drop: [ALL]}}
    readinessProbe: {httpGet: {path: /, port: 8080}, periodSeconds: 1}
---
apiVersion: rbac.authorization.k8s.io/v1
kind: Role
metadata: {name: why-visitor, namespace: why-from}
rules: [{apiGroups: [""], resources: [pods, services], verbs: [get, list, watch]}]
---
apiVersion: rbac.authorization.k8s.io/v1
kind: RoleBinding
metadata: {name: why-visitor, namespace: why-from}
roleRef: {apiGroup: rbac.authorization.k8s.io, kind: Role, name: why-visitor}
subjects: [{kind: User, name: why-visitor, apiGroup: rbac.authorization.k8s.io}]
---
apiVersion: rbac.authorization.k8s.io/v1
kind: RoleBinding
metadata: {name: why-visitor, namespace: kubevpn}
roleRef: {apiGroup: rbac.authorization.k8s.io, kind: Role, name: kubevpn-traffic-manager-user}
subjects: [{kind: User, name: why-visitor, apiGroup: rbac.authorization.k8s.io}]
`

// why is a laptop that asks why, and the workload that it asks about.
type why struct {
	*laptop
	shop *shop
	url  string // of the Service
}

// ask runs `kubevpn why` and returns its output.
func (y *why) ask(t *testing.T, args ...string) (api.Diagnosis, result) {
	t.Helper()
	r := y.run(t, append([]string{"kubevpn", "why", "-o", "json"}, args...)...)
	var e api.Diagnosis
	if err := json.Unmarshal([]byte(r.stdout), &e); err != nil {
		t.Fatalf("%v: %v", err, r)
	}
	return e, r
}

// finds waits until `kubevpn why` names a cause, by its exit code and its message. 0 means that there is none.
func (y *why) finds(t *testing.T, code api.ExitCode, message string, args ...string) {
	t.Helper()
	testenv.Eventually(t, time.Minute, func() error { // the cluster follows a change a moment later
		e, r := y.ask(t, args...)
		switch {
		case r.code != int(code), code == 0 != (e.Failed() == nil), e.Failed() != nil && e.Failed().Code != code:
			return fmt.Errorf("want exit code %d: %v", code, r)
		case e.Failed() != nil && !strings.Contains(e.Failed().Cause, message):
			return fmt.Errorf("want %q: %v", message, r)
		}
		return nil
	})
}

// hop returns the finding about a hop.
func hop(d api.Diagnosis, name string) api.Finding {
	n := slices.IndexFunc(d.Findings, func(f api.Finding) bool { return f.Name == name })
	if n < 0 {
		return api.Finding{}
	}
	return d.Findings[n]
}

// whySuite plants causes for lost requests, and look-alikes that cause nothing.
func whySuite(t *testing.T, w *world) {
	l := w.newUser(t, lab.Admin)
	y := &why{l, w.newShop(t, "why-shop", "privileged"), "http://shop.why-shop/"}
	l.apply(t, strings.ReplaceAll(whyServices, "APP_IMAGE", appRef))
	t.Run("not_connected", func(t *testing.T) {
		failure{code: api.ExitNotConnected, message: "not connected", hint: "kubevpn connect"}.check(t, l.run(t, "kubevpn", "why", y.url))
	})
	l.apply(t, strings.ReplaceAll(whyFront, "APP_IMAGE", appRef))
	l.connect(t)
	l.apply(t, strings.ReplaceAll(whyFrom, "APP_IMAGE", appRef))
	t.Run("healthy", y.healthy)
	t.Run("services", y.services)
	t.Run("policies", y.policies)
	t.Run("rights", y.rights)
	t.Run("other_vpn", y.otherVPN)
	t.Run("from", y.fromPod)
	t.Run("intercepts", y.intercepts)
}

func (y *why) healthy(t *testing.T) {
	y.finds(t, 0, "", y.url)
	e, _ := y.ask(t, y.url, "-X", "HEAD")
	for _, h := range e.Findings {
		if h.Verdict != api.VerdictOK && h.Name != "agent" && h.Name != "program" {
			t.Errorf("%+v", h)
		}
	}
	if e.Status != 200 || e.Findings[0].Section != "HEAD "+y.url || !strings.Contains(hop(e, "balancer").Seen, "2 of 2 endpoints are ready") {
		t.Errorf("%+v", e)
	}
	text := y.must(t, "kubevpn", "why", y.url, "-H", "x-user: me")
	for _, want := range []string{"GET " + y.url, "route", "kubevpn0", "200 OK"} {
		if !strings.Contains(text, want) {
			t.Errorf("no %q:\n%s", want, text)
		}
	}
}

func (y *why) services(t *testing.T) {
	for name, want := range map[string]struct {
		code    api.ExitCode
		url     string
		message string
	}{
		"no_service":       {api.ExitNameMissing, "http://nothing.why-shop.svc/", "there is no Service nothing"},
		"no_port":          {api.ExitNoPort, "http://shop.why-shop:81/", "no TCP port 81; it has 80 (http)"},
		"no_pod":           {api.ExitNoEndpoint, "http://nobody.why-shop/", "no pod has the labels app=nobody"},
		"no_ready_pod":     {api.ExitNoEndpoint, "http://unready.why-shop/", "is ready"},
		"wrong_port_name":  {api.ExitTargetPort, "http://misnamed.why-shop/", `targetPort "htpp"`},
		"wrong_targetPort": {api.ExitTargetPort, "http://shop.why-shop:5432/", "sends to port 5432"},
	} {
		t.Run(name, func(t *testing.T) { y.finds(t, want.code, want.message, want.url) })
	}
	t.Run("closed_port", func(t *testing.T) {
		for name, ip := range y.shop.ready(t) {
			y.finds(t, api.ExitClosedPort, "nothing listens on port 8081 of pod "+name, "http://"+net.JoinHostPort(ip, "8081")+"/")
		}
	})
	t.Run("one_of_two_pods_is_not_ready", func(t *testing.T) {
		y.kubectl(t, "-n", y.shop.namespace, "label", "pod", "unready", "app=shop", "--overwrite")
		defer y.kubectl(t, "-n", y.shop.namespace, "label", "pod", "unready", "app=unready", "--overwrite")
		testenv.Eventually(t, time.Minute, func() error {
			e, r := y.ask(t, y.url)
			if b := hop(e, "balancer"); r.code != 0 || !strings.Contains(b.Seen, "2 of 3") || !strings.Contains(strings.Join(b.Notes, "\n"), "pod unready is not ready") {
				return fmt.Errorf("%v", r)
			}
			return nil
		})
	})
}

// policies plants a NetworkPolicy. The lab has no network plugin that enforces one, so rules of the pods do.
func (y *why) policies(t *testing.T) {
	y.apply(t, `
apiVersion: networking.k8s.io/v1
kind: NetworkPolicy
metadata: {name: guard, namespace: why-shop}
spec: {podSelector: {matchLabels: {app: shop}}, policyTypes: [Ingress], ingress: [{from: [{podSelector: {}}]}]}
`)
	t.Run("not_enforced_is_no_cause", func(t *testing.T) {
		testenv.Eventually(t, time.Minute, func() error {
			if e, r := y.ask(t, y.url); r.code != 0 || hop(e, "policy").Verdict != api.VerdictWarning {
				return fmt.Errorf("%v", r)
			}
			return nil
		})
	})
	c := y.connection(t)
	manager := y.kubectl(t, "-n", c.ManagerNamespace, "get", "pod", c.ManagerPod, "-o", "jsonpath={.status.podIP}")
	rules := func(text string) {
		t.Helper()
		for _, ip := range y.shop.ready(t) {
			y.placeOf(t, netip.MustParseAddr(ip)).must(t, "nft", text)
		}
	}
	rules("table inet guard { chain c { type filter hook input priority 0; ip saddr " + manager + " tcp dport 8080 drop; }; }")
	defer rules("delete table inet guard")
	y.finds(t, api.ExitNetworkPolicy, "NetworkPolicy guard blocks connections from the traffic manager's pod", y.url)
}

// rights checks that facts that the user may not read are skipped.
func (y *why) rights(t *testing.T) {
	y.apply(t, `
apiVersion: rbac.authorization.k8s.io/v1
kind: Role
metadata: {name: why-reader, namespace: why-shop}
rules: [{apiGroups: [""], resources: [services], verbs: [get]}]
---
apiVersion: rbac.authorization.k8s.io/v1
kind: RoleBinding
metadata: {name: why-reader, namespace: why-shop}
roleRef: {apiGroup: rbac.authorization.k8s.io, kind: Role, name: why-reader}
subjects: [{kind: User, name: why-reader, apiGroup: rbac.authorization.k8s.io}]
`)
	testenv.Eventually(t, time.Minute, func() error {
		e, r := y.ask(t, y.url, "--as", "why-reader")
		b, p := hop(e, "balancer"), hop(e, "policy")
		if r.code != 0 || b.Verdict != api.VerdictSkipped || p.Verdict == api.VerdictOK || !strings.Contains(b.Seen, "you may not list endpointslices") {
			return fmt.Errorf("%v", r)
		}
		return nil
	})
}

// fromPod sends the requests from a pod.
func (y *why) fromPod(t *testing.T) {
	y.kubectl(t, "-n", "why-from", "wait", "--for=condition=Ready", "--timeout=60s", "pod/source")
	from := []string{y.url, "--from", "pod/source", "-n", "why-from", "--timeout", "30s"} // an exec on a busy machine
	containers := func() string {
		return y.kubectl(t, "-n", "why-from", "get", "pod", "source", "-o", "jsonpath={.spec.ephemeralContainers[*].name}")
	}
	t.Run("says_first_what_it_adds", func(t *testing.T) {
		failure{code: api.ExitConsent, message: "adds the ephemeral container kubevpn-why-1 to the pod why-from/source", hint: "--yes"}.
			check(t, y.run(t, append([]string{"kubevpn", "why", "--yes=false"}, from...)...))
	})
	visitor := append([]string{"kubevpn", "why", "--as", "why-visitor"}, from...)
	t.Run("without_the_right_to_add_it", func(t *testing.T) {
		failure{code: api.ExitPermission, message: "patch pods/ephemeralcontainers", hint: "kubectl create role"}.check(t, y.run(t, visitor...))
	})
	t.Run("without_the_right_to_run_it", func(t *testing.T) {
		y.kubectl(t, "-n", "why-from", "patch", "role", "why-visitor", "--type=json", "-p",
			`[{"op": "add", "path": "/rules/-", "value": {"apiGroups": [""], "resources": ["pods/ephemeralcontainers"], "verbs": ["patch"]}}]`)
		testenv.Eventually(t, time.Minute, func() error { // the API server follows a change a moment later
			if r := y.run(t, visitor...); r.code != int(api.ExitPermission) || !strings.Contains(r.stderr, "create pods/exec") {
				return fmt.Errorf("%v", r)
			}
			return nil
		})
	})
	if got := containers(); got != "" {
		t.Errorf("the pod has %s", got)
	}
	t.Run("healthy", func(t *testing.T) {
		y.finds(t, 0, "", from...)
		e, _ := y.ask(t, from...) // in the container that stays
		text := fmt.Sprintf("%+v", e)
		for _, want := range []string{"pod why-from/source", "search why-from.svc.", "leaves the pod by eth0", "kube-proxy chooses, on the node"} {
			if !strings.Contains(text, want) {
				t.Errorf("no %q: %s", want, text)
			}
		}
		if got := containers(); got != "kubevpn-why-1" {
			t.Errorf("the pod has %s", got)
		}
	})
	pod := y.placeOf(t, y.pods(t, "why-from", "app=source")[0])
	t.Run("egress_is_blocked", func(t *testing.T) {
		y.apply(t, `
apiVersion: networking.k8s.io/v1
kind: NetworkPolicy
metadata: {name: closed, namespace: why-from}
spec: {podSelector: {}, policyTypes: [Egress], egress: [{ports: [{port: 53, protocol: UDP}]}]}
`)
		defer y.kubectl(t, "-n", "why-from", "delete", "networkpolicy", "closed")
		pod.must(t, "nft", "table inet guard { chain c { type filter hook output priority 0; tcp dport { 80, 8080 } drop; }; }")
		defer pod.must(t, "nft", "delete table inet guard")
		y.finds(t, api.ExitNetworkPolicy, "NetworkPolicy closed blocks connections from pod source", from...)
	})
	redirect := func(to string) (undo func()) {
		pod.must(t, "nft", "table inet mesh { chain c { type nat hook output priority -100; tcp dport 80 redirect to :"+to+"; }; }")
		return func() { pod.must(t, "nft", "delete table inet mesh") }
	}
	t.Run("mesh_that_passes_it_on_is_no_cause", func(t *testing.T) {
		defer redirect("8080")()
		y.finds(t, 0, "", from...)
		if e, _ := y.ask(t, from...); !strings.Contains(hop(e, "route").Cause, "port 8080 of the pod itself takes it") {
			t.Errorf("%+v", e)
		}
	})
	t.Run("mesh_takes_it", func(t *testing.T) {
		defer redirect("9004")()
		y.finds(t, api.ExitMesh, "the service mesh Istio (container istio-proxy)", from...)
	})
}

// otherVPN runs another VPN beside kubevpn. The VPN first takes a route, and then the names.
func (y *why) otherVPN(t *testing.T) {
	v := y.newOtherVPN(t)
	vip := y.clusterIP(t, y.shop.namespace, "shop")
	down := v.up(t, ":", ":")
	defer down()
	t.Run("beside_is_no_cause", func(t *testing.T) { y.finds(t, 0, "", y.url) })
	t.Run("route_is_taken", func(t *testing.T) {
		y.must(t, "ip", "route", "add", vip, "dev", "office0")
		defer y.must(t, "ip", "route", "del", vip, "dev", "office0")
		y.finds(t, api.ExitRouteTaken, "goes to office0", "http://"+vip+"/")
		y.finds(t, 0, "", y.url) // the name leads to another address of this machine
	})
	t.Run("name_is_taken", func(t *testing.T) {
		nameserver := y.must(t, "awk", "/^nameserver/ { print $2; exit }", "/etc/resolv.conf")
		y.must(t, "nft", fmt.Sprintf("table inet office { chain c { type nat hook output priority -150; ip daddr %s udp dport 53 dnat ip to %[1]s; }; }", nameserver))
		defer y.must(t, "nft", "delete table inet office")
		y.finds(t, api.ExitNameTaken, "the cluster has "+vip, y.url)
	})
	y.finds(t, 0, "", y.url)
}

// intercepts plants causes for requests that do not reach an intercept, or its program.
func (y *why) intercepts(t *testing.T) {
	y.startApp(t, "laptop")
	other := y.shop.secondLaptop(t)
	for _, pod := range []string{"front", "meshed"} {
		y.kubectl(t, "-n", y.shop.namespace, "wait", "--for=condition=Ready", "--timeout=60s", "pod/"+pod)
	}
	via := "http://front.why-shop/via?to=http://" + y.clusterIP(t, y.shop.namespace, "shop") + "/"
	header := "x-user: me"
	y.finds(t, 0, "", via) // the gateway keeps this connection
	y.proxy(t, y.shop, "--headers", "x-user=me", "--port", "8080:8080", "--no-shortcut")

	t.Run("request_arrives", func(t *testing.T) {
		y.finds(t, 0, "", y.url, "-H", header)
		e, _ := y.ask(t, y.url, "-H", header)
		if hop(e, "agent").Verdict != api.VerdictOK || hop(e, "program").Verdict != api.VerdictOK {
			t.Errorf("%+v", e)
		}
	})
	t.Run("request_for_the_application_is_no_cause", func(t *testing.T) {
		e, r := y.ask(t, y.url)
		if a := hop(e, "agent"); r.code != 0 || a.Verdict != api.VerdictOK || !strings.Contains(strings.Join(a.Notes, "\n"), "header x-user is absent") {
			t.Errorf("%v", r)
		}
	})
	t.Run("header_is_lost", func(t *testing.T) {
		y.finds(t, api.ExitHeaderLost, "header x-user is absent", via+"&drop=X-User", "-H", header)
	})
	t.Run("hop_that_lost_it_is_named", func(t *testing.T) {
		front := &shop{world: y.shop.world, namespace: y.shop.namespace, workload: "pod/front"}
		defer y.leave(t, front)
		for match, at := range map[string]string{"x-user=nobody": "the application", "x-user=me": "this machine"} {
			y.proxy(t, front, "--headers", match, "--port", "8080:8080", "--no-shortcut")
			url := via
			if at == "this machine" { // by the name: the address is mapped here
				url = "http://front.why-shop/via?to=" + y.url
			}
			y.finds(t, api.ExitHeaderLost, "header x-user is absent", url+"&drop=X-User", "-H", header)
			e, _ := y.ask(t, url+"&drop=X-User", "-H", header)
			if notes, want := strings.Join(hop(e, "agent").Notes, "\n"), "pod front of pod/front had it with x-user=me, and gave it to "+at; !strings.Contains(notes, want) {
				t.Errorf("no %q:\n%s", want, notes)
			}
		}
		y.finds(t, 0, "", "http://front.why-shop/via?to="+y.url, "-H", header) // propagated
	})
	t.Run("connection_is_older", func(t *testing.T) {
		y.finds(t, api.ExitOldConnection, "older than the intercept", via, "-H", header)
	})
	t.Run("match_of_another_developer", func(t *testing.T) {
		other.proxy(t, y.shop, "--headers", "x-user=you", "--port", "8080:8080")
		defer other.leave(t, y.shop)
		y.finds(t, api.ExitOtherMatch, "whose match is x-user=you", y.url, "-H", "x-user: you")
	})
	t.Run("pod_without_agent", func(t *testing.T) {
		y.kubectl(t, "-n", y.shop.namespace, "scale", "deployment/twin", "--replicas=1")
		defer y.kubectl(t, "-n", y.shop.namespace, "scale", "deployment/twin", "--replicas=0")
		y.finds(t, api.ExitNoAgent, "without your agent", y.url, "-H", header)
	})
	t.Run("program_does_not_listen", func(t *testing.T) {
		y.proxy(t, y.shop, "--headers", "x-user=me", "--port", "3998:8080", "--no-shortcut")
		y.finds(t, api.ExitLocalPort, "nothing listens on port 3998", y.url, "-H", header)
	})
	t.Run("program_hangs", func(t *testing.T) {
		if err := inside(y.network(), func() error {
			l, err := net.Listen("tcp", "127.0.0.1:3999") // the kernel accepts
			if err == nil {
				t.Cleanup(func() { l.Close() })
			}
			return err
		}); err != nil {
			t.Fatal(err)
		}
		y.proxy(t, y.shop, "--headers", "x-user=me", "--port", "3999:8080", "--no-shortcut")
		y.finds(t, api.ExitLocalHang, "the program on port 3999 of this machine", y.url, "-H", header)
	})
	y.laptop.leave(t, y.shop)
	t.Run("mesh_takes_it_first", func(t *testing.T) {
		meshed := &shop{world: y.world, namespace: y.shop.namespace, workload: "pod/meshed"}
		y.proxy(t, meshed, "--headers", "x-user=me", "--port", "8080:8080", "--no-shortcut")
		defer y.laptop.leave(t, meshed)
		y.finds(t, 0, "", "http://meshed.why-shop/", "-H", header)
		ip := y.pods(t, y.shop.namespace, "app=meshed")[0]
		y.placeOf(t, ip).must(t, "nft", "table inet mesh { chain c { type nat hook prerouting priority -100; tcp dport 8080 redirect to :15006; }; }")
		y.finds(t, api.ExitMesh, "the service mesh Istio (container istio-proxy) takes it", "http://meshed.why-shop/", "-H", header)
	})
}
