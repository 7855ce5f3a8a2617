package intercept

import (
	"encoding/json"
	"fmt"
	"maps"
	"math/rand/v2"
	"reflect"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	"sigs.k8s.io/yaml"

	"kubevpn/internal/api"
	"kubevpn/internal/kube/workloads"
)

var (
	mySidecar   = workloads.Agent{Image: "registry.example/kubevpn:1", Owner: "5e2f", OwnerName: "me@$(HOME)"}
	yourSidecar = workloads.Agent{Image: "registry.example/kubevpn:1", Owner: "77aa", OwnerName: "you@host"}
)

// object reads YAML as the dynamic client reads JSON.
func object(t *testing.T, text string) map[string]any {
	t.Helper()
	data, err := yaml.YAMLToJSON([]byte(text))
	if err != nil {
		t.Fatal(err)
	}
	o := new(unstructured.Unstructured)
	if err := o.UnmarshalJSON(slices.Concat([]byte(`{"kind":"x","o":`), data, []byte("}"))); err != nil {
		t.Fatal(err)
	}
	return o.Object["o"].(map[string]any)
}

// agentOf returns a template's first container.
func agentOf(t *testing.T, template map[string]any) (c corev1.Container) {
	t.Helper()
	containers, err := containersOf(template)
	if err != nil {
		t.Fatal(err)
	}
	if err := runtime.DefaultUnstructuredConverter.FromUnstructured(containers[0].(map[string]any), &c); err != nil {
		t.Fatal(err)
	}
	return c
}

func TestPlanSidecarListensForItsPorts(t *testing.T) {
	const template = `
spec:
  containers:
  - {name: helper, ports: [{containerPort: 18080}]}
  - {name: app, ports: [{name: http, containerPort: 8080}, {name: dns, containerPort: 53, protocol: UDP}]}`
	http := workloads.Port{Protocol: "tcp", Port: 8080, Name: "http", Container: "app", Services: []workloads.ServicePort{
		{Service: "named", Port: 80, Target: "http"}, {Service: "numbered", Port: 80}}}
	dns := workloads.Port{Protocol: "udp", Port: 53, Name: "dns", Container: "app"}
	plain := workloads.Port{Protocol: "tcp", Port: 9000, Services: []workloads.ServicePort{{Service: "plain", Port: 1}}}
	for _, tt := range []struct {
		name     string
		ports    []workloads.Port
		args     string
		declared string
		services []servicePatch
	}{
		{"named", []workloads.Port{http}, "tcp/8080:18081", "http=18081/TCP", []servicePatch{{"numbered", "tcp", 80, "http", false}}},
		{"udp", []workloads.Port{dns}, "udp/53:10053", "dns=10053/UDP", nil},
		{"without_name", []workloads.Port{plain}, "tcp/9000:19000", "kubevpn-t9000=19000/TCP", []servicePatch{{"plain", "tcp", 1, "kubevpn-t9000", true}}},
		{"several", []workloads.Port{dns, http}, "udp/53:10053 tcp/8080:18081", "dns=10053/UDP http=18081/TCP", []servicePatch{{"numbered", "tcp", 80, "http", false}}},
		{"one_beside_another", []workloads.Port{{Protocol: "tcp", Port: 5000}, {Protocol: "tcp", Port: 15000}}, "tcp/5000:15001 tcp/15000:25000", "kubevpn-t5000=15001/TCP kubevpn-t15000=25000/TCP", nil},
		{"highest", []workloads.Port{{Protocol: "tcp", Port: 65535}, {Protocol: "tcp", Port: 55534}}, "tcp/65535:20000 tcp/55534:65534", "kubevpn-t65535=20000/TCP kubevpn-t55534=65534/TCP", nil},
	} {
		t.Run(tt.name, func(t *testing.T) {
			p, err := planSidecar(object(t, template), "app", tt.ports, mySidecar)
			if err != nil {
				t.Fatal(err)
			}
			c := agentOf(t, p.template)
			if got := strings.Join(slices.DeleteFunc(c.Args[1:], func(s string) bool { return s == "--listen" }), " "); got != tt.args {
				t.Errorf("listens %s, want %s", got, tt.args)
			}
			var declared []string
			for i, port := range c.Ports {
				declared = append(declared, fmt.Sprintf("%s=%d/%s", port.Name, port.ContainerPort, port.Protocol))
				if p.ports[i].Port != tt.ports[i].Port || int32(p.ports[i].Listen) != port.ContainerPort {
					t.Errorf("%+v for %+v", p.ports[i], port)
				}
			}
			if got := strings.Join(declared, " "); got != tt.declared {
				t.Errorf("declares %s, want %s", got, tt.declared)
			}
			if d := cmp.Diff(tt.services, p.services, cmp.AllowUnexported(servicePatch{})); d != "" {
				t.Errorf("Services (-want +got):\n%s", d)
			}
			if c.Name != "kubevpn-agent-1" || environment(containerNamed(p.template, c.Name), api.AgentNameVariable) != "me@$$(HOME)" {
				t.Errorf("%+v", c)
			}
		})
	}
	if _, err := planSidecar(object(t, template), "app", nil, mySidecar); api.AsError(err).Code != api.ExitWorkload {
		t.Errorf("no ports: %v", err)
	}
}

func containerNamed(template map[string]any, name string) map[string]any {
	containers, err := containersOf(template)
	if err != nil {
		return nil
	}
	for _, raw := range containers {
		if c := raw.(map[string]any); c["name"] == name {
			return c
		}
	}
	return nil
}

// Either agent may become the leader.
func TestSecondSidecarListensOnTheSamePorts(t *testing.T) {
	x := object(t, `{spec: {containers: [{name: app, ports: [{containerPort: 8080}]}]}}`)
	ports := []workloads.Port{{Protocol: "tcp", Port: 8080, Container: "app"}}
	first, err := planSidecar(x, "app", ports, mySidecar)
	if err != nil {
		t.Fatal(err)
	}
	both, err := planSidecar(first.template, "app", ports, yourSidecar)
	if err != nil {
		t.Fatal(err)
	}
	c := agentOf(t, both.template)
	if one := agentOf(t, first.template); c.Name != "kubevpn-agent-2" || !cmp.Equal(c.Ports, one.Ports) || !cmp.Equal(c.Args, one.Args) {
		t.Errorf("%+v beside %+v", c, one)
	}
	for _, order := range [][]workloads.Agent{{mySidecar, yourSidecar}, {yourSidecar, mySidecar}} {
		left := both.template
		for i, a := range order {
			var last bool
			if left, last, err = undoSidecar(left, a.Owner); err != nil || last != (i == 1) {
				t.Errorf("last = %v, %v", last, err)
			}
		}
		if d := cmp.Diff(x, left); d != "" {
			t.Errorf("(-before +after):\n%s", d)
		}
	}
	if all, last, err := undoSidecar(both.template, ""); err != nil || !last || !cmp.Equal(x, all) {
		t.Errorf("all owners: %v, %v\n%s", last, err, cmp.Diff(x, all))
	}
}

// random generates pod templates, and changes that CI may make to them.
type random struct{ *rand.Rand }

func (r random) of(words ...string) string { return words[r.IntN(len(words))] }

func (r random) labels() map[string]any {
	m := map[string]any{}
	for range r.IntN(3) {
		m[r.of("app", "tier", "team")] = r.of("a", "b", "c")
	}
	return m
}

// value returns any JSON, for fields that this program does not know.
func (r random) value(depth int) any {
	switch n := r.IntN(7); {
	case n == 0 && depth > 0:
		m := map[string]any{}
		for range r.IntN(3) {
			m[r.of("x", "y", "z")] = r.value(depth - 1)
		}
		return m
	case n == 1 && depth > 0:
		l := []any{}
		for range r.IntN(3) {
			l = append(l, r.value(depth-1))
		}
		return l
	case n == 2:
		return r.Int64N(100000)
	case n == 3:
		return r.Float64()
	case n == 4:
		return nil
	case n == 5:
		return r.IntN(2) == 0
	}
	return r.of("", "text", "$(X)")
}

func (r random) container(name string) map[string]any {
	c := map[string]any{"name": name, "image": r.of("i:1", "i:2"), "fieldOfTheFuture": r.value(3)}
	if r.IntN(2) == 0 {
		var ports []any
		for i := range 1 + r.IntN(3) {
			p := map[string]any{"containerPort": 1 + r.Int64N(65535)}
			if r.IntN(2) == 0 {
				p["name"] = fmt.Sprintf("%s%d", r.of("http", "grpc"), i)
			}
			if r.IntN(2) == 0 {
				p["protocol"] = r.of("TCP", "UDP")
			}
			ports = append(ports, p)
		}
		c["ports"] = ports
	}
	if r.IntN(2) == 0 {
		c["env"] = []any{map[string]any{"name": "A", "value": r.of("", "1")}}
	}
	if r.IntN(2) == 0 {
		c["resources"] = map[string]any{"requests": map[string]any{"cpu": r.of("100m", "1")}}
	}
	return c
}

func (r random) template() map[string]any {
	spec := map[string]any{"fieldOfTheFuture": r.value(3)}
	var containers []any
	for i := range 1 + r.IntN(3) {
		containers = append(containers, r.container(fmt.Sprintf("c%d", i)))
	}
	spec["containers"] = containers
	if r.IntN(3) == 0 {
		spec["initContainers"] = []any{r.container("init")}
	}
	if r.IntN(3) == 0 {
		spec["nodeSelector"] = r.labels()
	}
	t := map[string]any{"spec": spec}
	if r.IntN(4) > 0 {
		m := map[string]any{}
		if r.IntN(2) == 0 {
			m["labels"] = r.labels()
		}
		if r.IntN(2) == 0 {
			m["creationTimestamp"] = nil
		}
		if r.IntN(2) == 0 {
			m["annotations"] = r.labels()
			if r.IntN(3) == 0 {
				m["annotations"].(map[string]any)[defaultContainerAnnotation] = "c0"
			}
		}
		t["metadata"] = m
	}
	return t
}

// edit returns a change of a template that keeps agents.
func (r random) edit() func(map[string]any) {
	image, label, extra := r.of("i:3", "i:4"), r.of("v1", "v2"), r.container("extra")
	do := []func(template, spec map[string]any){
		func(template, spec map[string]any) { containerNamed(template, "c0")["image"] = image },
		func(template, spec map[string]any) {
			containerNamed(template, "c0")["env"] = []any{map[string]any{"name": "B", "value": label}}
		},
		func(template, spec map[string]any) { set(template, label, "metadata", "labels", "version") },
		func(template, spec map[string]any) { set(template, label, "metadata", "annotations", "checksum") },
		func(template, spec map[string]any) { spec["containers"] = append(spec["containers"].([]any), extra) },
		func(template, spec map[string]any) { spec["serviceAccountName"] = label },
		func(template, spec map[string]any) { delete(spec, "nodeSelector") },
		func(template, spec map[string]any) {
			spec["containers"] = slices.DeleteFunc(spec["containers"].([]any), func(c any) bool { return c.(map[string]any)["name"] == "c1" })
		},
	}
	chosen := do[r.IntN(len(do))]
	return func(template map[string]any) { chosen(template, template["spec"].(map[string]any)) }
}

func set(o map[string]any, value string, path ...string) {
	if err := unstructured.SetNestedField(o, value, path...); err != nil {
		panic(err)
	}
}

// ports returns the ports that a container of the template declares, and one that it does not declare.
func (r random) ports(template map[string]any) []workloads.Port {
	ports := []workloads.Port{{Protocol: r.of("tcp", "udp"), Port: uint16(1 + r.IntN(65535)), Services: []workloads.ServicePort{{Service: "s", Port: 80}}}}
	declared, _ := containerNamed(template, "c0")["ports"].([]any)
	for _, raw := range declared {
		p := raw.(map[string]any)
		name, _ := p["name"].(string)
		protocol, _ := p["protocol"].(string)
		port := workloads.Port{Protocol: "tcp", Port: uint16(p["containerPort"].(int64)), Name: name}
		if protocol == "UDP" {
			port.Protocol = "udp"
		}
		ports = append(ports, port)
	}
	return ports
}

func TestUndoSidecarKeepsLaterChanges(t *testing.T) {
	for seed := range uint64(1000) {
		r := random{rand.New(rand.NewPCG(seed, 0))}
		x := r.template()
		before := runtime.DeepCopyJSON(x)
		p, err := planSidecar(x, "c0", r.ports(x), mySidecar)
		if err != nil {
			t.Fatalf("seed %d: %v", seed, err)
		}
		same := func(what string, want, got map[string]any) {
			t.Helper()
			if !reflect.DeepEqual(want, got) {
				t.Fatalf("seed %d: %s (-want +got):\n%s", seed, what, cmp.Diff(want, got))
			}
		}
		same("plan's argument", before, x)
		if reflect.DeepEqual(x, p.template) {
			t.Fatalf("seed %d: plan does nothing", seed)
		}
		// As the API server returns it.
		planned := throughJSON(t, p.template)
		for range r.IntN(4) {
			edit := r.edit()
			edit(x)
			edit(planned)
		}
		edited := runtime.DeepCopyJSON(planned)
		got, last, err := undoSidecar(planned, mySidecar.Owner)
		if err != nil || !last {
			t.Fatalf("seed %d: last %v, %v", seed, last, err)
		}
		same("undone, against never planned", throughJSON(t, x), got)
		same("undo's argument", edited, planned)
		again, _, err := undoSidecar(got, mySidecar.Owner)
		if err != nil {
			t.Fatal(err)
		}
		same("undone twice", got, again)
		other, _, err := undoSidecar(edited, yourSidecar.Owner)
		if err != nil {
			t.Fatal(err)
		}
		same("another owner's leave", edited, other)
	}
}

func throughJSON(t *testing.T, o map[string]any) map[string]any {
	t.Helper()
	data, err := json.Marshal(o)
	if err != nil {
		t.Fatal(err)
	}
	return object(t, string(data))
}

// CI has set another default container of kubectl.
func TestUndoSidecarKeepsAnnotation(t *testing.T) {
	p, err := planSidecar(object(t, `{spec: {containers: [{name: app}]}}`), "app", []workloads.Port{{Protocol: "tcp", Port: 1}}, mySidecar)
	if err != nil {
		t.Fatal(err)
	}
	if err := unstructured.SetNestedField(p.template, "db", "metadata", "annotations", defaultContainerAnnotation); err != nil {
		t.Fatal(err)
	}
	got, _, err := undoSidecar(p.template, "")
	want := object(t, `{metadata: {annotations: {kubectl.kubernetes.io/default-container: db}}, spec: {containers: [{name: app}]}}`)
	if d := cmp.Diff(want, got); d != "" || err != nil {
		t.Errorf("%v (-want +got):\n%s", err, d)
	}
}

func TestPatchServiceKeepsUnknownFields(t *testing.T) {
	const service = `
metadata: {name: web, fieldOfTheFuture: 1}
spec:
  ports:
  - {name: http, port: 80, targetPort: 8080, protocol: TCP, appProtocol: x}
  - {port: 80, targetPort: dns, protocol: UDP}
  - {port: 81}`
	patches := []servicePatch{{"web", "tcp", 80, "http", false}, {"web", "tcp", 81, "kubevpn-t81", true}, {"other", "udp", 80, "no", false}}
	x := object(t, service)
	patched, err := patchService(x, patches)
	if err != nil {
		t.Fatal(err)
	}
	var targets []any
	if err := eachPort(patched, func(p map[string]any) { targets = append(targets, p["targetPort"]) }); err != nil {
		t.Fatal(err)
	}
	if d := cmp.Diff([]any{"http", "dns", "kubevpn-t81"}, targets); d != "" {
		t.Errorf("target ports (-want +got):\n%s", d)
	}
	// Another owner's later patch keeps the original target ports.
	again, err := patchService(throughJSON(t, patched), append(patches, servicePatch{"web", "udp", 80, "kubevpn-u53", true}))
	if err != nil {
		t.Fatal(err)
	}
	got, err := undoService(throughJSON(t, again))
	if d := cmp.Diff(x, got); d != "" || err != nil {
		t.Errorf("%v (-before +after):\n%s", err, d)
	}
	if d := cmp.Diff(object(t, service), x); d != "" {
		t.Errorf("the argument was changed:\n%s", d)
	}

	changed := throughJSON(t, patched) // by CI
	if err := eachPort(changed, func(p map[string]any) {
		if p["name"] == "http" {
			p["targetPort"] = "newer"
		}
	}); err != nil {
		t.Fatal(err)
	}
	got, err = undoService(changed)
	want := object(t, strings.Replace(service, "targetPort: 8080", "targetPort: newer", 1))
	if d := cmp.Diff(want, got); d != "" || err != nil {
		t.Errorf("%v (-want +got):\n%s", err, d)
	}
	if same, err := patchService(x, []servicePatch{{"other", "tcp", 80, "http", false}}); err != nil || !cmp.Equal(x, same) {
		t.Errorf("a patch of another Service changed %s, %v", cmp.Diff(x, same), err)
	}
}

// Agents of one pod recognize each other by their user. Images of containers beside them often run as 65532.
func TestSidecarsShareAUserThatNobodyElseHas(t *testing.T) {
	template := func(securityContext string) map[string]any {
		return object(t, `
spec:
  securityContext: {runAsUser: 65532}
  containers:
  - {name: app, ports: [{name: http, containerPort: 8080}], securityContext: `+securityContext+`}`)
	}
	ports := []workloads.Port{{Protocol: "tcp", Port: 8080, Name: "http", Container: "app"}}
	plan := func(template map[string]any, a workloads.Agent) (map[string]any, corev1.SecurityContext) {
		p, err := planSidecar(template, "app", ports, a)
		if err != nil {
			t.Fatal(err)
		}
		return p.template, *agentOf(t, p.template).SecurityContext
	}
	planned, mine := plan(template("{}"), mySidecar)
	user := *mine.RunAsUser
	if user < 1000 || user == 65532 || user > 65535 || *mine.RunAsGroup != user {
		t.Errorf("the agent runs as %d:%d", user, *mine.RunAsGroup)
	}
	if _, yours := plan(planned, yourSidecar); *yours.RunAsUser != user {
		t.Errorf("another owner's agent runs as %d, the first as %d", *yours.RunAsUser, user)
	}
	if _, other := plan(template(fmt.Sprintf("{runAsUser: %d}", user)), mySidecar); *other.RunAsUser == user {
		t.Errorf("the agent and the application run as %d", user)
	}
}

// The agent has limits if the application has, because the namespace may demand them.
func TestSidecarHasTheLimitsThatOthersHave(t *testing.T) {
	limited := func(names ...corev1.ResourceName) corev1.Container {
		c := corev1.Container{Resources: corev1.ResourceRequirements{Limits: corev1.ResourceList{}}}
		for _, name := range names {
			c.Resources.Limits[name] = resource.MustParse("1")
		}
		return c
	}
	both := limited(corev1.ResourceCPU, corev1.ResourceMemory)
	for _, tt := range []struct {
		containers []corev1.Container
		want       []corev1.ResourceName
	}{
		{[]corev1.Container{limited()}, nil},
		{[]corev1.Container{both, limited(corev1.ResourceMemory)}, []corev1.ResourceName{corev1.ResourceMemory}},
		{[]corev1.Container{both, both}, []corev1.ResourceName{corev1.ResourceCPU, corev1.ResourceMemory}},
	} {
		got := slices.Sorted(maps.Keys(sidecarLimits(corev1.PodSpec{Containers: tt.containers})))
		if !slices.Equal(got, tt.want) {
			t.Errorf("got %v, want %v", got, tt.want)
		}
	}
}
