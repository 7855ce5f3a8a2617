package install

import (
	"slices"
	"strings"
	"testing"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	k8stesting "k8s.io/client-go/testing"

	"kubevpn/internal/api"
)

// prepared is a manager that somebody installed, with the Deployment changed by edit.
func prepared(edit func(*corev1.PodSpec)) []runtime.Object {
	objects := installed("kubevpn", image)
	for _, o := range objects {
		if d, is := o.(*appsv1.Deployment); is {
			edit(&d.Spec.Template.Spec)
		}
	}
	return objects
}

func TestPreparedDeploymentIsNotMistakenForOurs(t *testing.T) {
	for _, tt := range []struct {
		name string
		edit func(*corev1.PodSpec)
		want string // a part of the error
	}{
		{"a second container", func(s *corev1.PodSpec) {
			s.Containers = append(s.Containers, corev1.Container{Name: "sniffer", Image: "evil"})
		}, "containers/sniffer/"},
		{"an init container", func(s *corev1.PodSpec) {
			s.InitContainers = []corev1.Container{{Name: "patch", Image: "evil"}}
		}, "initContainers/patch/"},
		{"an ephemeral container", func(s *corev1.PodSpec) {
			s.EphemeralContainers = []corev1.EphemeralContainer{{EphemeralContainerCommon: corev1.EphemeralContainerCommon{Name: "debug"}}}
		}, "ephemeralContainers/debug/"},
		{"another container in place of the manager", func(s *corev1.PodSpec) { s.Containers[0].Name = "web" }, "containers/manager/args is missing"},
		{"no container", func(s *corev1.PodSpec) { s.Containers = nil }, "containers/manager/args is missing"},
		{"another ServiceAccount", func(s *corev1.PodSpec) { s.ServiceAccountName = "cluster-admin" }, `serviceAccountName is "cluster-admin"`},
		{"another ServiceAccount, by the old field", func(s *corev1.PodSpec) {
			s.ServiceAccountName, s.DeprecatedServiceAccount = "", "cluster-admin"
		}, `serviceAccount is "cluster-admin"`},
		{"the node's network", func(s *corev1.PodSpec) { s.HostNetwork = true }, "hostNetwork"},
		{"the node's processes", func(s *corev1.PodSpec) { s.HostPID = true }, "hostPID"},
		{"the node's IPC", func(s *corev1.PodSpec) { s.HostIPC = true }, "hostIPC"},
		{"privileged", func(s *corev1.PodSpec) { s.Containers[0].SecurityContext.Privileged = new(true) }, "privileged"},
		{"privilege escalation", func(s *corev1.PodSpec) { s.Containers[0].SecurityContext.AllowPrivilegeEscalation = new(true) }, "allowPrivilegeEscalation"},
		{"a capability", func(s *corev1.PodSpec) {
			s.Containers[0].SecurityContext.Capabilities.Add = []corev1.Capability{"NET_ADMIN"}
		}, "NET_ADMIN"},
		{"another program of the image", func(s *corev1.PodSpec) { s.Containers[0].Command = []string{"sh"} }, "command"},
		{"another role of the program", func(s *corev1.PodSpec) { s.Containers[0].Args = []string{"gateway"} }, "args"},
		{"a volume over the program", func(s *corev1.PodSpec) {
			s.Containers[0].VolumeMounts = []corev1.VolumeMount{{Name: "x", MountPath: "/traffic"}}
		}, "volumeMounts"},
		{"a volume of the node", func(s *corev1.PodSpec) {
			s.Volumes = []corev1.Volume{{Name: "x", VolumeSource: corev1.VolumeSource{HostPath: &corev1.HostPathVolumeSource{Path: "/"}}}}
		}, "hostPath"},
		{"a nameserver", func(s *corev1.PodSpec) {
			s.DNSPolicy, s.DNSConfig = corev1.DNSNone, &corev1.PodDNSConfig{Nameservers: []string{"192.0.2.1"}}
		}, "dnsPolicy"},
		{"an API server", func(s *corev1.PodSpec) {
			s.Containers[0].Env = append(s.Containers[0].Env, corev1.EnvVar{Name: "KUBERNETES_SERVICE_HOST", Value: "192.0.2.1"})
		}, "KUBERNETES_SERVICE_HOST"},
		{"an empty variable", func(s *corev1.PodSpec) {
			s.Containers[0].Env = append(s.Containers[0].Env, corev1.EnvVar{Name: "SSL_CERT_DIR"})
		}, "SSL_CERT_DIR"},
		{"a debug setting of Go", func(s *corev1.PodSpec) {
			s.Containers[0].Env = append(s.Containers[0].Env, corev1.EnvVar{Name: "GODEBUG", Value: "tlsmlkem=0"})
		}, "GODEBUG"},
		{"a variable twice", func(s *corev1.PodSpec) {
			s.Containers[0].Env = append(s.Containers[0].Env, corev1.EnvVar{Name: "POD_IP", Value: "192.0.2.1"})
		}, "POD_IP"},
		{"a variable of an annotation", func(s *corev1.PodSpec) {
			s.Containers[0].Env[1].ValueFrom.FieldRef.FieldPath = "metadata.annotations['x']"
		}, "POD_IP"},
		{"user 0", func(s *corev1.PodSpec) { s.SecurityContext.RunAsUser = new(int64(0)) }, `securityContext/runAsUser is "0"`},
		{"a user that may be 0", func(s *corev1.PodSpec) { s.Containers[0].SecurityContext.RunAsNonRoot = new(false) }, "runAsNonRoot"},
		{"no seccomp profile", func(s *corev1.PodSpec) { s.SecurityContext.SeccompProfile = nil }, "seccompProfile/type is missing"},
		{"no security context", func(s *corev1.PodSpec) { s.Containers[0].SecurityContext = nil }, "is missing"},
		{"its conns for all pods", func(s *corev1.PodSpec) { s.Containers[0].Args = []string{"manager", "--listen", ":10800"} }, "args"},
		{"a port of the node", func(s *corev1.PodSpec) { s.Containers[0].Ports[0].HostPort = 80 }, "hostPort"},
		{"a network volume", func(s *corev1.PodSpec) {
			s.Volumes = []corev1.Volume{{Name: "x", VolumeSource: corev1.VolumeSource{NFS: &corev1.NFSVolumeSource{Server: "192.0.2.1", Path: "/"}}}}
			s.Containers[0].VolumeMounts = []corev1.VolumeMount{{Name: "x", MountPath: "/etc/resolv.conf"}}
		}, "volumes/x/nfs"},
		{"text that a terminal interprets", func(s *corev1.PodSpec) { s.Hostname = "\x9b2J" + strings.Repeat("x", 1000) }, `hostname is "\x9b2J`},
	} {
		for _, o := range []Options{{Image: image}, {Image: "registry.example/kubevpn:2", Upgrade: true}} {
			name := tt.name
			if o.Upgrade {
				name += ", upgraded"
			}
			t.Run(name, func(t *testing.T) {
				w := newWorld("", "", prepared(tt.edit)...)
				e := api.AsError((&ensurer{kube: w, o: o, timeout: 10 * time.Second}).run(t.Context()))
				if e == nil || e.Code != api.ExitInstall || !strings.Contains(e.Message, tt.want) || !strings.Contains(e.Hint, "kubectl -n kubevpn delete deployment") {
					t.Errorf("got %+v, want exit code %d about %s", e, api.ExitInstall, tt.want)
				}
				if len(w.changes) > 0 {
					t.Errorf("changed: %q", w.changes)
				}
			})
		}
	}
}

// A policy of the cluster adds a container while the Deployment is applied.
func TestRefusalAfterInstallSaysWhatWasApplied(t *testing.T) {
	w := newWorld("", "")
	w.PrependReactor("get", "deployments", func(k8stesting.Action) (bool, runtime.Object, error) {
		if !slices.Contains(w.changes, "patch deployments kubevpn/"+ManagerName) {
			return false, nil, nil
		}
		d := deployment(Options{Namespace: "kubevpn", Image: image})
		d.Spec.Template.Spec.Containers = append(d.Spec.Template.Spec.Containers, corev1.Container{Name: "mesh"})
		return true, d, nil
	})
	e := api.AsError((&ensurer{kube: w, o: Options{Image: image}, timeout: 10 * time.Second}).run(t.Context()))
	if e == nil || e.Code != api.ExitInstall || !strings.Contains(e.Message, "containers/mesh/") ||
		strings.Contains(e.Hint, nothing) || !strings.Contains(e.Hint, "kubevpn uninstall --manager-namespace kubevpn") {
		t.Errorf("got %+v", e)
	}
}

// An admin may change these fields: the Deployment still runs the same program.
func TestTunedDeploymentIsOurs(t *testing.T) {
	w := newWorld("", "", prepared(func(s *corev1.PodSpec) {
		s.Tolerations = []corev1.Toleration{{Operator: corev1.TolerationOpExists}}
		s.ImagePullSecrets = []corev1.LocalObjectReference{{Name: "registry"}}
		s.PriorityClassName = "system-cluster-critical"
		s.DeprecatedServiceAccount = ManagerName // as the API server sets it
		s.DNSPolicy, s.RestartPolicy, s.SchedulerName = corev1.DNSClusterFirst, corev1.RestartPolicyAlways, corev1.DefaultSchedulerName
		s.DNSConfig = &corev1.PodDNSConfig{Options: []corev1.PodDNSConfigOption{{Name: "ndots", Value: new("2")}}}
		s.SecurityContext.RunAsUser, s.SecurityContext.Sysctls = nil, nil // of a platform's range, and not permitted there
		c := &s.Containers[0]
		c.Args = append(c.Args, "--proxy-listen", "")
		c.Env = append(c.Env, corev1.EnvVar{Name: "GOGC", Value: "80"}, corev1.EnvVar{Name: "GOMAXPROCS", Value: "4"})
		c.TerminationMessagePath = corev1.TerminationMessagePathDefault
		c.Ports = append(c.Ports, corev1.ContainerPort{Name: "metrics", ContainerPort: 10803, Protocol: corev1.ProtocolTCP})
		c.Resources.Requests["ephemeral-storage"] = resource.MustParse("1Gi") // as GKE Autopilot sets it
		c.LivenessProbe.TimeoutSeconds = 10
		c.SecurityContext.Privileged, c.SecurityContext.RunAsNonRoot, c.SecurityContext.RunAsUser = new(false), new(true), new(int64(1000))
		c.SecurityContext.SeccompProfile = &corev1.SeccompProfile{Type: corev1.SeccompProfileTypeRuntimeDefault}
	})...)
	if err := (&ensurer{kube: w, o: Options{Image: image}, timeout: 10 * time.Second}).run(t.Context()); err != nil {
		t.Error(err)
	}
}

// trusting is the Options of a user who trusts the managers.
func trusting(image string, managers ...api.TrustedManager) Options {
	return Options{Image: image, Consent: &api.Consent{Managers: managers}}
}

func TestManagerOfOthersIsTrustedOnce(t *testing.T) {
	// run connects to the objects' manager, and returns the manager that has to be trusted first, or that was used.
	run := func(t *testing.T, o Options, deny string, objects ...runtime.Object) (asked *api.TrustedManager, used api.TrustedManager, installed bool) {
		t.Helper()
		for _, obj := range objects {
			switch obj := obj.(type) {
			case *corev1.Namespace:
				obj.UID = "ns-1"
			case *appsv1.Deployment:
				obj.UID, obj.CreationTimestamp = "d-1", metav1.NewTime(time.Now().Add(-49*time.Hour))
			}
		}
		w := newWorld(deny, "", objects...)
		o.Progress = func(e api.Event) { installed = installed || e.Installed != nil }
		e := &ensurer{kube: w, o: o, timeout: 10 * time.Second}
		err := api.AsError(e.run(t.Context()))
		switch {
		case err == nil:
			return nil, e.result.Manager, installed
		case err.Code != api.ExitConsent || err.Needs == nil || len(err.Needs.Managers) != 1 || err.Hint == "":
			t.Fatalf("got %+v", err)
		case len(w.changes) > 0:
			t.Errorf("changed before it was trusted: %q", w.changes)
		}
		return &err.Needs.Managers[0], api.TrustedManager{}, installed
	}
	there := func(image string) []runtime.Object { return installed("kubevpn", image) }

	asked, _, _ := run(t, trusting(image), "", there("registry.example/kubevpn:1")...)
	want := api.TrustedManager{Namespace: "kubevpn", NamespaceUID: "ns-1", Repository: "registry.example/kubevpn", ServiceAccount: ManagerName,
		Image: "registry.example/kubevpn:1", Age: "2d1h"}
	if asked == nil || *asked != want {
		t.Fatalf("asked about %+v, want %+v", asked, want)
	}
	trusted := trusting(image, *asked)
	for name, image := range map[string]string{
		"the same": "registry.example/kubevpn:1", "another tag": "registry.example/kubevpn:2", "a digest": "registry.example/kubevpn:2@sha256:ab",
	} {
		if again, _, _ := run(t, trusted, "", there(image)...); again != nil {
			t.Errorf("%s: asked again about %+v", name, again)
		}
	}
	for name, image := range map[string]string{
		"another repository": "registry.example/other:1", "another registry": "evil.example/kubevpn:1", "a port": "registry.example:5000/kubevpn:1",
	} {
		if again, _, _ := run(t, trusted, "", there(image)...); again == nil {
			t.Errorf("%s: not asked", name)
		}
	}
	t.Run("asks again for a namespace of the same name", func(t *testing.T) {
		other := trusted
		m := *asked
		m.NamespaceUID = "ns-0"
		other.Consent = &api.Consent{Managers: []api.TrustedManager{m}}
		if again, _, _ := run(t, other, "", there(image)...); again == nil {
			t.Error("not asked")
		}
	})
	t.Run("asks before it upgrades the manager of others", func(t *testing.T) {
		o := trusting("registry.example/kubevpn:9")
		o.Upgrade = true
		if asked, _, _ := run(t, o, "", there(image)...); asked == nil {
			t.Error("not asked")
		}
	})
	t.Run("the Deployment identifies an unreadable namespace", func(t *testing.T) {
		const deny = "get:namespaces@* get:namespaces@"
		asked, _, _ := run(t, trusting(image), deny, there(image)...)
		if asked == nil || asked.NamespaceUID != "deployment:d-1" {
			t.Fatalf("asked about %+v", asked)
		}
		if again, _, _ := run(t, trusting(image, *asked), deny, there(image)...); again != nil {
			t.Errorf("asked again: %+v", again)
		}
	})
	t.Run("trusts what the user installed", func(t *testing.T) {
		asked, used, installed := run(t, trusting(image), "", inNamespace("kubevpn", ready))
		if asked != nil || !installed || used.Repository != "registry.example/kubevpn" {
			t.Errorf("asked %+v, used %+v, told %v", asked, used, installed)
		}
	})
	t.Run("asks about a namespace prepared by others", func(t *testing.T) {
		prepared := []runtime.Object{namespaceObject("kubevpn"), inNamespace("kubevpn", ready)}
		asked, _, _ := run(t, trusting(image), "", prepared...)
		if asked == nil || asked.Namespace != "kubevpn" || asked.NamespaceUID != "ns-1" {
			t.Fatalf("asked about %+v", asked)
		}
		if again, _, installed := run(t, trusting(image, *asked), "", prepared...); again != nil || !installed {
			t.Errorf("asked again: %+v", again)
		}
		named := trusting(image)
		named.Namespace = "kubevpn"
		if asked, _, _ := run(t, named, "", prepared...); asked != nil {
			t.Errorf("asked about the namespace that the user named: %+v", asked)
		}
	})
}

func TestImageComesFromTheTrustedDeployment(t *testing.T) {
	objects := installed("kubevpn", image)
	for _, obj := range objects {
		if p, is := obj.(*corev1.Pod); is {
			p.Spec.Containers[0].Image = "evil.example/kubevpn:1"
		}
	}
	w := newWorld("", "", objects...)
	m := api.TrustedManager{Namespace: "kubevpn", Repository: "registry.example/kubevpn", ServiceAccount: ManagerName}
	if got, err := Image(t.Context(), w, m); err != nil || got != image {
		t.Errorf("got %q, %v; want the template's image", got, err)
	}
	if got, err := Find(t.Context(), w, "", "", api.Consent{Managers: []api.TrustedManager{m}}); err != nil || got != image {
		t.Errorf("without a connection: %q, %v", got, err)
	}
	if _, err := Find(t.Context(), w, "", "", api.Consent{}); api.AsError(err).Code != api.ExitConsent {
		t.Errorf("without a connection, not trusted: %v", err)
	}
	if _, err := Find(t.Context(), newWorld("", ""), "", "team", api.Consent{}); api.AsError(err).Code != api.ExitInstall {
		t.Errorf("none there: %v", err)
	}
	m.Repository = "registry.example/old"
	if _, err := Image(t.Context(), w, m); api.AsError(err).Code != api.ExitConsent {
		t.Errorf("of another repository by now: %v", err)
	}
}

func TestManagerNeedsPullSecret(t *testing.T) {
	pod := inNamespace("kubevpn", ready)
	pod.Labels = selectorLabels()
	for _, want := range []bool{false, true} {
		if want { // of the template, or added by admission from the service account
			pod.Spec.ImagePullSecrets = []corev1.LocalObjectReference{{Name: "registry"}}
		}
		if got, err := NeedsPullSecret(t.Context(), newWorld("", "", pod), "kubevpn"); err != nil || got != want {
			t.Errorf("got %v, %v, want %v", got, err, want)
		}
	}
}

func TestPodInPullBackoffIsReplaced(t *testing.T) {
	stuck := func() *corev1.Pod {
		p := aPod("stuck", func(p *corev1.Pod) {
			p.Status.ContainerStatuses = []corev1.ContainerStatus{{Name: containerName, State: corev1.ContainerState{
				Waiting: &corev1.ContainerStateWaiting{Reason: "ImagePullBackOff", Message: "Back-off pulling image"}}}}
		})
		p.Namespace, p.Labels = "kubevpn", selectorLabels()
		p.UID = "stuck-uid"
		return p
	}
	deleted := func(w *world) bool { return slices.Contains(w.changes, "delete pods kubevpn/stuck") }
	for name, o := range map[string]Options{"the same image": {Image: image}, "no image": {}} {
		w := newWorld("", "", append(without[*corev1.Pod](installed("kubevpn", image)), stuck())...)
		e := &ensurer{kube: w, o: o, timeout: 100 * time.Millisecond}
		_ = e.run(t.Context()) // no controller makes the next pod
		if !deleted(w) {
			t.Errorf("%s: the pod stays, and the kubelet waits out its backoff: %q", name, w.changes)
		}
	}
	w := newWorld("delete:pods@*", "", append(without[*corev1.Pod](installed("kubevpn", image)), stuck())...)
	if e := api.AsError((&ensurer{kube: w, o: Options{Image: image}, timeout: 10 * time.Second}).run(t.Context())); e == nil || e.Code != api.ExitImagePull || deleted(w) {
		t.Errorf("without the right to delete pods: %+v, %q", e, w.changes)
	}
	w = newWorld("", "", append(installed("kubevpn", image), stuck())...)
	d, err := w.AppsV1().Deployments("kubevpn").Get(t.Context(), ManagerName, metav1.GetOptions{})
	if err != nil {
		t.Fatal(err)
	}
	d.Status.AvailableReplicas = 1
	if _, err := w.AppsV1().Deployments("kubevpn").UpdateStatus(t.Context(), d, metav1.UpdateOptions{}); err != nil && !apierrors.IsNotFound(err) {
		t.Fatal(err)
	}
	if err := (&ensurer{kube: w, o: Options{Image: image}, timeout: 10 * time.Second}).run(t.Context()); err != nil || deleted(w) {
		t.Errorf("beside one that serves: %v, %q", err, w.changes)
	}
}

func TestUserRoleReadsOnlyItsNamespace(t *testing.T) {
	for _, r := range objects(Options{Namespace: "team"}, "Role")[0].(*rbacv1.Role).Rules {
		if slices.Contains(r.Resources, "namespaces") {
			if !slices.Equal(r.Verbs, []string{"get"}) || !slices.Equal(r.ResourceNames, []string{"team"}) {
				t.Errorf("%+v", r)
			}
			return
		}
	}
	t.Error("users cannot read the UID of the manager's namespace")
}

func TestNoImageIsInstalledWithoutOneBeingSet(t *testing.T) {
	for name, objects := range map[string][]runtime.Object{"nothing there": nil, "upgrade": installed("kubevpn", image)} {
		w := newWorld("", "", objects...)
		e := api.AsError((&ensurer{kube: w, o: Options{Upgrade: name == "upgrade"}, timeout: 10 * time.Second}).run(t.Context()))
		if e == nil || e.Code != api.ExitInstall || !strings.Contains(e.Hint, "--image") || !strings.Contains(e.Hint, "KUBEVPN_IMAGE") {
			t.Errorf("%s: got %+v", name, e)
		}
		if len(w.changes) > 0 {
			t.Errorf("%s: changed %q", name, w.changes)
		}
	}
	if _, err := Manifest(Options{}); err == nil {
		t.Error("a manifest without an image")
	}
	w := newWorld("", "", installed("kubevpn", image)...)
	e := &ensurer{kube: w, timeout: 10 * time.Second}
	if err := e.run(t.Context()); err != nil || len(e.result.Warnings) > 0 {
		t.Errorf("using what is there: %v, %q", err, e.result.Warnings)
	}
}
