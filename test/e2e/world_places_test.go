//go:build e2e && linux

package e2e

import (
	"errors"
	"net/netip"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"kubevpn/internal/api"
	"kubevpn/internal/testenv"
)

// worldPlaces sends requests to a program in a container of the laptop.
func worldPlaces(t *testing.T, l *laptop, s *shop) {
	within := l.container(t, netip.MustParsePrefix("172.30.9.0/24"))
	const host = "172.30.9.2"
	v, vip := s.visitor(t), s.clusterIP(t, s.namespace, "wide")
	mine := []string{"kubevpn", "proxy", s.workload, "-n", s.namespace, "--headers", mine + "=" + me}
	t.Run("refused", func(t *testing.T) {
		for place, message := range map[string]string{
			vip + ":80":               "requests cannot go to " + vip + ":80: .*leads into the cluster",
			"no-such-host.invalid:80": "requests cannot go to no-such-host.invalid:80: .*no such host",
		} {
			failure{code: api.ExitUsage, message: message, hint: "without the cluster", within: soon}.check(t,
				l.run(t, append(mine, "--port", "8080="+place)...))
		}
	})
	t.Run("nothing_listens", func(t *testing.T) {
		r := l.proxy(t, s, mine[5], mine[6], "--port", "8080="+host+":8080")
		defer l.leave(t, s)
		if !strings.Contains(r.stderr+r.stdout, "no program answers at "+host+":8080 now: ") {
			t.Errorf("no warning: %v", r)
		}
		r = l.run(t, "kubevpn", "why", "http://"+vip+"/", "-H", "x-user: me")
		if r.code != int(api.ExitLocalPort) || !strings.Contains(r.stdout, "nothing listens on "+host+":8080") {
			t.Error(r)
		}
	})
	l.background(t, append(within, filepath.Join(bin, "app"), "-name", "container", "-host", host)...)
	for _, place := range []string{"8080=" + host + ":8080", "http=" + host + ":8080"} {
		t.Run(strings.NewReplacer("=", "_", ":", "_").Replace(place), func(t *testing.T) {
			r := l.proxy(t, s, mine[5], mine[6], "--port", place, "--port", "udp/9001="+host+":9001")
			defer l.leave(t, s)
			if !strings.Contains(r.stdout, "8080 (http) → "+host+":8080") {
				t.Errorf("proxy prints no place: %v", r)
			}
			testenv.Eventually(t, soon, func() error { return v.want("http://"+vip+"/", "container", "x-user", me) })
			if err := v.want("http://"+vip+"/", "laptop", "x-user", me); err == nil {
				t.Error("the laptop answers")
			}
			if ports := l.intercept(t).Ports; ports[0].Host != host || ports[0].Local != 8080 {
				t.Errorf("status has the ports %+v", ports)
			}
			if r := l.run(t, "kubevpn", "status"); !strings.Contains(r.stdout, "8080="+host+":8080") {
				t.Error(r)
			}
			if r := l.run(t, "kubevpn", "why", "http://"+vip+"/", "-H", "x-user: me"); r.code != 0 ||
				!strings.Contains(r.stdout, "the program on "+host+":8080 has it") {
				t.Error(r)
			}
		})
	}
}

// governedManifest has policies that require a label, an annotation and limits on every object, and a workload that
// complies.
const governedManifest = `
apiVersion: v1
kind: Namespace
metadata: {name: governed, labels: {pod-security.kubernetes.io/enforce: restricted}}
---
apiVersion: v1
kind: ResourceQuota
metadata: {name: all, namespace: governed}
spec: {hard: {limits.cpu: "8", limits.memory: 8Gi, requests.cpu: "4", requests.memory: 4Gi}}
---
apiVersion: v1
kind: LimitRange
metadata: {name: all, namespace: governed}
spec: {limits: [{type: Container, max: {cpu: "2", memory: 1Gi}, min: {cpu: 20m, memory: 16Mi}, maxLimitRequestRatio: {cpu: "20"}}]}
---
apiVersion: admissionregistration.k8s.io/v1
kind: ValidatingAdmissionPolicy
metadata: {name: governed}
spec:
  matchConstraints:
    resourceRules:
    - {apiGroups: ["", apps, batch, rbac.authorization.k8s.io], apiVersions: ["*"], operations: [CREATE, UPDATE],
       resources: [pods, services, serviceaccounts, deployments, jobs, roles]}
  matchConditions: [{name: no-controller, expression: '!request.userInfo.username.startsWith("system:") || object.kind == "Pod"'}]
  validations:
  - {expression: 'has(object.metadata.labels) && "team" in object.metadata.labels', message: it needs the label team}
  - {expression: 'has(object.metadata.annotations) && "example.com/cost" in object.metadata.annotations', message: it needs the annotation example.com/cost}
---
apiVersion: admissionregistration.k8s.io/v1
kind: ValidatingAdmissionPolicyBinding
metadata: {name: governed}
spec:
  policyName: governed
  validationActions: [Deny]
  matchResources: {namespaceSelector: {matchLabels: {kubernetes.io/metadata.name: governed}}}
---
apiVersion: v1
kind: ConfigMap
metadata: {name: settings, namespace: governed}
data: {GREETING: hello}
---
apiVersion: apps/v1
kind: Deployment
metadata: {name: web, namespace: governed, labels: {team: shop}, annotations: {example.com/cost: "1"}}
spec:
  selector: {matchLabels: {app: web}}
  template:
    metadata: {labels: {app: web, team: shop, tier: front}, annotations: {example.com/cost: "1"}}
    spec:
      terminationGracePeriodSeconds: 1
      securityContext: {runAsNonRoot: true, runAsUser: 65532, seccompProfile: {type: RuntimeDefault}}
      containers:
      - name: app
        image: APP_IMAGE
        imagePullPolicy: Never
        securityContext: {allowPrivilegeEscalation: false, capabilities: {drop: [ALL]}}
        resources: {limits: {cpu: 500m, memory: 128Mi}, requests: {cpu: 50m, memory: 32Mi}}
        ports: [{containerPort: 8080, name: http}]
        readinessProbe: {httpGet: {path: /, port: http}, periodSeconds: 1}
        env:
        - {name: APP, valueFrom: {fieldRef: {fieldPath: "metadata.labels['app']"}}}
        - {name: TIER, valueFrom: {fieldRef: {fieldPath: "metadata.labels['tier']"}}}
        - {name: COST, valueFrom: {fieldRef: {fieldPath: "metadata.annotations['example.com/cost']"}}}
        - {name: CPU, valueFrom: {resourceFieldRef: {resource: limits.cpu, divisor: 1m}}}
        envFrom: [{configMapRef: {name: settings}}]
        volumeMounts: [{name: info, mountPath: /info}]
      volumes:
      - name: info
        projected:
          sources:
          - {downwardAPI: {items: [{path: labels, fieldRef: {fieldPath: metadata.labels}}, {path: app, fieldRef: {fieldPath: "metadata.labels['app']"}}]}}
          - {configMap: {name: settings}}
---
apiVersion: v1
kind: Service
metadata: {name: web, namespace: governed, labels: {team: shop}, annotations: {example.com/cost: "1"}}
spec: {selector: {app: web}, ports: [{name: http, port: 80, targetPort: http}]}
`

// worldGoverned installs, intercepts and clones where policies, a quota and a LimitRange set requirements for each
// object.
func worldGoverned(t *testing.T, l *laptop) {
	l.apply(t, strings.ReplaceAll(governedManifest, "APP_IMAGE", appRef))
	s := &shop{l.world, "governed", "deployment/web"}
	s.rolledOut(t)
	objects := []string{"--labels", "team=shop", "--annotations", "example.com/cost=1"}
	install := []string{"kubevpn", "install", "--manager-namespace", "governed"}
	t.Run("install", func(t *testing.T) {
		testenv.Eventually(t, time.Minute, func() error { // the API server compiles policies in the background
			out, err := s.tryKubectl(t.Context(), "-n", "governed", "create", "service", "clusterip", "x", "--tcp=80", "--dry-run=server")
			if err == nil {
				return errors.New(out)
			}
			return nil
		})
		if r := l.run(t, append(install, "--labels", "x=y")...); !strings.Contains(r.stderr, "it needs the label team") ||
			!strings.Contains(r.stderr, "--labels team=shop") {
			t.Error(r)
		}
		r := l.run(t, append(install, append(objects, "--resources", "limits.memory=512Mi,requests.cpu=100m")...)...)
		if r.code != 0 {
			t.Fatal(r)
		}
		l.must(t, "kubevpn", "uninstall", "--manager-namespace", "governed")
	})
	t.Run("sidecar", func(t *testing.T) {
		failure{code: api.ExitInject, message: "per Container|ratio", hint: "--resources", within: 40 * time.Second}.check(t,
			l.run(t, "kubevpn", "proxy", s.workload, "-n", "governed", "--headers", mine+"="+me))
		l.proxy(t, s, "--headers", mine+"="+me, "--resources", "requests.cpu=50m")
		testenv.Eventually(t, soon, func() error {
			return s.visitor(t).want("http://"+s.clusterIP(t, "governed", "web")+"/", "laptop", mine, me)
		})
		l.leave(t, s)
		s.rolledOut(t)
	})
	t.Run("clone", func(t *testing.T) {
		clone := []string{"kubevpn", "clone", s.workload, "-n", "governed", "--no-traffic", "--name", "copy"}
		r := l.run(t, append(clone, objects...)...)
		if r.code != 0 {
			t.Fatal(r)
		}
		defer l.must(t, "kubevpn", "leave", s.workload, "-n", "governed")
		for _, kind := range []string{"job", "service"} {
			if got := s.kubectl(t, "-n", "governed", "get", kind, "copy", "-o", "jsonpath={.metadata.labels.team}"); got != "shop" {
				t.Errorf("the %s has the team %q", kind, got)
			}
		}
		v, ip := s.visitor(t), s.kubectl(t, "-n", "governed", "get", "pod", s.clonePod(t, "copy"), "-o", "jsonpath={.status.podIP}")
		for file, want := range map[string][]string{
			"/proc/self/environ": {"APP=web", "TIER=front", "COST=1", "CPU=500", "GREETING=hello"},
			"/info/labels":       {`app="web"`, `team="shop"`, `tier="front"`},
			"/info/app":          {"web"}, "/info/GREETING": {"hello"},
		} {
			text, _, err := v.content("http://"+ip+":8080/", file)
			have := strings.FieldsFunc(text, func(r rune) bool { return r == 0 || r == '\n' })
			if missing := slices.DeleteFunc(want, func(w string) bool { return slices.Contains(have, w) }); err != nil || len(missing) > 0 {
				t.Errorf("%s of the clone lacks %q: %q, %v", file, missing, text, err)
			}
		}
	})
}
