//go:build e2e && linux

package e2e

import (
	"context"
	"fmt"
	"net/http"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"kubevpn/internal/api"
	"kubevpn/internal/testenv"
)

// changedApp is a workload and its Services in a namespace; KIND is Deployment or StatefulSet.
const changedApp = `
apiVersion: v1
kind: Namespace
metadata: {name: NAMESPACE, labels: {pod-security.kubernetes.io/enforce: LEVEL}}
---
apiVersion: apps/v1
kind: KIND
metadata: {name: app, namespace: NAMESPACE}
spec:
  replicas: 1
  selector: {matchLabels: {app: app}}
  EXTRA
  template:
    metadata: {labels: {app: app}}
    spec:
      terminationGracePeriodSeconds: 0
      securityContext: {runAsNonRoot: true, runAsUser: 65532, seccompProfile: {type: RuntimeDefault}}
      containers:
      - name: app
        image: APP_IMAGE
        imagePullPolicy: Never
        securityContext: {allowPrivilegeEscalation: false, capabilities: {drop: [ALL]}}
        ports: [{containerPort: 8080, name: http}]
        readinessProbe: {httpGet: {path: /, port: http}, periodSeconds: 1}
`

// changedService is a Service of changedApp. SPEC has its other fields.
const changedService = `
---
apiVersion: v1
kind: Service
metadata: {name: NAME, namespace: NAMESPACE}
spec: {selector: {app: app}, ports: [{name: http, port: 80, targetPort: http}], SPEC}
`

// changed creates changedApp with a Service NAME for each spec, and waits until it runs.
func (w *world) changed(t *testing.T, namespace, level, kind, extra string, services map[string]string) *shop {
	t.Helper()
	manifest := changedApp
	for name, spec := range services {
		manifest += strings.NewReplacer("NAME,", name+",", "SPEC", spec).Replace(changedService)
	}
	w.apply(t, strings.NewReplacer("NAMESPACE", namespace, "LEVEL", level, "KIND", kind, "EXTRA", extra, "APP_IMAGE", appRef).Replace(manifest))
	s := &shop{w, namespace, strings.ToLower(kind) + "/app"}
	s.rolledOut(t)
	return s
}

// of returns the laptop's only intercept in the namespace of s, or nil.
func (l *laptop) of(t *testing.T, s *shop) *api.Intercept {
	t.Helper()
	all := l.status(t).Intercepts
	if n := slices.IndexFunc(all, func(i api.Intercept) bool { return i.Namespace == s.namespace }); n >= 0 {
		return &all[n]
	}
	return nil
}

// says waits until the status has the state, and a line that matches.
func (l *laptop) says(t *testing.T, s *shop, within time.Duration, state api.InterceptState, line string) {
	t.Helper()
	testenv.Eventually(t, within, func() error {
		i := l.of(t, s)
		if i == nil {
			return fmt.Errorf("no intercept in %s", s.namespace)
		}
		lines := append(slices.Clone(i.Warnings), i.LastError)
		if i.Error != nil {
			lines = append(lines, i.Error.Message)
		}
		if i.State != state || !slices.ContainsFunc(lines, regexp.MustCompile(line).MatchString) {
			return fmt.Errorf("state %s: %q", i.State, lines)
		}
		return nil
	})
}

// application waits until the application answers.
func (v *visitor) application(t *testing.T, url string, header ...string) {
	t.Helper()
	testenv.Eventually(t, soon, func() error {
		a, err := v.ask(http.MethodGet, url, nil, header...)
		if err == nil && !strings.HasPrefix(a.Name, "app-") {
			err = fmt.Errorf("%s answers", a.Name)
		}
		return err
	})
}

// worldChanges tests Services whose requests no sidecar gets, rollouts that stop, and changes by others to what an
// intercept needs.
func worldChanges(t *testing.T, l *laptop) {
	l.finally(t, "kubevpn", "leave", "--all") // those that have failed
	for name, test := range map[string]func(*testing.T, *laptop){
		"headless_alone": changesHeadlessAlone, "headless_beside_another": changesHeadless, "selectors": changesSelector,
		"template_is_restored": changesTemplate, "target_port_is_restored": changesTargetPort, "admission": changesAdmission,
		"application_never_starts": changesBroken, "statefulset_waits": changesWaits,
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			test(t, l)
		})
	}
}

func changesHeadlessAlone(t *testing.T, l *laptop) {
	s := l.changed(t, "lonely", "restricted", "StatefulSet", "serviceName: app", map[string]string{"app": "clusterIP: None"})
	before := s.template(t)
	failure{code: api.ExitIntercept, message: "no Service with a ClusterIP sends to tcp 8080; not by the headless Service app", hint: "--mode ephemeral",
		within: soon}.check(t, l.run(t, "kubevpn", "proxy", s.workload, "-n", s.namespace))
	if after := s.template(t); after != before {
		t.Errorf("the template was\n%s\nand is\n%s", before, after)
	}
}

func changesHeadless(t *testing.T, l *laptop) {
	s := l.changed(t, "store", "restricted", "StatefulSet", "serviceName: app", map[string]string{"app": "clusterIP: None", "app-q": "type: NodePort"})
	r := l.proxy(t, s, "--headers", mine+"="+me)
	if !strings.Contains(r.stdout+r.stderr, "the headless Service app, whose name leads to port 8080 of the pods") {
		t.Errorf("the command does not name the headless Service: %v", r)
	}
	l.says(t, s, soon, api.InterceptActive, "the headless Service app")
	v := s.visitor(t)
	testenv.Eventually(t, soon, func() error {
		return v.want("http://"+s.clusterIP(t, s.namespace, "app-q")+"/", "laptop", mine, me)
	})
	v.application(t, "http://"+s.pods(t, s.namespace, "app=app")[0].String()+":8080/", mine, me) // as the warning says
	l.leave(t, s)
}

func changesSelector(t *testing.T, l *laptop) {
	s := l.changed(t, "choosy", "baseline", "Deployment", "", map[string]string{"app": "sessionAffinity: None"})
	l.proxy(t, s, "--mode", "sidecar")
	patch := func(manager, object, patch string) {
		t.Helper()
		s.kubectl(t, "-n", s.namespace, "patch", object, "--type=merge", "--field-manager="+manager, "-p", patch)
	}
	patch("colleague", "service/app", `{"spec":{"selector":{"app":"other"}}}`)
	l.says(t, s, soon, api.InterceptWaiting, `port 80 of the Service app no longer leads to the intercepted pods: spec\.selector was set by colleague \(Update`)
	patch("colleague", "service/app", `{"spec":{"selector":{"app":"app"}}}`)
	l.says(t, s, soon, api.InterceptActive, "^$")
	patch("keda", s.workload, `{"spec":{"replicas":0}}`)
	l.says(t, s, soon, api.InterceptWaiting, `deployment/app has no pods: spec\.replicas is 0: spec\.replicas was set by keda`)
	s.kubectl(t, "-n", s.namespace, "scale", s.workload, "--replicas=1")
	l.says(t, s, 4*soon, api.InterceptActive, "^$")
	l.leave(t, s)
}

func changesTemplate(t *testing.T, l *laptop) {
	s := l.changed(t, "restored", "restricted", "Deployment", "", map[string]string{"app": "sessionAffinity: None"})
	before := s.template(t)
	l.proxy(t, s)
	undo := func() { s.kubectl(t, "-n", s.namespace, "rollout", "undo", s.workload, "--to-revision=1") }
	undo()
	l.says(t, s, soon, api.InterceptActive, "removed the agent from the template of deployment/app.*kubevpn has added it again, once")
	v := s.visitor(t)
	testenv.Eventually(t, 4*soon, func() error {
		return v.want("http://"+s.clusterIP(t, s.namespace, "app")+"/", "laptop")
	})
	s.rolledOut(t)
	var revision string
	for line := range strings.Lines(s.kubectl(t, "-n", s.namespace, "rollout", "history", s.workload)) {
		if f := strings.Fields(line); len(f) > 1 && f[1] == "<none>" {
			if !strings.Contains(s.kubectl(t, "-n", s.namespace, "rollout", "history", s.workload, "--revision="+f[0]), api.AgentPrefix) {
				revision = f[0]
			}
		}
	}
	s.kubectl(t, "-n", s.namespace, "rollout", "undo", s.workload, "--to-revision="+revision)
	l.says(t, s, soon, api.InterceptFailed, "removed the agent from the template of deployment/app")
	if after := s.template(t); after != before {
		t.Errorf("the template was\n%s\nand is\n%s", before, after)
	}
	s.rolledOut(t)
	v.application(t, "http://"+s.clusterIP(t, s.namespace, "app")+"/")
}

func changesTargetPort(t *testing.T, l *laptop) {
	s := l.changed(t, "gitops", "restricted", "Deployment", "", map[string]string{"app": "sessionAffinity: None"})
	apply := func() {
		t.Helper()
		s.kubectl(t, "-n", s.namespace, "patch", "service/app", "--type=json", "--field-manager=argocd-controller", "-p",
			`[{"op":"replace","path":"/spec/ports/0/targetPort","value":8080}]`)
	}
	apply()
	l.proxy(t, s)
	apply()
	l.says(t, s, soon, api.InterceptActive, `port 80 of the Service app bypasses the agents: spec\.ports\.80\.targetPort was set by argocd-controller \(Update, .*again, once`)
	v := s.visitor(t)
	testenv.Eventually(t, soon, func() error { return v.want("http://"+s.clusterIP(t, s.namespace, "app")+"/", "laptop") })
	apply()
	l.says(t, s, soon, api.InterceptFailed, `receives no requests any more: port 80 of the Service app bypasses the agents: .* argocd-controller`)
	if got := s.kubectl(t, "-n", s.namespace, "get", "service", "app", "-o", "jsonpath={.spec.ports[0].targetPort}{.metadata.annotations}"); !strings.HasPrefix(got, "8080") || strings.Contains(got, "kubevpn.dev") {
		t.Errorf("the Service has %s", got)
	}
	s.rolledOut(t)
	if got := s.template(t); strings.Contains(got, api.AgentPrefix) {
		t.Errorf("the template is %s", got)
	}
}

// changesAdmission uses a policy that rejects the change of the template.
func changesAdmission(t *testing.T, l *laptop) {
	s := l.changed(t, "policed", "restricted", "Deployment", "", map[string]string{"app": "sessionAffinity: None"})
	s.apply(t, `
apiVersion: admissionregistration.k8s.io/v1
kind: ValidatingAdmissionPolicy
metadata: {name: policed}
spec:
  matchConstraints: {resourceRules: [{apiGroups: [apps], apiVersions: [v1], operations: [UPDATE], resources: [deployments]}]}
  validations: [{expression: "object.spec.template.spec.containers.all(c, !c.name.startsWith('kubevpn'))", message: "only approved containers"}]
---
apiVersion: admissionregistration.k8s.io/v1
kind: ValidatingAdmissionPolicyBinding
metadata: {name: policed}
spec: {policyName: policed, validationActions: [Deny], matchResources: {namespaceSelector: {matchLabels: {kubernetes.io/metadata.name: policed}}}}
`)
	t.Cleanup(func() {
		if out, err := s.tryKubectl(context.Background(), "delete", "validatingadmissionpolicy,validatingadmissionpolicybinding", "policed"); err != nil {
			t.Error(out, err)
		}
	})
	before := s.template(t)
	testenv.Eventually(t, 2*soon, func() error { // the API server reads policies later
		r := l.run(t, "kubevpn", "proxy", s.workload, "-n", s.namespace)
		if r.code != int(api.ExitInject) || !strings.Contains(r.stderr, "only approved containers") {
			l.run(t, "kubevpn", "leave", s.workload, "-n", s.namespace)
			return fmt.Errorf("%v", r)
		}
		return nil
	})
	s.rolledOut(t)
	if after := s.template(t); after != before {
		t.Errorf("the template was\n%s\nand is\n%s", before, after)
	}
}

// changesBroken uses an application that no longer starts, because its volume was deleted after the start.
func changesBroken(t *testing.T, l *laptop) {
	s := l.changed(t, "broken", "restricted", "Deployment", "", map[string]string{"app": "sessionAffinity: None"})
	s.kubectl(t, "-n", s.namespace, "create", "configmap", "config", "--from-literal=a=b")
	s.kubectl(t, "-n", s.namespace, "patch", s.workload, "-p",
		`{"spec":{"template":{"spec":{"volumes":[{"name":"c","configMap":{"name":"config"}}],"containers":[{"name":"app","volumeMounts":[{"name":"c","mountPath":"/c"}]}]}}}}`)
	s.rolledOut(t)
	s.kubectl(t, "-n", s.namespace, "delete", "configmap", "config")
	before := s.template(t)
	failure{code: api.ExitInject, message: `is not ready: MountVolume.SetUp failed for volume "c" : configmap "config" not found`, hint: ".",
		within: 4 * soon}.check(t, l.run(t, "kubevpn", "proxy", s.workload, "-n", s.namespace))
	if after := s.template(t); after != before {
		t.Errorf("the template was\n%s\nand is\n%s", before, after)
	}
}

// changesWaits uses a StatefulSet that replaces no pod, because one pod is not ready.
func changesWaits(t *testing.T, l *laptop) {
	s := l.changed(t, "waits", "restricted", "StatefulSet", "serviceName: app", map[string]string{"app": "sessionAffinity: None"})
	s.kubectl(t, "-n", s.namespace, "patch", s.workload, "-p",
		`{"spec":{"template":{"spec":{"containers":[{"name":"app","image":"none.invalid/none:1","imagePullPolicy":"Never"}]}}}}`)
	testenv.Eventually(t, 2*soon, func() error {
		if got := s.kubectl(t, "-n", s.namespace, "get", "pods", "-o", "jsonpath={.items[*].status.containerStatuses[*].state.waiting.reason}"); got != "ErrImageNeverPull" {
			return fmt.Errorf("the pod is %q", got)
		}
		return nil
	})
	before := s.template(t)
	failure{code: api.ExitInject, message: "statefulset/app replaces no pod before its pod app-0 is ready: .*ErrImageNeverPull", hint: ".",
		within: 4 * soon}.check(t, l.run(t, "kubevpn", "proxy", s.workload, "-n", s.namespace))
	if after := s.template(t); after != before {
		t.Errorf("the template was\n%s\nand is\n%s", before, after)
	}
}
