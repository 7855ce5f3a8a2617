package docker

import (
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"kubevpn/internal/kube/podenv"
	"kubevpn/pkg/host/sandbox"
	"kubevpn/pkg/host/subreaper"
)

func pointer[T any](v T) *T { return &v }

// testPod has a container web to work on, one beside it, a sidecar, an init container and an agent.
func testPod() *corev1.Pod {
	always := corev1.ContainerRestartPolicyAlways
	return &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Name: "web-1", Namespace: "shop"},
		Spec: corev1.PodSpec{
			SecurityContext: &corev1.PodSecurityContext{RunAsUser: pointer(int64(1000)), FSGroup: pointer(int64(3000)), SupplementalGroups: []int64{4000}},
			HostAliases:     []corev1.HostAlias{{IP: "10.0.0.9", Hostnames: []string{"db"}}},
			InitContainers: []corev1.Container{
				{Name: "prepare", Image: "prepare:1"},
				{Name: "mesh", Image: "mesh:1", RestartPolicy: &always},
			},
			Containers: []corev1.Container{
				{
					Name: "web", Image: "web:1", Command: []string{"/web", "--name=$(NAME)"}, Args: []string{"$$(NAME)", "$(MISSING)"}, WorkingDir: "/srv", TTY: true, Stdin: true,
					SecurityContext: &corev1.SecurityContext{
						RunAsGroup: pointer(int64(2000)), ReadOnlyRootFilesystem: pointer(true), AllowPrivilegeEscalation: pointer(false),
						Capabilities: &corev1.Capabilities{Drop: []corev1.Capability{"ALL"}, Add: []corev1.Capability{"NET_BIND_SERVICE"}},
					},
				},
				{Name: "log", Image: "log:1", Args: []string{"-v"}, SecurityContext: &corev1.SecurityContext{Privileged: pointer(true)}},
				{Name: "kubevpn-agent-1", Image: "kubevpn"},
			},
		},
	}
}

func testPlan(t *testing.T, cfg Config) *plan {
	t.Helper()
	cfg.Pod = withoutAgents(testPod())
	cfg.Container, cfg.Executable = "web", "/usr/bin/kubevpn"
	all, err := choose(cfg.Pod, cfg.Container, cfg.Alone, cfg.Image)
	if err != nil {
		t.Fatal(err)
	}
	return &plan{id: "0123456789", cfg: cfg, containers: all}
}

func TestChoosePutsTheMainContainerLast(t *testing.T) {
	tests := []struct {
		name, image string
		alone       bool
		want        []string // name image
	}{
		{"all", "", false, []string{"mesh mesh:1", "log log:1", "web web:1"}},
		{"one", "", true, []string{"web web:1"}},
		{"another-image", "mine", false, []string{"mesh mesh:1", "log log:1", "web mine"}},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			all, err := choose(withoutAgents(testPod()), "web", tt.alone, tt.image)
			if err != nil {
				t.Fatal(err)
			}
			var got []string
			for _, c := range all {
				got = append(got, c.name+" "+c.image)
			}
			if !slices.Equal(got, tt.want) || !all[len(all)-1].chosen {
				t.Errorf("%q, want %q and the last one chosen", got, tt.want)
			}
		})
	}
	for _, name := range []string{"prepare", "kubevpn-agent-1", "none"} {
		if _, err := choose(withoutAgents(testPod()), name, false, ""); err == nil {
			t.Errorf("%s was chosen", name)
		}
	}
}

// kubevpn pulls again what the kubelet pulls again, but not an image that the user names.
func TestChoosePullsWhatTheKubeletPulls(t *testing.T) {
	pod := testPod()
	pod.Spec.Containers[0].ImagePullPolicy, pod.Spec.Containers[1].ImagePullPolicy = corev1.PullAlways, corev1.PullIfNotPresent
	for image, want := range map[string][]bool{"": {false, false, true}, "mine": {false, false, false}} {
		all, err := choose(withoutAgents(pod), "web", false, image)
		if err != nil {
			t.Fatal(err)
		}
		for n, c := range all {
			if c.alwaysPull != want[n] {
				t.Errorf("with --image %q: container %s: %v", image, c.name, c.alwaysPull)
			}
		}
	}
}

func TestRunArgumentsMatchThePod(t *testing.T) {
	p := testPlan(t, Config{Terminal: true, Arguments: Arguments{Rest: []string{"--memory", "1g"}}})
	got := p.run("/run/kubevpn/docker-3", 2, []mount{{source: "/run/a,b", path: "/etc/x", readOnly: true}})
	want := strings.Fields(`run --rm --name kubevpn-0123456789-web --label kubevpn.dev=0123456789 --pull never --no-healthcheck --sig-proxy=false --log-driver none
		--mount type=bind,source=/usr/bin/kubevpn,target=/.kubevpn/kubevpn,readonly
		--network container:kubevpn-0123456789-network --ipc container:kubevpn-0123456789-network
		--mount type=bind,source=/run/kubevpn/docker-3,target=/.kubevpn/run,readonly
		--mount type=bind,"source=/run/a,b",target=/etc/x,readonly
		--user 1000:2000 --group-add 4000 --group-add 3000 --cap-drop ALL --cap-add NET_BIND_SERVICE --security-opt no-new-privileges --read-only
		--workdir /srv --interactive --tty --memory 1g
		--entrypoint /.kubevpn/kubevpn web:1 container program`)
	if d := cmp.Diff(want, got); d != "" {
		t.Errorf("-want +got:\n%s", d)
	}
	other := p.run("/run/x", 1, nil)
	for _, flag := range []string{"--interactive", "--tty", "--memory", "--read-only", "--workdir"} {
		if slices.Contains(other, flag) {
			t.Errorf("another container has %s", flag)
		}
	}
	if user := other[slices.Index(other, "--user")+1]; user != "1000" {
		t.Errorf("another container's user is %s, want the pod's", user)
	}
	p.containers[1].spec.SecurityContext = &corev1.SecurityContext{RunAsGroup: pointer(int64(7))}
	p.cfg.Pod.Spec.SecurityContext = nil
	for image, want := range map[string]string{"": "0:7", "app": "app:7", "1000:1000": "1000:7"} {
		p.containers[1].imageInfo.Config.User = image
		other = p.run("/run/x", 1, nil)
		if user := other[slices.Index(other, "--user")+1]; user != want {
			t.Errorf("a group alone, with an image whose user is %q: %s, want %s", image, user, want)
		}
	}
	if p.cfg.Terminal = false; p.interactive() || p.tty() {
		t.Error("the pod alone wants a terminal, and there is none: it is not asked for")
	}
}

func TestNetworkArgumentsMatchThePod(t *testing.T) {
	p := testPlan(t, Config{Publish: []string{"8080:80"}, Arguments: Arguments{Publish: []string{"81"}, AddHosts: []string{"me:1.2.3.4"}}})
	p.ipv6, p.userns, p.selinux = true, true, true
	got := strings.Join(p.network("/run/x"), " ")
	for _, want := range []string{
		"--user 0:0", "--cap-drop ALL", "--cap-add NET_ADMIN", "--device /dev/net/tun", "--hostname web-1", "--publish 8080:80", "--publish 81",
		"--add-host db:10.0.0.9", "--add-host me:1.2.3.4", "--sysctl net.ipv6.conf.all.disable_ipv6=0", "--userns host", "--security-opt label=disable",
		"--mount type=volume,target=/.kubevpn/volumes,volume-nocopy,volume-label=kubevpn.dev,volume-opt=type=tmpfs,", "--entrypoint /.kubevpn/kubevpn web:1 container network --",
	} {
		if !strings.Contains(got+" --", want) {
			t.Errorf("no %q in %s", want, got)
		}
	}
}

func TestProgramIsThatOfTheContainerOrTheImage(t *testing.T) {
	p := testPlan(t, Config{Env: []string{"NAME=mine"}})
	web, log := p.containers[2], p.containers[1]
	log.imageInfo.Config.Entrypoint, log.imageInfo.Config.Cmd = []string{"/log"}, []string{"-image"}
	web.imageInfo.Config.Env = []string{"PATH=/image", "NAME=image"}
	got, err := p.program(web, []podenv.Variable{{Name: "NAME", Value: "pod"}})
	if err != nil {
		t.Fatal(err)
	}
	want := subreaper.Program{Args: []string{"/web", "--name=pod", "$(NAME)", "$(MISSING)"}, Env: []string{"PATH=/image", "NAME=image", "NAME=pod", "NAME=mine"}}
	if d := cmp.Diff(want, got); d != "" {
		t.Errorf("a command and args: -want +got:\n%s", d)
	}
	if got, err = p.program(log, nil); err != nil || !slices.Equal(got.Args, []string{"/log", "-v"}) {
		t.Errorf("args alone: %q, %v", got.Args, err)
	}
	log.spec = &corev1.Container{}
	if got, err = p.program(log, nil); err != nil || !slices.Equal(got.Args, []string{"/log", "-image"}) {
		t.Errorf("the image's: %q, %v", got.Args, err)
	}
	log.imageInfo.Config.Entrypoint, log.imageInfo.Config.Cmd = nil, nil
	if _, err = p.program(log, nil); err == nil {
		t.Error("nothing to run is no error")
	}
	entrypoint := "sh"
	p.cfg.Arguments.Entrypoint = &entrypoint
	if got, err = p.program(web, nil); err != nil || !slices.Equal(got.Args, []string{"sh"}) {
		t.Errorf("--entrypoint: %q, %v", got.Args, err)
	}
}

// The environment of the running pod replaces variables of Secrets that could not be read.
func TestProgramUsesVariablesOfThePodThatTheAPILacks(t *testing.T) {
	seen := func(unread bool) []podenv.Variable {
		var all []podenv.Variable
		for _, name := range []string{"HOME", "PASSWORD", "PATH", "TERM", "VERSION"} {
			all = append(all, podenv.Variable{Name: name, Value: "seen", Image: true, Secret: unread})
		}
		return append(all, podenv.Variable{Name: "KEY", Value: "read", Secret: true})
	}
	for _, tt := range []struct {
		name, image string
		unread      bool
		want        []string
	}{
		{"the API has everything", "", false, []string{"KEY"}},
		{"the API lacks something", "", true, []string{"PASSWORD", "PATH", "VERSION", "KEY"}},
		{"the API lacks something, and the user names an image", "mine", true, []string{"PASSWORD", "KEY"}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			p := testPlan(t, Config{Image: tt.image})
			web := p.containers[2]
			web.imageInfo.Config.Env = []string{"PATH=/image", "VERSION=1"}
			got, err := p.program(web, seen(tt.unread))
			if err != nil {
				t.Fatal(err)
			}
			want := slices.Clone(web.imageInfo.Config.Env)
			for _, name := range tt.want {
				want = append(want, name+"="+map[bool]string{true: "read", false: "seen"}[name == "KEY"])
			}
			if diff := cmp.Diff(want, got.Env); diff != "" {
				t.Errorf("-want +got:\n%s", diff)
			}
		})
	}
}

// A mount below another volume gets its mount point in the nearest volume above it.
func TestNestedFindsMountPointsWithinVolumes(t *testing.T) {
	got := nested(map[string][]podenv.Mount{
		"web": {{Path: "/data", Volume: "scratch", SubPath: "web"}, {Path: "/data/in", Volume: "keys"}, {Path: "/etc/app", Volume: "settings"},
			{Path: "/etc/app-x", Volume: "keys"}, {Path: "/etc/app/tls", Volume: "keys"}, {Path: "/etc/app/tls/ca/certs", Volume: "more"}},
		"log":  {{Path: "/settings", Volume: "settings"}, {Path: "/settings/tls", Volume: "keys"}},
		"proc": {{Path: "/", Volume: "scratch"}, {Path: "/proc", Volume: "scratch"}, {Path: "/proc/x", Volume: "keys"}},
	})
	want := map[string][]string{"scratch": {"web/in"}, "settings": {"tls"}, "keys": {"ca/certs"}}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("-want +got:\n%s", diff)
	}
}

func TestWarningsNameDifferencesFromThePod(t *testing.T) {
	got := strings.Join(testPlan(t, Config{}).warnings(), "\n")
	for _, want := range []string{"init container prepare", "container log is privileged"} {
		if !strings.Contains(got, want) {
			t.Errorf("no %q in\n%s", want, got)
		}
	}
	if strings.Contains(got, "mesh") {
		t.Errorf("the sidecar runs:\n%s", got)
	}
}

// Files have the owners and modes that the kubelet gives them.
func TestOwnedMatchesTheKubelet(t *testing.T) {
	token := podenv.Volume{Name: "token", Files: []podenv.File{{Path: "token", Mode: 0o600}, {Path: "ca.crt", Mode: 0o644}}}
	pod := testPod()
	pod.Spec.Volumes = []corev1.Volume{{Name: "token", VolumeSource: corev1.VolumeSource{Projected: &corev1.ProjectedVolumeSource{
		Sources: []corev1.VolumeProjection{{ServiceAccountToken: &corev1.ServiceAccountTokenProjection{Path: "token"}}},
	}}}}
	of := func() sandbox.File { return owned(pod, token).Files[0] }
	if f := of(); f.Owner != 1000 || f.Mode != 0o600 {
		t.Errorf("all containers have a user: %+v", f)
	}
	pod.Spec.Containers[0].SecurityContext.RunAsUser = pointer(int64(5))
	if f := of(); f.Owner != 0 || f.Mode != 0o600 {
		t.Errorf("two users, and a group: %+v", f)
	}
	pod.Spec.SecurityContext = nil
	if f := of(); f.Owner != 0 || f.Mode != 0o644 {
		t.Errorf("two users: %+v", f)
	}
	if f := owned(pod, token).Files[1]; f.Mode != 0o644 {
		t.Errorf("no token: %+v", f)
	}
}

// A pod's template adds no capability that Docker would not give: its editors would be root on this machine.
func TestRunAddsOnlyDefaultCapabilities(t *testing.T) {
	p := testPlan(t, Config{Arguments: Arguments{Capabilities: []string{"SYS_PTRACE", "CAP_BPF"}}})
	add := []corev1.Capability{"ALL", "SYS_ADMIN", "CAP_SYS_MODULE", "sys_ptrace", "BPF", "CAP_CHOWN", "net_raw"}
	p.containers[2].spec.SecurityContext.Capabilities = &corev1.Capabilities{Drop: []corev1.Capability{"KILL"}, Add: add}
	p.containers[1].spec.SecurityContext.Capabilities = &corev1.Capabilities{Add: []corev1.Capability{"NET_ADMIN"}}
	var got []string
	args := p.run("/run/x", 2, nil)
	for n, a := range args {
		if strings.HasPrefix(a, "--cap") {
			got = append(got, a+" "+args[n+1])
		}
	}
	want := []string{"--cap-drop KILL", "--cap-add CHOWN", "--cap-add NET_RAW", "--cap-add SYS_PTRACE", "--cap-add CAP_BPF"}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("-want +got:\n%s", diff)
	}
	said := strings.Join(p.warnings(), "\n")
	for _, want := range []string{
		"container web: omitting ALL, SYS_ADMIN, SYS_MODULE, which the pod adds and Docker does not grant by default; `-- --cap-add NAME` adds one",
		"container log: omitting NET_ADMIN, which the pod adds and Docker does not grant by default; `-c log -- --cap-add NAME` adds one",
	} {
		if !strings.Contains(said, want) {
			t.Errorf("no %q in\n%s", want, said)
		}
	}
}

// A warning names each flag for users and labels before the engine runs.
func TestWarningsNameUserNamespacesAndLabels(t *testing.T) {
	p := testPlan(t, Config{})
	if said := strings.Join(p.warnings(), "\n"); strings.Contains(said, "--userns") || strings.Contains(said, "label=disable") {
		t.Errorf("an engine without either:\n%s", said)
	}
	p.userns, p.selinux = true, true
	said := strings.Join(p.warnings(), "\n")
	for _, want := range []string{"--userns host", "--security-opt label=disable"} {
		if !strings.Contains(said, want) {
			t.Errorf("no %q in\n%s", want, said)
		}
	}
}
