package intercept

import (
	"encoding/json"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"

	"kubevpn/internal/api"
	"kubevpn/internal/cluster"
)

// A sidecar is an agent in the pod template. It takes what Services send by the name of a container's port: of two containers
// that give a port the same name, the control plane takes the first one's number. So the agent comes first, and gives a port of
// its own the name of the application's:
//
//	Service web ── targetPort http ──▶ containers: kubevpn-agent-1  http 18080   --listen tcp/8080:18080
//	                                               app              http  8080   (as it was, its probes as well)
//
// Pods without the agent, before the rollout or after one that dropped it, serve as ever. A Service that names a number gets
// the name instead. Only where the application's port has no name does the Service need one that no other pod has.
//
// All is done on the objects as the API server gives them, so that fields that this program does not know stay. What it takes
// to undo it is in what was added: in the agent's container, and in an annotation of the Service.
const (
	defaultContainerAnnotation = "kubectl.kubernetes.io/default-container"
	// sidecarDefaultVariable of the agent's environment is set where the template had no annotation that names a container for
	// kubectl to take, so that it is not the agent: see addDefault.
	sidecarDefaultVariable = "KUBEVPN_DEFAULT_CONTAINER"
)

// sidecarAgent is the agent that a template is to have.
type sidecarAgent struct {
	image, owner, ownerName string
}

// sidecarPlan is what has to be done so that Services lead to the agent.
type sidecarPlan struct {
	template map[string]any
	ports    []api.AgentPort // where the agent listens for what
	services []servicePatch
}

// servicePatch moves a Service's port to the agent.
type servicePatch struct {
	service  string
	protocol string // "tcp" or "udp"
	port     int32
	to       string // the target port's name
	// rolled says that only pods with the agent have that name: the Service has to wait until all have the agent, and to be
	// undone before they lose it.
	rolled bool
}

// planSidecar adds the owner's agent to the template of pods whose container listens on ports. It changes neither argument.
func planSidecar(template map[string]any, container string, ports []cluster.Port, a sidecarAgent) (sidecarPlan, error) {
	template = runtime.DeepCopyJSON(template)
	containers, err := containersOf(template)
	if err != nil {
		return sidecarPlan{}, err
	}
	var spec corev1.PodSpec
	if raw, _ := template["spec"].(map[string]any); raw != nil {
		if err := runtime.DefaultUnstructuredConverter.FromUnstructured(raw, &spec); err != nil {
			return sidecarPlan{}, fmt.Errorf("reading the pod template: %w", err)
		}
	}
	if len(ports) == 0 {
		return sidecarPlan{}, api.Errorf(api.ExitWorkload, "no port of the container %s is known, and a sidecar takes only what Services send to one", container).
			WithHint("Name it: --portmap CONTAINER:LOCAL")
	}
	c := sidecarContainer(a, nextSidecar(spec))
	p := sidecarPlan{template: template}
	taken := takenBy(spec)
	for _, port := range ports {
		taken[port.Port] = true // which may not be declared
	}
	for _, port := range ports {
		name, listen := sidecarPort(spec, c, port, taken)
		taken[listen] = true
		protocol := corev1.Protocol(strings.ToUpper(port.Protocol))
		c.Ports = append(c.Ports, corev1.ContainerPort{Name: name, ContainerPort: int32(listen), Protocol: protocol})
		c.Args = append(c.Args, "--listen", fmt.Sprintf("%s/%d:%d", port.Protocol, port.Port, listen))
		p.ports = append(p.ports, api.AgentPort{Protocol: port.Protocol, Port: port.Port, Listen: listen})
		for _, s := range port.Services {
			if s.Target != name {
				p.services = append(p.services, servicePatch{s.Service, port.Protocol, s.Port, name, name != port.Name})
			}
		}
	}
	ours, err := addDefault(template, spec, container)
	if err != nil {
		return sidecarPlan{}, err
	}
	if ours != "" {
		c.Env = append(c.Env, corev1.EnvVar{Name: sidecarDefaultVariable, Value: ours})
	}
	raw, err := runtime.DefaultUnstructuredConverter.ToUnstructured(&c)
	if err != nil {
		return sidecarPlan{}, fmt.Errorf("writing the agent's container: %w", err)
	}
	return p, unstructured.SetNestedSlice(template, append([]any{raw}, containers...), "spec", "containers")
}

// sidecarContainer is admitted where pod security enforces "restricted". The request for a processor is for autoscalers,
// which give up on a pod of which one container has none.
func sidecarContainer(a sidecarAgent, name string) corev1.Container {
	return corev1.Container{
		Name:            name,
		Image:           a.image,
		ImagePullPolicy: corev1.PullIfNotPresent,
		Args:            []string{"agent"},
		Env: []corev1.EnvVar{
			{Name: api.AgentOwnerVariable, Value: a.owner},
			{Name: api.AgentNameVariable, Value: strings.ReplaceAll(a.ownerName, "$", "$$")}, // or the kubelet replaces $(NAME)
			{Name: "POD_IP", ValueFrom: &corev1.EnvVarSource{FieldRef: &corev1.ObjectFieldSelector{FieldPath: "status.podIPs"}}},
		},
		Resources: corev1.ResourceRequirements{Requests: corev1.ResourceList{
			corev1.ResourceCPU: resource.MustParse("10m"), corev1.ResourceMemory: resource.MustParse("32Mi"),
		}},
		TerminationMessagePolicy: corev1.TerminationMessageFallbackToLogsOnError,
		SecurityContext: &corev1.SecurityContext{
			RunAsUser:                new(int64(65532)),
			RunAsGroup:               new(int64(65532)),
			RunAsNonRoot:             new(true),
			AllowPrivilegeEscalation: new(false),
			ReadOnlyRootFilesystem:   new(true),
			Capabilities:             &corev1.Capabilities{Drop: []corev1.Capability{"ALL"}},
			SeccompProfile:           &corev1.SeccompProfile{Type: corev1.SeccompProfileTypeRuntimeDefault},
		},
	}
}

// sidecarPort chooses what the agent calls a port, and where it listens for it: as another owner's agent in the template does;
// else by the application's name, or by one of our own where it has none, or another port of c took it.
func sidecarPort(spec corev1.PodSpec, c corev1.Container, port cluster.Port, taken map[uint16]bool) (name string, listen uint16) {
	used := func(name string) bool {
		return slices.ContainsFunc(c.Ports, func(p corev1.ContainerPort) bool { return p.Name == name })
	}
	prefix := fmt.Sprintf("%s/%d:", port.Protocol, port.Port)
	for _, other := range spec.Containers {
		if !isAgent(other.Name) {
			continue
		}
		for _, arg := range other.Args {
			n, err := strconv.ParseUint(strings.TrimPrefix(arg, prefix), 10, 16)
			if !strings.HasPrefix(arg, prefix) || err != nil {
				continue
			}
			for _, p := range other.Ports {
				if p.ContainerPort == int32(n) && !used(p.Name) {
					return p.Name, uint16(n)
				}
			}
		}
	}
	if name = port.Name; name == "" || used(name) {
		name = fmt.Sprintf("kubevpn-%s%d", port.Protocol[:1], port.Port)
	}
	const first, last = 10000, 65535 // ports that need no privilege, and seldom are an application's
	listen = first + port.Port%(last-first)
	for taken[listen] {
		if listen++; listen < first {
			listen = first
		}
	}
	return name, listen
}

// takenBy are the ports that containers declare.
func takenBy(spec corev1.PodSpec) map[uint16]bool {
	taken := make(map[uint16]bool)
	for _, list := range [][]corev1.Container{spec.Containers, spec.InitContainers} {
		for _, c := range list {
			for _, p := range c.Ports {
				taken[uint16(p.ContainerPort)] = true
			}
		}
	}
	return taken
}

func isAgent(container string) bool { return strings.HasPrefix(container, api.AgentPrefix) }

func nextSidecar(spec corev1.PodSpec) string {
	for n := 1; ; n++ {
		name := api.AgentPrefix + strconv.Itoa(n)
		if !slices.ContainsFunc(spec.Containers, func(c corev1.Container) bool { return c.Name == name }) {
			return name
		}
	}
}

// addDefault keeps kubectl from taking the agent for the container that is meant. ours is what it takes to undo that, of
// another agent in the template where that has done it, or "": the container's name, and the maps that were made for it.
func addDefault(template map[string]any, spec corev1.PodSpec, container string) (ours string, err error) {
	annotations, found, err := unstructured.NestedStringMap(template, "metadata", "annotations")
	if err != nil {
		return "", fmt.Errorf("reading the pod template: %w", err)
	}
	for _, c := range spec.Containers {
		for _, e := range c.Env {
			if isAgent(c.Name) && e.Name == sidecarDefaultVariable {
				return e.Value, nil
			}
		}
	}
	if annotations[defaultContainerAnnotation] != "" {
		return "", nil
	}
	ours = container
	if !found {
		ours += " annotations"
	}
	if _, found := template["metadata"]; !found {
		ours += " metadata"
	}
	return ours, unstructured.SetNestedField(template, container, "metadata", "annotations", defaultContainerAnnotation)
}

// undoSidecar is undoSidecars of the owner whose key has that hash, or of everybody if owner is empty.
func undoSidecar(template map[string]any, owner string) (without map[string]any, last bool, err error) {
	return undoSidecars(template, func(hash, _ string) bool { return owner == "" || hash == owner })
}

// undoSidecars removes agents from a template, by their owners' hashes and names, with what came with them, and nothing else:
// not what somebody changed meanwhile. last says that no agent is left, so that Services are to be undone, too. It does not
// change its argument.
func undoSidecars(template map[string]any, gone func(hash, name string) bool) (without map[string]any, last bool, err error) {
	template = runtime.DeepCopyJSON(template)
	containers, err := containersOf(template)
	if err != nil {
		return nil, false, err
	}
	var kept []any
	last = true
	added := ""
	for _, raw := range containers {
		c, _ := raw.(map[string]any)
		if name, _ := c["name"].(string); !isAgent(name) {
			kept = append(kept, raw)
			continue
		}
		if !gone(environment(c, api.AgentOwnerVariable), strings.ReplaceAll(environment(c, api.AgentNameVariable), "$$", "$")) {
			kept = append(kept, raw)
			last = false
			continue
		}
		if ours := environment(c, sidecarDefaultVariable); ours != "" {
			added = ours
		}
	}
	if len(kept) == len(containers) {
		return template, last, nil
	}
	if err := unstructured.SetNestedSlice(template, kept, "spec", "containers"); err != nil {
		return nil, false, err
	}
	if last && added != "" {
		removeDefault(template, strings.Fields(added))
	}
	return template, last, nil
}

// removeDefault undoes addDefault. It leaves no empty map where there was none before: to a template's hash that may be a
// difference.
func removeDefault(template map[string]any, added []string) {
	path := []string{"metadata", "annotations", defaultContainerAnnotation}
	if is, _, _ := unstructured.NestedString(template, path...); is != added[0] {
		return
	}
	unstructured.RemoveNestedField(template, path...)
	for _, field := range added[1:] { // the inner one first
		at := path[:slices.Index(path, field)+1]
		if left, _, _ := unstructured.NestedMap(template, at...); len(left) == 0 {
			unstructured.RemoveNestedField(template, at...)
		}
	}
}

func containersOf(template map[string]any) ([]any, error) {
	containers, found, err := unstructured.NestedSlice(template, "spec", "containers")
	if err == nil && !found {
		err = fmt.Errorf("it has no containers")
	}
	if err != nil {
		return nil, fmt.Errorf("reading the pod template: %w", err)
	}
	return containers, nil
}

// environment is a variable of a container, or "".
func environment(container map[string]any, name string) string {
	list, _ := container["env"].([]any)
	for _, raw := range list {
		if e, _ := raw.(map[string]any); e["name"] == name {
			value, _ := e["value"].(string)
			return value
		}
	}
	return ""
}

// movedPort is a target port in a Service's annotation.
type movedPort struct {
	From any    `json:"from"` // nil: there was none, which means the Service's own port
	To   string `json:"to"`
}

// patchService has a Service's ports lead to the agent, by those patches that are its. It does not change its argument.
func patchService(service map[string]any, patches []servicePatch) (map[string]any, error) {
	service = runtime.DeepCopyJSON(service)
	moved, err := movedPorts(service)
	if err != nil {
		return nil, err
	}
	name, _, _ := unstructured.NestedString(service, "metadata", "name")
	changed := false
	err = eachPort(service, func(port map[string]any) {
		at := portKey(port)
		for _, p := range patches {
			if p.service != name || at != fmt.Sprintf("%s/%d", p.protocol, p.port) || port["targetPort"] == p.to {
				continue
			}
			if _, already := moved[at]; !already {
				moved[at] = movedPort{port["targetPort"], p.to}
			} else {
				moved[at] = movedPort{moved[at].From, p.to}
			}
			port["targetPort"], changed = p.to, true
		}
	})
	if err != nil || !changed {
		return service, err
	}
	text, err := json.Marshal(moved)
	if err != nil {
		return nil, fmt.Errorf("writing the Service's annotation: %w", err)
	}
	return service, unstructured.SetNestedField(service, string(text), "metadata", "annotations", cluster.TargetPorts)
}

// undoService gives a Service's ports their target ports back, but for those that somebody changed meanwhile. It does not
// change its argument.
func undoService(service map[string]any) (map[string]any, error) {
	service = runtime.DeepCopyJSON(service)
	moved, err := movedPorts(service)
	if err != nil {
		return nil, err
	}
	err = eachPort(service, func(port map[string]any) {
		was, found := moved[portKey(port)]
		if !found || port["targetPort"] != was.To {
			return
		}
		if was.From == nil {
			delete(port, "targetPort")
		} else {
			port["targetPort"] = was.From
		}
	})
	unstructured.RemoveNestedField(service, "metadata", "annotations", cluster.TargetPorts)
	if left, found, _ := unstructured.NestedMap(service, "metadata", "annotations"); found && len(left) == 0 {
		unstructured.RemoveNestedField(service, "metadata", "annotations") // the API server drops it, too
	}
	return service, err
}

func movedPorts(service map[string]any) (map[string]movedPort, error) {
	moved := make(map[string]movedPort)
	text, found, err := unstructured.NestedString(service, "metadata", "annotations", cluster.TargetPorts)
	if err == nil && found {
		err = json.Unmarshal([]byte(text), &moved)
	}
	if err != nil {
		return nil, fmt.Errorf("reading the Service's annotation %s: %w", cluster.TargetPorts, err)
	}
	for at, m := range maps.Clone(moved) {
		if n, is := m.From.(float64); is { // as unstructured objects have it
			moved[at] = movedPort{int64(n), m.To}
		}
	}
	return moved, nil
}

// eachPort has f see and change each port of a Service.
func eachPort(service map[string]any, f func(map[string]any)) error {
	field, found, err := unstructured.NestedFieldNoCopy(service, "spec", "ports")
	if err != nil || !found {
		return err
	}
	list, is := field.([]any)
	if !is {
		return fmt.Errorf("reading the Service: its ports are a %T", field)
	}
	for _, raw := range list {
		if port, is := raw.(map[string]any); is {
			f(port)
		}
	}
	return nil
}

// portKey is "tcp/80".
func portKey(port map[string]any) string {
	protocol, _ := port["protocol"].(string)
	if protocol == "" {
		protocol = "TCP"
	}
	return fmt.Sprintf("%s/%v", strings.ToLower(protocol), port["port"])
}
