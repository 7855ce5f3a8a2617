package docker

import (
	"cmp"
	"encoding/csv"
	"fmt"
	"maps"
	"path"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"kubevpn/internal/api"
	"kubevpn/internal/podenv"
)

// label marks our containers, with the run that they are of.
const label = "kubevpn.dev"

// container is one of the pod's that is to run.
type container struct {
	spec   *corev1.Container
	name   string
	image  string // reference
	now    bool   // it has to be the one that the registry has now
	of     image
	chosen bool // the one that the user works on
}

// plan is what is known before anything is started.
type plan struct {
	cfg        Config
	pod        *corev1.Pod
	user       Arguments
	containers []container // in the order in which they start; the chosen one is last
	selinux    bool
	userns     bool
	ipv6       bool // this machine has IPv6
}

// choose gives the pod's containers that are to run: those that keep running, in the kubelet's order, the chosen one last; or the
// chosen one alone.
func choose(pod *corev1.Pod, name string, alone bool, image string) ([]container, error) {
	var all []container
	var chosen *container
	add := func(c *corev1.Container) {
		one := container{spec: c, name: c.Name, image: c.Image, now: c.ImagePullPolicy == corev1.PullAlways, chosen: c.Name == name}
		switch {
		case one.chosen:
			if image != "" {
				one.image, one.now = image, false // it may have just been built
			}
			chosen = &one
		case !alone:
			all = append(all, one)
		}
	}
	for n := range pod.Spec.InitContainers {
		if c := &pod.Spec.InitContainers[n]; isSidecar(c) {
			add(c)
		}
	}
	for n := range pod.Spec.Containers {
		add(&pod.Spec.Containers[n])
	}
	if chosen == nil {
		return nil, api.Errorf(api.ExitWorkload, "the pod has no container %s that keeps running", name)
	}
	return append(all, *chosen), nil
}

// ofImage reports whether a variable that a program of the pod was seen to have is the image's to say, or the engine's, and not the
// pod's. Where something of the pod could not be read, what was seen may be of that.
func (c container) ofImage(v podenv.Variable) bool {
	switch {
	case !v.Image || !v.Secret:
		return v.Image
	case v.Name == "HOME" || v.Name == "TERM":
		return true
	}
	has := func(e string) bool { return strings.HasPrefix(e, v.Name+"=") }
	return c.image != c.spec.Image && slices.ContainsFunc(c.of.Config.Env, has)
}

func isSidecar(c *corev1.Container) bool {
	return c.RestartPolicy != nil && *c.RestartPolicy == corev1.ContainerRestartPolicyAlways
}

// withoutAgents is the pod as it was before any intercept.
func withoutAgents(pod *corev1.Pod) *corev1.Pod {
	pod = pod.DeepCopy()
	agent := func(c corev1.Container) bool { return strings.HasPrefix(c.Name, api.AgentPrefix) }
	pod.Spec.Containers = slices.DeleteFunc(pod.Spec.Containers, agent)
	pod.Spec.InitContainers = slices.DeleteFunc(pod.Spec.InitContainers, agent)
	return pod
}

// warnings are what the pod has and its containers here have not, but for volumes.
func (p *plan) warnings() []string {
	var all []string
	warn := func(format string, args ...any) { all = append(all, fmt.Sprintf(format, args...)) }
	s := p.pod.Spec
	for _, c := range s.InitContainers {
		if !isSidecar(&c) {
			warn("init container %s does not run here: what it prepares is missing", c.Name)
		}
	}
	for what, is := range map[string]bool{"hostNetwork": s.HostNetwork, "hostPID": s.HostPID, "hostIPC": s.HostIPC} {
		if is {
			warn("%s: the node's is not here", what)
		}
	}
	if s.ShareProcessNamespace != nil && *s.ShareProcessNamespace {
		warn("shareProcessNamespace: each container sees its own processes alone")
	}
	for _, c := range p.containers {
		if sc := c.spec.SecurityContext; sc != nil && sc.Privileged != nil && *sc.Privileged {
			warn("container %s is privileged in the cluster, and is not here: `-- --privileged` makes it so", c.name)
		}
		for _, d := range c.spec.VolumeDevices {
			warn("container %s: the device %s is the node's", c.name, d.DevicePath)
		}
		for _, resource := range slices.Sorted(maps.Keys(c.spec.Resources.Limits)) {
			if strings.Contains(string(resource), "/") {
				warn("container %s: %s is the node's (`docker run` has --device and --gpus)", c.name, resource)
			}
		}
	}
	slices.Sort(all)
	return all
}

// names of containers of a run.
func networkName(id string) string         { return "kubevpn-" + id + "-network" }
func containerName(id, name string) string { return "kubevpn-" + id + "-" + name }

// common are the flags of every container.
func (p *plan) common(id, name string) []string {
	args := []string{
		"run", "--rm", "--name", name, "--label", label + "=" + id, "--pull", "never", "--no-healthcheck",
		"--log-driver", "none", // what programs write is for the terminal, and on no disk
	}
	if p.selinux {
		args = append(args, "--security-opt", "label=disable") // the mounts keep their labels
	}
	if p.userns {
		args = append(args, "--userns", "host") // another's root may not read the user's directory
	}
	return append(args, "--mount", bind(p.cfg.Executable, binary, true))
}

// network are the arguments of docker for the network container.
func (p *plan) network(d *directory) []string {
	args := p.common(d.id, networkName(d.id))
	hostname := podenv.Hostname(p.pod)
	if hostname == "" { // this user may not even ask what the pod would be
		hostname = podenv.Hostname(&corev1.Pod{ObjectMeta: metav1.ObjectMeta{Name: p.cfg.Workload}})
	}
	args = append(args,
		"--user", "0:0", "--cap-drop", "ALL", "--ipc", "shareable", "--device", "/dev/net/tun", "--hostname", hostname,
		"--mount", bind(d.control(0), control, true), "--mount", bind(d.base, base, false))
	// The network, and files that are others'.
	for _, c := range []string{"NET_ADMIN", "CHOWN", "DAC_OVERRIDE", "FOWNER", "FSETID"} {
		args = append(args, "--cap-add", c)
	}
	if p.ipv6 { // off, as the engine has it, unless its own network has it
		args = append(args, "--sysctl", "net.ipv6.conf.all.disable_ipv6=0", "--sysctl", "net.ipv6.conf.default.disable_ipv6=0")
	}
	if s := p.pod.Spec.SecurityContext; s != nil {
		for _, y := range s.Sysctls {
			args = append(args, "--sysctl", y.Name+"="+y.Value)
		}
	}
	for _, h := range p.pod.Spec.HostAliases {
		for _, name := range h.Hostnames {
			args = append(args, "--add-host", name+":"+h.IP)
		}
	}
	for _, h := range p.user.AddHosts {
		args = append(args, "--add-host", h)
	}
	for _, port := range slices.Concat(p.cfg.Publish, p.user.Publish) {
		args = append(args, "--publish", port)
	}
	chosen := p.containers[len(p.containers)-1]
	return append(args, "--entrypoint", binary, chosen.image, Command, networkRole, d.id)
}

// run are the arguments of docker for the n-th of the pod's containers.
func (p *plan) run(d *directory, n int, mounts []mount) []string {
	c := p.containers[n]
	args := p.common(d.id, containerName(d.id, c.name))
	args = append(args, "--network", "container:"+networkName(d.id), "--ipc", "container:"+networkName(d.id),
		"--mount", bind(d.control(n+1), control, true))
	for _, m := range mounts {
		args = append(args, "--mount", bind(m.source, m.path, m.readOnly))
	}
	args = append(args, p.security(c)...)
	if c.spec.WorkingDir != "" {
		args = append(args, "--workdir", c.spec.WorkingDir)
	}
	if c.chosen {
		if p.interactive() {
			args = append(args, "--interactive")
		}
		if p.tty() {
			args = append(args, "--tty")
		}
		args = append(args, p.user.Rest...)
	}
	return append(args, "--entrypoint", binary, c.image, Command, programRole)
}

// interactive reports whether the user's input is the chosen container's. What only the pod wants is not had of a program's input.
func (p *plan) interactive() bool {
	return p.cfg.Interactive || p.user.Interactive || p.containers[len(p.containers)-1].spec.Stdin && p.cfg.Terminal
}

func (p *plan) tty() bool {
	return p.cfg.TTY || p.user.TTY || p.containers[len(p.containers)-1].spec.TTY && p.cfg.Terminal
}

// security are the flags of what the pod says of a container's user and rights.
func (p *plan) security(c container) []string {
	var args []string
	s := effective(p.pod, c.spec)
	if s.RunAsUser != nil || s.RunAsGroup != nil {
		user, _, _ := strings.Cut(c.of.Config.User, ":")
		if s.RunAsUser != nil {
			user = strconv.FormatInt(*s.RunAsUser, 10)
		}
		if s.RunAsGroup != nil { // which the kubelet gives the image's user as well
			user = fmt.Sprintf("%s:%d", cmp.Or(user, "0"), *s.RunAsGroup)
		}
		args = append(args, "--user", user)
	}
	if pod := p.pod.Spec.SecurityContext; pod != nil {
		groups := slices.Clone(pod.SupplementalGroups)
		if pod.FSGroup != nil {
			groups = append(groups, *pod.FSGroup)
		}
		for _, g := range groups {
			args = append(args, "--group-add", strconv.FormatInt(g, 10))
		}
	}
	if s.Capabilities != nil {
		for _, c := range s.Capabilities.Drop {
			args = append(args, "--cap-drop", string(c))
		}
		for _, c := range s.Capabilities.Add {
			args = append(args, "--cap-add", string(c))
		}
	}
	if s.AllowPrivilegeEscalation != nil && !*s.AllowPrivilegeEscalation {
		args = append(args, "--security-opt", "no-new-privileges")
	}
	if s.ReadOnlyRootFilesystem != nil && *s.ReadOnlyRootFilesystem {
		args = append(args, "--read-only")
	}
	return args
}

// program is what a container's PID 1 starts.
func (p *plan) program(c container, variables []podenv.Variable) (program, error) {
	command, args := podenv.Command(c.spec, variables)
	out := program{Args: podenv.Program(command, args, c.of.Config.Entrypoint, c.of.Config.Cmd), Env: slices.Clone(c.of.Config.Env)}
	for _, v := range variables {
		if !c.ofImage(v) {
			out.Env = append(out.Env, v.Name+"="+v.Value)
		}
	}
	if c.chosen {
		out.Env = append(out.Env, p.cfg.Env...)
		out.TTY = p.tty()
		if e := p.user.Entrypoint; e != nil {
			out.Args = []string{*e}
		}
	}
	if len(out.Args) == 0 || out.Args[0] == "" {
		return out, api.Errorf(api.ExitWorkload, "neither the image %s nor the pod says what container %s runs", c.image, c.name).
			WithHint("name a program: -- --entrypoint PROGRAM")
	}
	return out, nil
}

// mount is what a container sees of a directory of this machine.
type mount struct {
	source, path string
	readOnly     bool
}

// bind is a value of --mount, which is a line of CSV.
func bind(source, target string, readOnly bool) string {
	fields := []string{"type=bind", "source=" + source, "target=" + target}
	if readOnly {
		fields = append(fields, "readonly")
	}
	var b strings.Builder
	w := csv.NewWriter(&b)
	// A strings.Builder takes everything, and Flush has nobody else's errors.
	_ = w.Write(fields)
	w.Flush()
	return strings.TrimSuffix(b.String(), "\n")
}

// source is where a volume's place is on this machine.
func (d *directory) source(volume, sub string) string {
	return filepath.Join(d.base, d.id, volumesDir, volume, filepath.FromSlash(sub))
}

// mountable reports whether something may be mounted there in a container.
func mountable(at string) bool {
	at = path.Clean(at)
	return path.IsAbs(at) && at != "/" && at != "/proc" && !strings.HasPrefix(at, "/proc/") && at != inside && !strings.HasPrefix(at, inside+"/")
}
