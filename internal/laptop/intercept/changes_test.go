package intercept

import (
	"errors"
	"fmt"
	"regexp"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"

	"kubevpn/internal/api"
	"kubevpn/internal/testenv"
)

const within = 5 * time.Second // the status must be true

// says waits until the status has the state, and a warning or error that matches.
func says(t *testing.T, i *Intercept, state api.InterceptState, text string) {
	t.Helper()
	testenv.Eventually(t, within, func() error {
		s := i.Status()
		all := strings.Join(append(s.Warnings, s.LastError), "\n")
		if s.Error != nil {
			all += s.Error.Message + s.Error.Hint
		}
		if s.State != state || !regexp.MustCompile(text).MatchString(all) {
			return fmt.Errorf("state %s: %s", s.State, all)
		}
		return nil
	})
}

// onlyPort changes the only port of a Service.
func onlyPort(change func(port map[string]any)) func(map[string]any) map[string]any {
	return func(o map[string]any) map[string]any {
		change(o["spec"].(map[string]any)["ports"].([]any)[0].(map[string]any))
		return o
	}
}

func field(value any, path ...string) func(map[string]any) map[string]any {
	return func(o map[string]any) map[string]any {
		if err := unstructured.SetNestedField(o, value, path...); err != nil {
			panic(err)
		}
		return o
	}
}

// What others change and keeps requests away is in the status, with the field and its manager, and the intercept is
// active again when they change it back.
func TestStatusNamesWhoTookTheRequestsAway(t *testing.T) {
	gone := func(map[string]any) map[string]any { return nil }
	for _, tt := range []struct {
		name, resource, fields string
		change                 func(map[string]any) map[string]any
		state                  api.InterceptState // also active if only a part is gone
		want                   string
	}{
		{"selector", "services", `{"f:spec":{"f:selector":{}}}`, field("b", "spec", "selector", "app"), api.InterceptWaiting,
			`port 80 of the Service web no longer leads to the intercepted pods: spec\.selector was set by argocd \(Apply, 2000-01-01T00:00:`},
		{"target_port", "services", `{"f:spec":{"f:ports":{"k:{\"port\":80,\"protocol\":\"TCP\"}":{"f:targetPort":{}}}}}`,
			onlyPort(func(p map[string]any) { p["targetPort"] = int64(9999) }), api.InterceptWaiting, `spec\.ports\.80\.targetPort was set by argocd`},
		{"port", "services", `{"f:spec":{"f:ports":{}}}`, onlyPort(func(p map[string]any) { p["port"] = int64(81); p["targetPort"] = int64(9999) }), api.InterceptWaiting, `spec\.ports was set by argocd`},
		{"type", "services", `{"f:spec":{"f:type":{}}}`, field("ExternalName", "spec", "type"), api.InterceptWaiting, `spec\.type was set by argocd`},
		{"deleted", "services", "", gone, api.InterceptWaiting, "the Service does not exist"},
		{"unknown_manager", "services", `{}`, field("b", "spec", "selector", "app"), api.InterceptWaiting, `names no manager of spec\.selector; the last other writer is argocd`},
		{"workload_deleted", "deployments", "", gone, api.InterceptWaiting, "deployment/web no longer exists"},
	} {
		for _, mode := range []string{api.ModeEphemeral, api.ModeSidecar} {
			t.Run(tt.name+"_"+mode, func(t *testing.T) {
				synctest.Test(t, func(t *testing.T) {
					w := newWorld(t, "web-a")
					i, _, err := begin(t, w, api.InterceptSpec{Mode: mode, Ports: []api.PortMap{{Container: 8080}}})
					if err != nil {
						t.Fatal(err)
					}
					says(t, i, api.InterceptActive, "^$")
					synctest.Wait() // the fake API server forgets what changes before the watch; the change comes before the first look
					w.mu.Lock()
					before := w.objects[tt.resource+"/web"].DeepCopy()
					w.mu.Unlock()
					w.set(tt.resource, "argocd", tt.fields, tt.change)
					says(t, i, tt.state, tt.want)
					w.restore(tt.resource, before)
					says(t, i, api.InterceptActive, "^$")
				})
			})
		}
	}
}

// restore writes an object as it was.
func (w *world) restore(resource string, o *unstructured.Unstructured) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.objects[resource+"/web"] = o.DeepCopy()
	w.tell(resource, o)
}

func TestNoReplicasNameTheirManager(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, "web-a")
		i, _, err := begin(t, w, api.InterceptSpec{})
		if err != nil {
			t.Fatal(err)
		}
		w.set("deployments", "keda\x1b[31m\n"+strings.Repeat("x", 300), `{"f:spec":{"f:replicas":{}}}`, field(int64(0), "spec", "replicas"))
		w.removePod("web-a")
		says(t, i, api.InterceptWaiting, `^deployment/web has no pods: spec\.replicas is 0: spec\.replicas was set by keda.{0,60} \(Apply`)
		w.set("deployments", "keda", `{"f:spec":{"f:replicas":{}}}`, field(int64(1), "spec", "replicas"))
		w.addPod("web-b")
		says(t, i, api.InterceptActive, "^$")
	})
}

// A reset of the template or of a target port is put right once. The second one ends the intercept: what others wrote
// stays, and the rest is undone before the intercept says so.
func TestResetByOthersIsPutRightOnce(t *testing.T) {
	for _, tt := range []struct {
		name, resource, fields, want string
		numeric                      bool // the target port
	}{
		{name: "template", resource: "deployments", fields: `{"f:spec":{"f:template":{"f:spec":{"f:containers":{}}}}}`,
			want: `removed the agent from the template of deployment/web.* spec\.template\.spec\.containers was set by argocd`},
		{name: "template_numeric", resource: "deployments", fields: `{"f:spec":{"f:template":{"f:spec":{"f:containers":{}}}}}`, numeric: true,
			want: `removed the agent from the template of deployment/web.* spec\.template\.spec\.containers was set by argocd`},
		{name: "target_port", resource: "services", fields: `{"f:spec":{"f:ports":{"k:{\"port\":80,\"protocol\":\"TCP\"}":{"f:targetPort":{}}}}}`, numeric: true,
			want: `port 80 of the Service web bypasses the agents: spec\.ports\.80\.targetPort was set by argocd`},
	} {
		t.Run(tt.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				w := newWorld(t, "web-a")
				if tt.numeric {
					w.objects["services/web"] = &unstructured.Unstructured{Object: onlyPort(func(p map[string]any) { p["targetPort"] = int64(8080) })(w.objects["services/web"].Object)}
					w.workload.Services[0] = *typed(t, w.objects["services/web"])
				}
				template, service := w.objects["deployments/web"].DeepCopy(), w.objects["services/web"].DeepCopy()
				original := map[string]*unstructured.Unstructured{"deployments": template, "services": service}[tt.resource]
				i, stop, err := begin(t, w, api.InterceptSpec{Mode: api.ModeSidecar, Ports: []api.PortMap{{Container: 8080}}})
				if err != nil {
					t.Fatal(err)
				}
				says(t, i, api.InterceptActive, "^$")
				reset := func() {
					time.Sleep(2 * time.Second)
					w.set(tt.resource, "argocd", tt.fields, func(map[string]any) map[string]any { return runtime.DeepCopyJSON(original.Object) })
				}
				reset()
				says(t, i, api.InterceptActive, tt.want+".*kubevpn has (added|set) it again, once")
				testenv.Eventually(t, within, func() error {
					w.mu.Lock()
					defer w.mu.Unlock()
					if to := typed(t, w.objects["services/web"]).Spec.Ports[0].TargetPort.String(); to != "http" {
						return errors.New(to)
					}
					return nil
				})
				w.mu.Lock()
				w.admit = func(*corev1.Pod) {
					if s := i.Status().State; s != api.InterceptLeaving {
						t.Errorf("the intercept is %s while the agent leaves the template", s)
					}
				}
				w.mu.Unlock()
				reset()
				says(t, i, api.InterceptFailed, tt.want)
				for key, before := range map[string]*unstructured.Unstructured{"deployments/web": template, "services/web": service} {
					if got := w.objects[key]; fmt.Sprint(got.Object["spec"]) != fmt.Sprint(before.Object["spec"]) || got.GetAnnotations()["kubevpn.dev/target-ports"] != "" {
						t.Errorf("%s was\n%v\nand is\n%v", key, before.Object, got.Object)
					}
				}
				if err := stop(); api.AsError(err) == nil || api.AsError(err).Code != api.ExitIntercept {
					t.Errorf("got %v", err)
				}
			})
		})
	}
}

// The agent sends to the port that the application had: a renumbered one ends the intercept, so that requests reach it.
func TestRenumberedPortEndsASidecar(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, "web-a")
		i, _, err := begin(t, w, api.InterceptSpec{Mode: api.ModeSidecar, Ports: []api.PortMap{{Container: 8080}}})
		if err != nil {
			t.Fatal(err)
		}
		w.set("deployments", "helm", `{"f:spec":{"f:template":{}}}`, func(o map[string]any) map[string]any {
			for _, c := range o["spec"].(map[string]any)["template"].(map[string]any)["spec"].(map[string]any)["containers"].([]any) {
				if c := c.(map[string]any); c["name"] == "app" {
					c["ports"].([]any)[0].(map[string]any)["containerPort"] = int64(9090)
				}
			}
			return o
		})
		says(t, i, api.InterceptFailed, "no longer has port 8080")
	})
}

// leave undoes the Services also when somebody else has removed the agent, the workload or a Service.
func TestLeaveUndoesWhatOthersLeft(t *testing.T) {
	for _, gone := range []string{"deployments", "services"} {
		t.Run(gone, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				w := newWorld(t, "web-a")
				w.workload.Template.Spec.Containers[0].Ports[0].Name = ""
				w.objects["deployments/web"].Object["spec"].(map[string]any)["template"].(map[string]any)["spec"].(map[string]any)["containers"].([]any)[0].(map[string]any)["ports"].([]any)[0].(map[string]any)["name"] = ""
				onlyPort(func(p map[string]any) { p["targetPort"] = int64(8080) })(w.objects["services/web"].Object)
				w.workload.Services[0] = *typed(t, w.objects["services/web"])
				before := w.objects["deployments/web"].DeepCopy()
				_, stop, err := begin(t, w, api.InterceptSpec{Mode: api.ModeSidecar, Ports: []api.PortMap{{Container: 8080}}})
				if err != nil {
					t.Fatal(err)
				}
				if to := typed(t, w.objects["services/web"]).Spec.Ports[0].TargetPort.String(); to != "kubevpn-t8080" {
					t.Errorf("the Service sends to %s", to)
				}
				w.set(gone, "", "", func(map[string]any) map[string]any { return nil })
				if err := stop(); err != nil {
					t.Error(err)
				}
				if gone == "services" {
					if got := w.objects["deployments/web"]; fmt.Sprint(got.Object["spec"]) != fmt.Sprint(before.Object["spec"]) {
						t.Errorf("the template is\n%v", got)
					}
				} else if to := typed(t, w.objects["services/web"]).Spec.Ports[0].TargetPort.String(); to != "8080" {
					t.Errorf("the Service sends to %s", to)
				}
			})
		})
	}
}
