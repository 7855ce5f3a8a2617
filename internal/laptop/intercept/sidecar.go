package intercept

import (
	"cmp"
	"crypto/sha256"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/utils/ptr"

	"kubevpn/internal/api"
	"kubevpn/internal/kube/workloads"
)

// A sidecar is an agent in the pod template. It receives the traffic of Services whose target port is a name: if two
// containers give a port the same name, the control plane uses the first one's number. So the agent is the first
// container, and gives its own port the name of the application's:
//
//	Service web ── targetPort http ──▶ containers: kubevpn-agent-1  http 18080   --listen tcp/8080:18080
//	                                               app              http  8080   (unchanged, with its probes)
//
// Pods without the agent still serve, before the rollout and after one that removed the agent. planSidecar replaces the
// number in a Service's target port by the name. If the application's port has no name, the Service gets a name that
// only pods with the agent have.
//
// The functions edit the objects as the API server returns them, and keep fields that this program does not know. The
// agent's container and an annotation of the Service record how to undo the change.
const (
	defaultContainerAnnotation = "kubectl.kubernetes.io/default-container"
	// sidecarDefaultVariable is set in the agent's environment if addDefault added the annotation of kubectl's default
	// container.
	sidecarDefaultVariable = "KUBEVPN_DEFAULT_CONTAINER"
)

// sidecarPlan describes the changes that make Services send to the agent.
type sidecarPlan struct {
	template map[string]any
	ports    []api.AgentPort // the ports, with those on which the agent listens for them
	targets  []servicePatch  // of any Service, in the order of ports
	services []servicePatch
}

// servicePatch moves a Service's port to the agent.
type servicePatch struct {
	service  string
	protocol string // "tcp" or "udp"
	port     int32
	to       string // the target port's name
	// afterRollout is set if only pods with the agent have that name. Then apply the patch after the rollout, and undo
	// it before pods lose the agent.
	afterRollout bool
}

// patch returns the patch that makes a way lead to the agent.
func (p *sidecarPlan) patch(w way) servicePatch {
	to := p.targets[slices.IndexFunc(p.ports, func(a api.AgentPort) bool {
		return a.Protocol == w.protocol && a.Port == w.to
	})]
	to.service, to.port = w.service, w.port
	return to
}

// planSidecar plans the owner's agent for a template whose container listens on ports. It does not change its
// arguments.
func planSidecar(template map[string]any, container string, ports []workloads.Port,
	a workloads.Agent) (sidecarPlan, error) {
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
		return sidecarPlan{}, api.Errorf(api.ExitWorkload,
			"container %s declares no port, and a sidecar receives only requests that Services send to a port",
			container).
			WithHint("Name the port: --port LOCAL:CONTAINER")
	}
	c := sidecarContainer(a, nextSidecar(spec), sidecarUser(spec, a.Owner))
	c.Resources.Limits = sidecarLimits(spec)
	workloads.SetResources(&c, a.Objects)
	p := sidecarPlan{template: template}
	taken := make(map[uint16]bool)
	for _, c := range slices.Concat(spec.Containers, spec.InitContainers) {
		for _, p := range c.Ports {
			taken[uint16(p.ContainerPort)] = true
		}
	}
	for _, port := range ports {
		taken[port.Port] = true // also if the container does not declare it
	}
	for _, port := range ports {
		name, listen := sidecarPort(spec, c, port, taken)
		taken[listen] = true
		protocol := corev1.Protocol(strings.ToUpper(port.Protocol))
		c.Ports = append(c.Ports, corev1.ContainerPort{Name: name, ContainerPort: int32(listen), Protocol: protocol})
		c.Args = append(c.Args, "--listen", fmt.Sprintf("%s/%d:%d", port.Protocol, port.Port, listen))
		p.ports = append(p.ports, api.AgentPort{Protocol: port.Protocol, Port: port.Port, Listen: listen})
		to := servicePatch{protocol: port.Protocol, to: name, afterRollout: name != port.Name}
		p.targets = append(p.targets, to)
		for _, s := range port.Services {
			if to.service, to.port = s.Service, s.Port; s.Target != name {
				p.services = append(p.services, to)
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

// sidecarContainer returns the agent's container, which complies with the "restricted" pod security standard. It
// requests CPU because autoscalers ignore pods with a container that requests none.
func sidecarContainer(a workloads.Agent, name string, user int64) corev1.Container {
	security := workloads.Restricted()
	security.RunAsUser, security.RunAsGroup = &user, &user
	return corev1.Container{
		Name:            name,
		Image:           a.Image,
		ImagePullPolicy: corev1.PullIfNotPresent,
		Args:            []string{"agent"},
		Env:             a.Environment(),
		Resources: corev1.ResourceRequirements{Requests: corev1.ResourceList{
			corev1.ResourceCPU: resource.MustParse("10m"), corev1.ResourceMemory: resource.MustParse("32Mi"),
		}},
		TerminationMessagePolicy: corev1.TerminationMessageFallbackToLogsOnError,
		SecurityContext:          security,
	}
}

// sidecarLimits returns limits for the resources of which all other containers have one, because the namespace may
// demand them. They are more than an agent needs.
func sidecarLimits(spec corev1.PodSpec) corev1.ResourceList {
	limits := corev1.ResourceList{
		corev1.ResourceCPU: resource.MustParse("500m"), corev1.ResourceMemory: resource.MustParse("256Mi"),
		corev1.ResourceEphemeralStorage: resource.MustParse("64Mi"),
	}
	for _, c := range spec.Containers {
		maps.DeleteFunc(limits, func(name corev1.ResourceName, _ resource.Quantity) bool {
			_, limited := c.Resources.Limits[name]
			return !limited
		})
	}
	return limits
}

// sidecarUser returns the user of the template's agents. They recognize each other by it, at the socket of their
// leader, so no other container should have it, and least of all one of its image: 65532 is that of all distroless
// ones. Image and template decide about the other containers, so it depends on the owner. User namespaces map 65536
// users.
func sidecarUser(spec corev1.PodSpec, owner string) int64 {
	used := make(map[int64]bool)
	use := func(user *int64) { used[ptr.Deref(user, -1)] = true }
	use(ptr.Deref(spec.SecurityContext, corev1.PodSecurityContext{}).RunAsUser)
	for _, c := range slices.Concat(spec.Containers, spec.InitContainers) {
		user := ptr.Deref(c.SecurityContext, corev1.SecurityContext{}).RunAsUser
		if api.IsAgent(c.Name) && user != nil {
			return *user
		}
		use(user)
	}
	const first, users = 10000, 50000
	sum := sha256.Sum256([]byte(owner))
	user := int64(binary.BigEndian.Uint64(sum[:]) % users)
	for used[first+user] {
		user = (user + 1) % users
	}
	return first + user
}

// sidecarPort chooses the name of the agent's port, and its number: those of another owner's agent in the template,
// else the application's name. If the application's port has no name, or another port of c has the same, it creates a
// name.
func sidecarPort(spec corev1.PodSpec, c corev1.Container, port workloads.Port,
	taken map[uint16]bool) (name string, listen uint16) {
	used := func(name string) bool {
		return slices.ContainsFunc(c.Ports, func(p corev1.ContainerPort) bool { return p.Name == name })
	}
	prefix := fmt.Sprintf("%s/%d:", port.Protocol, port.Port)
	for _, other := range spec.Containers {
		if !api.IsAgent(other.Name) {
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
	const first, last = 10000, 65535 // unprivileged ports that applications seldom use
	listen = first + port.Port%(last-first)
	for taken[listen] {
		if listen == last {
			listen = first
		} else {
			listen++
		}
	}
	return name, listen
}

func nextSidecar(spec corev1.PodSpec) string {
	for n := 1; ; n++ {
		name := api.AgentPrefix + strconv.Itoa(n)
		if !slices.ContainsFunc(spec.Containers, func(c corev1.Container) bool { return c.Name == name }) {
			return name
		}
	}
}

// addDefault makes container the default of kubectl, which would otherwise choose the agent. ours tells removeDefault
// what to undo: the container's name, and the maps that addDefault created. It is "" if the template already had a
// default, and another agent's value if that one added it.
func addDefault(template map[string]any, spec corev1.PodSpec, container string) (ours string, err error) {
	annotations, found, err := unstructured.NestedStringMap(template, "metadata", "annotations")
	if err != nil {
		return "", fmt.Errorf("reading the pod template: %w", err)
	}
	for _, c := range spec.Containers {
		for _, e := range c.Env {
			if api.IsAgent(c.Name) && e.Name == sidecarDefaultVariable {
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

// undoSidecar removes the agents of the owner whose key has that hash, or of all owners if owner is empty, and what
// planSidecar added with them. It keeps later changes by others. last reports that no agent is left, so that the caller
// must undo the Services, too. It does not change its argument.
func undoSidecar(template map[string]any, owner string) (without map[string]any, last bool, err error) {
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
		if name, _ := c["name"].(string); !api.IsAgent(name) {
			kept = append(kept, raw)
			continue
		}
		if owner != "" && environment(c, api.AgentOwnerVariable) != owner {
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
	if fields := strings.Fields(added); last && len(fields) > 0 {
		removeDefault(template, fields)
	}
	return template, last, nil
}

// removeDefault undoes addDefault. It also removes the maps that addDefault created: an empty map may change the
// template's hash.
func removeDefault(template map[string]any, added []string) {
	path := []string{"metadata", "annotations", defaultContainerAnnotation}
	if is, _, _ := unstructured.NestedString(template, path...); is != added[0] {
		return
	}
	unstructured.RemoveNestedField(template, path...)
	for _, field := range added[1:] { // the inner one first
		at := path[:slices.Index(path, field)+1]
		if len(at) == 0 {
			continue // not a value of addDefault
		}
		if left, _, _ := unstructured.NestedMap(template, at...); len(left) == 0 {
			unstructured.RemoveNestedField(template, at...)
		}
	}
}

func containersOf(template map[string]any) ([]any, error) {
	containers, found, err := unstructured.NestedSlice(template, "spec", "containers")
	if err == nil && !found {
		err = errors.New("it has no containers")
	}
	if err != nil {
		return nil, fmt.Errorf("reading the pod template: %w", err)
	}
	return containers, nil
}

// environment returns the value of a container's variable, or "".
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

// movedPort records a changed target port in a Service's annotation.
type movedPort struct {
	From any    `json:"from"` // nil: there was none; it defaults to the Service's own port
	To   string `json:"to"`
}

// patchService applies the patches for this Service, which then sends to the agent. It does not change its argument.
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
			from := port["targetPort"]
			if earlier, ok := moved[at]; ok {
				from = earlier.From
			}
			moved[at] = movedPort{from, p.to}
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
	return service, unstructured.SetNestedField(service, string(text), "metadata", "annotations", workloads.TargetPorts)
}

// undoService restores the target ports of a Service, except those that somebody else has changed since. It does not
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
	unstructured.RemoveNestedField(service, "metadata", "annotations", workloads.TargetPorts)
	if left, found, _ := unstructured.NestedMap(service, "metadata", "annotations"); found && len(left) == 0 {
		unstructured.RemoveNestedField(service, "metadata", "annotations") // the API server also drops an empty map
	}
	return service, err
}

func movedPorts(service map[string]any) (map[string]movedPort, error) {
	moved := make(map[string]movedPort)
	text, found, err := unstructured.NestedString(service, "metadata", "annotations", workloads.TargetPorts)
	if err == nil && found {
		err = json.Unmarshal([]byte(text), &moved)
	}
	if err != nil {
		return nil, fmt.Errorf("reading the Service's annotation %s: %w", workloads.TargetPorts, err)
	}
	for at, m := range maps.Clone(moved) {
		switch from := m.From.(type) {
		case nil, string:
		case float64: // unstructured objects contain an int64
			if moved[at] = (movedPort{int64(from), m.To}); from == float64(uint16(from)) {
				continue
			}
			delete(moved, at)
		default: // no Service can have such a target port
			delete(moved, at)
		}
	}
	return moved, nil
}

// eachPort calls f with each port of a Service. f may change it.
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

// portKey returns a key like "tcp/80".
func portKey(port map[string]any) string {
	protocol, _ := port["protocol"].(string)
	return fmt.Sprintf("%s/%v", strings.ToLower(cmp.Or(protocol, "TCP")), port["port"])
}
