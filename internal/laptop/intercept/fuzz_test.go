package intercept

import (
	"encoding/json"
	"testing"
	"unicode/utf8"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"

	"kubevpn/internal/kube/workloads"
)

func parseObject(text []byte) map[string]any {
	var o unstructured.Unstructured
	if err := o.UnmarshalJSON(text); err != nil {
		return nil
	}
	return o.Object
}

// FuzzServiceAnnotation undoes a Service with any annotation, which every user with the right to patch the Service can
// write. undoService changes existing target ports and the annotation, and nothing else. It undoes patchService.
func FuzzServiceAnnotation(f *testing.F) {
	const service = `{"apiVersion":"v1","kind":"Service","metadata":{"name":"web"},"spec":{"selector":{"app":"web"},"ports":[{"port":80,"protocol":"TCP","targetPort":8080},{"port":53,"protocol":"UDP","targetPort":"dns"},{"port":443}]}}`
	for _, annotation := range []string{
		"", "null", "{}", "[]", `{"tcp/80":{"from":8080,"to":"kubevpn-t8080"}}`, `{"tcp/80":{"from":8080,"to":8080}}`, `{"udp/53":{"from":"dns","to":"dns"}}`,
		`{"tcp/80":{"from":{"a":[1,{"b":null}]},"to":"x"}}`, `{"tcp/80":{"from":1e400,"to":"x"}}`, `{"tcp/80":{"from":1.5,"to":"x"}}`, `{"tcp/80":null}`,
		`{"tcp/443":{"from":null,"to":""}}`, `{"TCP/80":{"from":-1,"to":"x"}}`, `{"tcp/80":{"to":"x"},"tcp/80":{"from":70000,"to":"y"}}`,
	} {
		f.Add([]byte(service), annotation, "x", int32(80))
	}
	f.Add([]byte(`{"apiVersion":"v1","kind":"Service","metadata":{"name":"web","annotations":[]},"spec":{"ports":{}}}`), "{}", "x", int32(80))
	f.Add([]byte(`{"apiVersion":"v1","kind":"Service","metadata":{"name":"web"},"spec":{"ports":[null,1,{"port":"80"}]}}`), "{}", "x", int32(80))
	f.Fuzz(func(t *testing.T, text []byte, annotation, to string, number int32) {
		service := parseObject(text)
		if service == nil || !utf8.ValidString(to) { // a name is ASCII
			return
		}
		if patched, err := patchService(service, []servicePatch{{service: "web", protocol: "tcp", port: number, to: to}}); err == nil {
			_, had, _ := unstructured.NestedString(service, "metadata", "annotations", workloads.TargetPorts)
			annotations, _, _ := unstructured.NestedMap(service, "metadata", "annotations")
			undone, err := undoService(patched)
			// undoService also removes an existing annotation, an empty map of annotations, and target ports that the
			// API server rejects.
			if !had && (annotations == nil || len(annotations) > 0) && oddPorts(service) == 0 {
				if d := cmp.Diff(service, undone); d != "" || err != nil {
					t.Errorf("patched and undone: %v (-before +after)\n%s", err, d)
				}
			}
		}
		if unstructured.SetNestedField(service, annotation, "metadata", "annotations", workloads.TargetPorts) != nil {
			return
		}
		before := runtime.DeepCopyJSON(service)
		undone, err := undoService(service)
		if d := cmp.Diff(before, service); d != "" {
			t.Errorf("the argument is changed:\n%s", d)
		}
		if err != nil {
			return
		}
		for _, o := range []map[string]any{before, undone} {
			unstructured.RemoveNestedField(o, "metadata", "annotations")
			if err := eachPort(o, func(port map[string]any) { delete(port, "targetPort") }); err != nil {
				t.Fatal(err)
			}
		}
		if d := cmp.Diff(before, undone); d != "" {
			t.Errorf("the annotation changes more than target ports (-before +after)\n%s", d)
		}
		if err := eachPort(undone, func(port map[string]any) { oddTarget(t, port) }); err != nil {
			t.Error(err)
		}
	})
}

// oddTarget fails the test if a target port is neither a string nor an integer.
func oddTarget(t *testing.T, port map[string]any) {
	switch v := port["targetPort"].(type) {
	case nil, string, int64:
	default:
		t.Errorf("a target port is %T %v", v, v)
	}
}

// oddPorts counts invalid and duplicate ports.
func oddPorts(service map[string]any) (n int) {
	seen := map[string]bool{}
	field, _, _ := unstructured.NestedFieldNoCopy(service, "spec", "ports")
	list, _ := field.([]any)
	for _, raw := range list {
		port, is := raw.(map[string]any)
		_, null := port["targetPort"]
		switch port["targetPort"].(type) {
		case int64, string:
		case nil:
			if null {
				n++
			}
		default:
			n++
		}
		if !is || seen[portKey(port)] {
			n++
		}
		seen[portKey(port)] = true
	}
	return n
}

// FuzzTemplate removes agents from any template, then adds one and removes it.
func FuzzTemplate(f *testing.F) {
	for _, text := range []string{
		`{"spec":{"containers":[{"name":"app","image":"web:1","ports":[{"containerPort":8080,"name":"http"}]}]}}`,
		`{"metadata":{"annotations":{"a":"b"}},"spec":{"containers":[{"name":"kubevpn-agent-1","env":[{"name":"KUBEVPN_DEFAULT_CONTAINER","value":"app annotations metadata"},{"name":"KUBEVPN_AGENT_OWNER","value":"x"}]},{"name":"app"}]}}`,
		`{"metadata":{"annotations":{"kubectl.kubernetes.io/default-container":"app"}},"spec":{"containers":[{"name":"kubevpn-agent-1","args":["agent","--listen","tcp/8080:70000","--listen","tcp/8080:"],"ports":[{"containerPort":18080,"name":"http"}],"env":[{"name":"KUBEVPN_DEFAULT_CONTAINER","value":"app spec containers annotations annotations metadata"}]},{"name":"app"}]}}`,
		`{"metadata":{"annotations":{"kubectl.kubernetes.io/default-container":" "}},"spec":{"containers":[{"name":"kubevpn-agent-1","env":[{"name":"KUBEVPN_DEFAULT_CONTAINER","value":" "}]}]}}`,
		`{"spec":{"containers":[null,1,"app",{"name":1},{"name":"kubevpn-agent-","env":{}},{"name":"kubevpn-agent-2","env":[null,{"name":null}]}]}}`,
		`{"spec":{"containers":{}}}`, `{"spec":null}`, `{}`,
	} {
		f.Add([]byte(text))
	}
	f.Fuzz(func(t *testing.T, text []byte) {
		var template map[string]any
		if json.Unmarshal(text, &template) != nil || template == nil {
			return
		}
		object := parseObject(append(append([]byte(`{"apiVersion":"v1","kind":"PodTemplate","template":`), text...), '}'))
		if object == nil { // decodes numbers as the API server's client does
			return
		}
		template, _ = object["template"].(map[string]any)
		before := runtime.DeepCopyJSON(template)
		without, last, err := undoSidecar(template, "")
		if d := cmp.Diff(before, template); d != "" {
			t.Fatalf("the argument is changed:\n%s", d)
		}
		if err != nil {
			return
		}
		if !last {
			t.Error("last is false after the agents of all owners were removed")
		}
		again, _, err := undoSidecar(without, "")
		if d := cmp.Diff(without, again); d != "" || err != nil {
			t.Errorf("a second time: %v\n%s", err, d)
		}
		ports := []workloads.Port{{Protocol: "tcp", Port: 8080, Name: "http", Container: "app"}}
		p, err := planSidecar(without, "app", ports, workloads.Agent{Image: "kubevpn:test", Owner: "hash", OwnerName: "$(X) ann@laptop"})
		if err != nil {
			return
		}
		if d := cmp.Diff(undone(t, p.template, "another"), p.template); d != "" {
			t.Errorf("undoSidecar of another owner removes it:\n%s", d)
		}
		if d := cmp.Diff(without, undone(t, p.template, "hash"), cmpopts.EquateEmpty()); d != "" {
			t.Errorf("added and undone (-before +after)\n%s", d)
		}
	})
}

func undone(t *testing.T, template map[string]any, owner string) map[string]any {
	t.Helper()
	without, _, err := undoSidecar(template, owner)
	if err != nil {
		t.Fatal(err)
	}
	return without
}
