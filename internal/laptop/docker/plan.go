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
	"k8s.io/utils/ptr"

	"kubevpn/internal/api"
	"kubevpn/internal/kube/podenv"
	"kubevpn/pkg/host/subreaper"
)

// label marks our containers with the ID of their run.
const label = "kubevpn.dev"

// container is a container of the pod that the run includes.
type container struct {
	spec       *corev1.Container
	name       string
	image      string // reference
	alwaysPull bool   // even if it exists locally
	imageInfo  image
	chosen     bool // the main container
}

// plan describes a run before it starts anything.
type plan struct {
	id         string // of this run, in the names of its containers
	cfg        Config
	containers []container // in starting order: the chosen one is last
	selinux    bool
	userns     bool
	ipv6       bool // this machine has IPv6
}

// choose returns the containers of the pod that keep running, in the kubelet's order, with the chosen one last; or the
// chosen one alone.
func choose(pod *corev1.Pod, name string, alone bool, image string) ([]container, error) {
	var all []container
	var chosen *container
	add := func(c *corev1.Container) {
		one := container{spec: c, name: c.Name, image: c.Image, alwaysPull: c.ImagePullPolicy == corev1.PullAlways,
			chosen: c.Name == name}
		switch {
		case one.chosen:
			if image != "" {
				one.image, one.alwaysPull = image, false // the user may have just built it
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

// ofImage reports whether a variable comes from the image or the engine and not from the pod. If a Secret or ConfigMap
// of the pod could not be read (v.Secret), a variable seen in the pod may come from there.
func (c container) ofImage(v podenv.Variable) bool {
	switch {
	case !v.Image || !v.Secret:
		return v.Image
	case v.Name == "HOME" || v.Name == "TERM":
		return true
	}
	has := func(e string) bool { return strings.HasPrefix(e, v.Name+"=") }
	return c.image != c.spec.Image && slices.ContainsFunc(c.imageInfo.Config.Env, has)
}

func isSidecar(c *corev1.Container) bool {
	return ptr.Deref(c.RestartPolicy, "") == corev1.ContainerRestartPolicyAlways
}

// withoutAgents returns the pod without traffic agents.
func withoutAgents(pod *corev1.Pod) *corev1.Pod {
	pod = pod.DeepCopy()
	agent := func(c corev1.Container) bool { return api.IsAgent(c.Name) }
	pod.Spec.Containers = slices.DeleteFunc(pod.Spec.Containers, agent)
	pod.Spec.InitContainers = slices.DeleteFunc(pod.Spec.InitContainers, agent)
	return pod
}

// warnings returns the differences from the pod, except for volumes.
func (p *plan) warnings() []string {
	var all []string
	warn := func(format string, args ...any) { all = append(all, fmt.Sprintf(format, args...)) }
	s := p.cfg.Pod.Spec
	for _, c := range s.InitContainers {
		if !isSidecar(&c) {
			warn("init container %s does not run here, so its files are missing", c.Name)
		}
	}
	for what, is := range map[string]bool{"hostNetwork": s.HostNetwork, "hostPID": s.HostPID, "hostIPC": s.HostIPC} {
		if is {
			warn("ignoring %s: the containers cannot share the node's namespace", what)
		}
	}
	if ptr.Deref(s.ShareProcessNamespace, false) {
		warn("ignoring shareProcessNamespace: each container sees only its own processes")
	}
	if p.userns {
		warn("the engine maps users (userns-remap), and these containers run without it (--userns host): " +
			"otherwise they could not read the pod's files")
	}
	if p.selinux {
		warn("the engine separates containers by SELinux labels, and these run without them (--security-opt " +
			"label=disable): otherwise they could not read the pod's files")
	}
	for _, c := range p.containers {
		if left := p.leftOut(c); len(left) > 0 {
			flags := "-- --cap-add NAME"
			if !c.chosen {
				flags = "-c " + c.name + " " + flags
			}
			warn("container %s: omitting %s, which the pod adds and Docker does not grant by default; `%s` adds one",
				c.name, strings.Join(left, ", "), flags)
		}
		if sc := c.spec.SecurityContext; sc != nil && ptr.Deref(sc.Privileged, false) {
			warn("container %s is privileged in the cluster, but not here; `-- --privileged` makes it privileged",
				c.name)
		}
		for _, d := range c.spec.VolumeDevices {
			warn("container %s: only the node has the device %s", c.name, d.DevicePath)
		}
		for _, resource := range slices.Sorted(maps.Keys(c.spec.Resources.Limits)) {
			if strings.Contains(string(resource), "/") {
				warn("container %s: only the node has %s (see --device and --gpus of `docker run`)", c.name, resource)
			}
		}
	}
	slices.Sort(all)
	return all
}

// networkName and containerName return the names of a run's containers.
func networkName(id string) string         { return "kubevpn-" + id + "-network" }
func containerName(id, name string) string { return "kubevpn-" + id + "-" + name }

// common are the flags of every container.
func (p *plan) common(name string) []string {
	args := []string{
		"run", "--rm", "--name", name, "--label", label + "=" + p.id, "--pull", "never", "--no-healthcheck",
		"--sig-proxy=false",    // kubevpn forwards signals, and once
		"--log-driver", "none", // what programs write is for the terminal, and on no disk
	}
	if p.selinux {
		args = append(args, "--security-opt", "label=disable") // the mounts keep their labels
	}
	if p.userns {
		args = append(args, "--userns", "host") // the root of another user namespace may not read the user's directory
	}
	return append(args, "--mount", bind(p.cfg.Executable, binary, true))
}

// network returns the arguments of docker for the network container, whose sockets are in dir. Its anonymous volume is
// in memory, and the engine removes it with the container.
func (p *plan) network(dir string) []string {
	args := p.common(networkName(p.id))
	hostname := podenv.Hostname(p.cfg.Pod)
	if hostname == "" { // the API server does not allow this user a dry run
		hostname = podenv.Hostname(&corev1.Pod{ObjectMeta: metav1.ObjectMeta{Name: p.cfg.Workload}})
	}
	args = append(args,
		"--user", "0:0", "--cap-drop", "ALL", "--ipc", "shareable", "--device", "/dev/net/tun", "--hostname", hostname,
		"--mount", bind(dir, control, true), "--mount",
		mountFlag("type=volume", "target="+volumesAt, "volume-nocopy", "volume-label="+label,
			"volume-opt=type=tmpfs", "volume-opt=device=tmpfs", "volume-opt=o=mode=0755,nosuid,nodev"))
	// NET_ADMIN for the network, the others for files of other users.
	args = append(args, each("--cap-add", "NET_ADMIN", "CHOWN", "DAC_OVERRIDE", "FOWNER", "FSETID")...)
	if p.ipv6 { // the engine disables it unless its own network has IPv6
		args = append(args, "--sysctl", "net.ipv6.conf.all.disable_ipv6=0", "--sysctl",
			"net.ipv6.conf.default.disable_ipv6=0")
	}
	for _, y := range podSecurity(p.cfg.Pod).Sysctls {
		args = append(args, "--sysctl", y.Name+"="+y.Value)
	}
	for _, h := range p.cfg.Pod.Spec.HostAliases {
		for _, name := range h.Hostnames {
			args = append(args, "--add-host", name+":"+h.IP)
		}
	}
	args = slices.Concat(args, each("--add-host", p.cfg.Arguments.AddHosts...), each("--publish", p.cfg.Publish...),
		each("--publish", p.cfg.Arguments.Publish...))
	chosen := p.containers[len(p.containers)-1]
	return append(args, "--entrypoint", binary, chosen.image, Command, networkRole)
}

// each returns a flag for each of the values.
func each(flag string, values ...string) (args []string) {
	for _, v := range values {
		args = append(args, flag, v)
	}
	return args
}

// run returns the arguments of docker for the n-th of the pod's containers, whose socket is in dir.
func (p *plan) run(dir string, n int, mounts []mount) []string {
	c := p.containers[n]
	args := p.common(containerName(p.id, c.name))
	args = append(args, "--network", "container:"+networkName(p.id), "--ipc", "container:"+networkName(p.id),
		"--mount", bind(dir, control, true))
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
		args = slices.Concat(args, each("--cap-add", p.cfg.Arguments.Capabilities...), p.cfg.Arguments.Rest)
	}
	return append(args, "--entrypoint", binary, c.image, Command, programRole)
}

// interactive reports whether the chosen container reads the user's input. If only the pod asks for it, the input must
// be a terminal.
func (p *plan) interactive() bool {
	return p.cfg.Interactive || p.cfg.Arguments.Interactive ||
		p.containers[len(p.containers)-1].spec.Stdin && p.cfg.Terminal
}

func (p *plan) tty() bool {
	return p.cfg.TTY || p.cfg.Arguments.TTY || p.containers[len(p.containers)-1].spec.TTY && p.cfg.Terminal
}

// security returns the flags for a container's user and privileges.
func (p *plan) security(c container) []string {
	var args []string
	s := effective(p.cfg.Pod, c.spec)
	if s.RunAsUser != nil || s.RunAsGroup != nil {
		user, _, _ := strings.Cut(c.imageInfo.Config.User, ":")
		if s.RunAsUser != nil {
			user = strconv.FormatInt(*s.RunAsUser, 10)
		}
		if s.RunAsGroup != nil { // the kubelet also applies it to the user of the image
			user = fmt.Sprintf("%s:%d", cmp.Or(user, "0"), *s.RunAsGroup)
		}
		args = append(args, "--user", user)
	}
	pod := podSecurity(p.cfg.Pod)
	groups := slices.Clone(pod.SupplementalGroups)
	if pod.FSGroup != nil {
		groups = append(groups, *pod.FSGroup)
	}
	for _, g := range groups {
		args = append(args, "--group-add", strconv.FormatInt(g, 10))
	}
	if s.Capabilities != nil {
		for _, c := range s.Capabilities.Drop {
			args = append(args, "--cap-drop", string(c))
		}
		for _, c := range s.Capabilities.Add {
			if name := capability(string(c)); slices.Contains(defaultCapabilities, name) {
				args = append(args, "--cap-add", name)
			}
		}
	}
	if !ptr.Deref(s.AllowPrivilegeEscalation, true) {
		args = append(args, "--security-opt", "no-new-privileges")
	}
	if ptr.Deref(s.ReadOnlyRootFilesystem, false) {
		args = append(args, "--read-only")
	}
	return args
}

// defaultCapabilities are the capabilities that Docker gives a container. The pod may add only these: anyone who edits
// its template must not gain more on this machine than Docker grants.
var defaultCapabilities = []string{
	"AUDIT_WRITE", "CHOWN", "DAC_OVERRIDE", "FOWNER", "FSETID", "KILL", "MKNOD", "NET_BIND_SERVICE", "NET_RAW",
	"SETFCAP", "SETGID", "SETPCAP",
	"SETUID", "SYS_CHROOT",
}

// capability returns the name of a capability as in defaultCapabilities.
func capability(name string) string { return strings.TrimPrefix(strings.ToUpper(name), "CAP_") }

// leftOut returns the capabilities that the pod adds but neither Docker nor the user grants.
func (p *plan) leftOut(c container) []string {
	given := slices.Clone(defaultCapabilities)
	if c.chosen {
		given = append(given, api.Texts(p.cfg.Arguments.Capabilities, capability)...)
	}
	var left []string
	if s := c.spec.SecurityContext; s != nil && s.Capabilities != nil && !slices.Contains(given, "ALL") {
		for _, add := range s.Capabilities.Add {
			if name := capability(string(add)); !slices.Contains(given, name) {
				left = append(left, name)
			}
		}
	}
	return left
}

// program returns the program that PID 1 of a container starts.
func (p *plan) program(c container, variables []podenv.Variable) (subreaper.Program, error) {
	command, args := podenv.Command(c.spec, variables)
	image := c.imageInfo.Config
	out := subreaper.Program{Args: podenv.Program(command, args, image.Entrypoint, image.Cmd),
		Env: slices.Clone(image.Env)}
	for _, v := range variables {
		if !c.ofImage(v) {
			out.Env = append(out.Env, v.Name+"="+v.Value)
		}
	}
	if c.chosen {
		out.Env = append(out.Env, p.cfg.Env...)
		if e := p.cfg.Arguments.Entrypoint; e != nil {
			out.Args = []string{*e}
		}
	}
	if len(out.Args) == 0 || out.Args[0] == "" {
		return out, api.Errorf(api.ExitWorkload, "neither the image %s nor the pod names a program for container %s",
			c.image, c.name).
			WithHint("name a program: -- --entrypoint PROGRAM")
	}
	return out, nil
}

// mount is a bind mount of a directory or file of this machine.
type mount struct {
	source, path string
	readOnly     bool
}

// bind returns a value of --mount for a directory or file of this machine.
func bind(source, target string, readOnly bool) string {
	fields := []string{"type=bind", "source=" + source, "target=" + target}
	if readOnly {
		fields = append(fields, "readonly")
	}
	return mountFlag(fields...)
}

// mountFlag returns a value of --mount, which is a line of CSV.
func mountFlag(fields ...string) string {
	var b strings.Builder
	w := csv.NewWriter(&b)
	_ = w.Write(fields) // a strings.Builder returns no errors
	w.Flush()
	return strings.TrimSuffix(b.String(), "\n")
}

// volumePath returns the path on this machine of sub in a volume. volumes is the directory of all volumes.
func volumePath(volumes, volume, sub string) string {
	return filepath.Join(volumes, volume, filepath.FromSlash(sub))
}

// mountable reports whether a container can have a mount at this path.
func mountable(at string) bool {
	at = path.Clean(at)
	return path.IsAbs(at) && at != "/" && !api.Within(at, "/proc") && !api.Within(at, inside)
}
