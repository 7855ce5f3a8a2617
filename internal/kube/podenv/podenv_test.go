package podenv

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	authenticationv1 "k8s.io/api/authentication/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/kubernetes/fake"
	clienttesting "k8s.io/client-go/testing"
	"sigs.k8s.io/yaml"

	"kubevpn/internal/api"
)

const manifests = `
apiVersion: v1
kind: ConfigMap
metadata: {name: settings, namespace: shop}
data: {MODE: quick, color: blue, LATER: of the map}
binaryData: {raw: AAEC}
---
apiVersion: v1
kind: Secret
metadata: {name: keys, namespace: shop}
data: {password: aHVudGVyMg==, user: YW5u}
---
apiVersion: v1
kind: Service
metadata: {name: data-base, namespace: shop}
spec: {clusterIP: 10.96.0.7, ports: [{port: 5432, name: sql}, {port: 53, protocol: UDP, name: d-ns}]}
---
apiVersion: v1
kind: Service
metadata: {name: headless, namespace: shop}
spec: {clusterIP: None, ports: [{port: 1}]}
---
apiVersion: v1
kind: Service
metadata: {name: kubernetes, namespace: default}
spec: {clusterIP: 10.96.0.1, ports: [{port: 443, name: https}]}
---
apiVersion: v1
kind: Service
metadata: {name: elsewhere, namespace: default}
spec: {clusterIP: 10.96.0.9, ports: [{port: 80}]}
---
apiVersion: v1
kind: Node
metadata: {name: node-1}
status: {allocatable: {cpu: "4", memory: 8Gi, ephemeral-storage: 100Gi}}
`

func objectsOf(t *testing.T, manifests string) []runtime.Object {
	t.Helper()
	var all []runtime.Object
	for text := range strings.SplitSeq(manifests, "\n---\n") {
		var kind metav1.TypeMeta
		if err := yaml.Unmarshal([]byte(text), &kind); err != nil {
			t.Fatal(err)
		}
		var o runtime.Object
		switch kind.Kind {
		case "ConfigMap":
			o = &corev1.ConfigMap{}
		case "Secret":
			o = &corev1.Secret{}
		case "Service":
			o = &corev1.Service{}
		case "Node":
			o = &corev1.Node{}
		default:
			t.Fatalf("kind %q", kind.Kind)
		}
		if err := yaml.UnmarshalStrict([]byte(text), o); err != nil {
			t.Fatal(err)
		}
		all = append(all, o)
	}
	return all
}

// reader reads for container app of a pod with this spec.
func reader(t *testing.T, kube *fake.Clientset, spec string) *Reader {
	t.Helper()
	pod := &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Name: "web-1", Namespace: "shop", UID: "u-1", Labels: map[string]string{"app": "web", "tier": "front"}, Annotations: map[string]string{"note": "a \"b\""}},
		Status: corev1.PodStatus{
			HostIP: "10.99.0.1", HostIPs: []corev1.HostIP{{IP: "10.99.0.1"}, {IP: "fd00::1"}},
			PodIP: "10.244.1.5", PodIPs: []corev1.PodIP{{IP: "10.244.1.5"}, {IP: "fd01::5"}},
		},
	}
	if err := yaml.UnmarshalStrict([]byte(spec), &pod.Spec); err != nil {
		t.Fatal(err)
	}
	r, err := New(kube, pod, "app")
	if err != nil {
		t.Fatal(err)
	}
	return r
}

func messages(problems []Problem) []string {
	var all []string
	for _, p := range problems {
		all = append(all, p.Error())
	}
	return all
}

func TestEnvironmentEqualsTheKubelets(t *testing.T) {
	links := "DATA_BASE_PORT=tcp://10.96.0.7:5432 DATA_BASE_PORT_53_UDP=udp://10.96.0.7:53 DATA_BASE_PORT_53_UDP_ADDR=10.96.0.7 " +
		"DATA_BASE_PORT_53_UDP_PORT=53 DATA_BASE_PORT_53_UDP_PROTO=udp DATA_BASE_PORT_5432_TCP=tcp://10.96.0.7:5432 " +
		"DATA_BASE_PORT_5432_TCP_ADDR=10.96.0.7 DATA_BASE_PORT_5432_TCP_PORT=5432 DATA_BASE_PORT_5432_TCP_PROTO=tcp " +
		"DATA_BASE_SERVICE_HOST=10.96.0.7 DATA_BASE_SERVICE_PORT=5432 DATA_BASE_SERVICE_PORT_D_NS=53 DATA_BASE_SERVICE_PORT_SQL=5432"
	const host = "HOSTNAME=web-1 "
	master := "KUBERNETES_PORT=tcp://10.96.0.1:443 KUBERNETES_PORT_443_TCP=tcp://10.96.0.1:443 KUBERNETES_PORT_443_TCP_ADDR=10.96.0.1 " +
		"KUBERNETES_PORT_443_TCP_PORT=443 KUBERNETES_PORT_443_TCP_PROTO=tcp KUBERNETES_SERVICE_HOST=10.96.0.1 KUBERNETES_SERVICE_PORT=443 KUBERNETES_SERVICE_PORT_HTTPS=443"
	tests := []struct {
		name     string
		spec     string // of the pod, without containers' names
		want     string // secrets are marked with *
		problems []string
	}{
		{name: "Services", spec: `containers: [{name: app}]`, want: links + " " + host + master},
		{name: "links off", spec: `{enableServiceLinks: false, containers: [{name: app}]}`, want: host + master},
		{
			name: "all of a ConfigMap and of a Secret", want: host + master + " LATER=ours MODE=quick S_password*=hunter2 S_user*=ann color=blue",
			spec: `{enableServiceLinks: false, containers: [{name: app, envFrom: [{configMapRef: {name: settings}}, {prefix: S_, secretRef: {name: keys}}], env: [{name: LATER, value: ours}]}]}`,
		},
		{
			name: "keys, and what is made of them", want: "A=ann B*=user ann C=$(NOBODY) D=$(A) E=a$ F=$x G= H=10.96.0.1 " + host + master + " Z=(",
			spec: `{enableServiceLinks: false, containers: [{name: app, env: [
				{name: Z, value: (}, {name: A, value: ann}, {name: U, valueFrom: {secretKeyRef: {name: keys, key: user}}}, {name: B, value: user $(U)},
				{name: C, value: $(NOBODY)}, {name: D, value: $$(A)}, {name: E, value: a$}, {name: F, value: $x}, {name: G}, {name: H, value: $(KUBERNETES_SERVICE_HOST)}]}]}`,
		},
		{
			name: "downward API", want: "A=web-1 B=shop C=u-1 D=web E=a \"b\" F=node-1 G=robot H=10.99.0.1 " + host + "I=10.99.0.1,fd00::1 J=10.244.1.5 K=10.244.1.5,fd01::5 " + master + " L=2 M=250 N=8589934592 O=64 P=3",
			spec: `{enableServiceLinks: false, nodeName: node-1, serviceAccountName: robot, containers: [
				{name: other, resources: {limits: {memory: 64Mi}}},
				{name: app, resources: {limits: {cpu: 1500m}, requests: {cpu: 250m}}, env: [
				{name: A, valueFrom: {fieldRef: {fieldPath: metadata.name}}}, {name: B, valueFrom: {fieldRef: {fieldPath: metadata.namespace}}},
				{name: C, valueFrom: {fieldRef: {fieldPath: metadata.uid}}}, {name: D, valueFrom: {fieldRef: {fieldPath: "metadata.labels['app']"}}},
				{name: E, valueFrom: {fieldRef: {fieldPath: "metadata.annotations['note']"}}}, {name: F, valueFrom: {fieldRef: {fieldPath: spec.nodeName}}},
				{name: G, valueFrom: {fieldRef: {fieldPath: spec.serviceAccountName}}}, {name: H, valueFrom: {fieldRef: {fieldPath: status.hostIP}}},
				{name: I, valueFrom: {fieldRef: {fieldPath: status.hostIPs}}}, {name: J, valueFrom: {fieldRef: {fieldPath: status.podIP}}},
				{name: K, valueFrom: {fieldRef: {fieldPath: status.podIPs}}}, {name: L, valueFrom: {resourceFieldRef: {resource: limits.cpu}}},
				{name: M, valueFrom: {resourceFieldRef: {resource: requests.cpu, divisor: 1m}}}, {name: "N", valueFrom: {resourceFieldRef: {resource: limits.memory}}},
				{name: O, valueFrom: {resourceFieldRef: {containerName: other, resource: limits.memory, divisor: 1Mi}}},
				{name: P, valueFrom: {resourceFieldRef: {containerName: first, resource: limits.cpu}}}]}],
				initContainers: [{name: first, resources: {limits: {cpu: "3"}}}]}`,
		},
		{
			name: "a limit of the pod, one of the node, and none", want: "A=2 B=100 C=0 D=0 " + host + master,
			spec: `{enableServiceLinks: false, nodeName: node-1, resources: {limits: {cpu: "2"}}, containers: [{name: app, env: [
				{name: A, valueFrom: {resourceFieldRef: {resource: limits.cpu}}}, {name: B, valueFrom: {resourceFieldRef: {resource: limits.ephemeral-storage, divisor: 1Gi}}},
				{name: C, valueFrom: {resourceFieldRef: {resource: requests.cpu}}}, {name: D, valueFrom: {resourceFieldRef: {resource: limits.hugepages-2Mi}}}]}]}`,
		},
		{
			name: "a limit of a node that is not known", want: host + "HOST_NODE= " + master,
			spec: `{enableServiceLinks: false, containers: [{name: app, env: [
				{name: A, valueFrom: {resourceFieldRef: {resource: limits.cpu}}}, {name: HOST_NODE, valueFrom: {fieldRef: {fieldPath: spec.nodeName}}},
				{name: B, valueFrom: {resourceFieldRef: {containerName: none, resource: limits.cpu}}}]}]}`,
			problems: []string{
				`variable A: limits.cpu of container app is not set: the node defines it, and the pod has no node`,
				`variable B: the pod has no container "none"`,
			},
		},
		{
			name: "a hostname of its own", want: "HOSTNAME=db " + master,
			spec: `{enableServiceLinks: false, hostname: db, containers: [{name: app}]}`,
		},
		{
			name: "what is not there, and need not be", want: host + master,
			spec: `{enableServiceLinks: false, containers: [{name: app, envFrom: [{configMapRef: {name: none, optional: true}}, {secretRef: {name: none, optional: true}}], env: [
				{name: A, valueFrom: {configMapKeyRef: {name: none, key: a, optional: true}}}, {name: B, valueFrom: {configMapKeyRef: {name: settings, key: none, optional: true}}},
				{name: C, valueFrom: {secretKeyRef: {name: none, key: a, optional: true}}}, {name: D, valueFrom: {secretKeyRef: {name: keys, key: none, optional: true}}}]}]}`,
		},
		{
			name: "what is not there, and should be", want: host + master + " OK=yes",
			spec: `{enableServiceLinks: false, containers: [{name: app, envFrom: [{configMapRef: {name: none}}, {secretRef: {name: none}}], env: [{name: OK, value: "yes"},
				{name: A, valueFrom: {configMapKeyRef: {name: settings, key: none}}}, {name: B, valueFrom: {secretKeyRef: {name: keys, key: none}}},
				{name: C, valueFrom: {secretKeyRef: {name: none, key: a}}}, {name: D, valueFrom: {fieldRef: {fieldPath: spec.none}}}]}]}`,
			problems: []string{
				`variables of ConfigMap none: configmaps "none" not found`, `variables of Secret none: secrets "none" not found`,
				`variable A: ConfigMap settings has no key "none"`, `variable B: Secret keys has no key "none"`,
				`variable C: secrets "none" not found`, `variable D: unsupported fieldPath: spec.none`,
			},
		},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			variables, problems := reader(t, fake.NewClientset(objectsOf(t, manifests)...), tt.spec).Environment(t.Context())
			var got []string
			for _, v := range variables {
				if v.Name == "U" {
					continue
				}
				star := ""
				if v.Secret {
					star = "*"
				}
				got = append(got, v.Name+star+"="+v.Value)
			}
			if diff := cmp.Diff(tt.want, strings.Join(got, " ")); diff != "" {
				t.Errorf("-want +got\n%s", diff)
			}
			if diff := cmp.Diff(tt.problems, messages(problems)); diff != "" {
				t.Errorf("problems: -want +got\n%s", diff)
			}
		})
	}
}

func TestVolumesEqualTheKubelets(t *testing.T) {
	const spec = `
volumes:
- {name: all, configMap: {name: settings}}
- {name: some, secret: {secretName: keys, defaultMode: 0o440, items: [{key: user, path: deep/name}, {key: password, path: pw, mode: 0o400}]}}
- {name: down, downwardAPI: {items: [{path: labels, fieldRef: {fieldPath: metadata.labels}}, {path: cpu, resourceFieldRef: {containerName: app, resource: requests.cpu, divisor: 1m}},
  {path: most, resourceFieldRef: {containerName: app, resource: limits.cpu}}]}}
- name: together
  projected:
    defaultMode: 0o600
    sources: [{secret: {name: missing}}, {configMap: {name: settings, items: [{key: color, path: color}]}}, {secret: {name: keys, items: [{key: user, path: color}]}}, {secret: {name: none, optional: true}}]
- {name: scratch, emptyDir: {}}
- {name: disk, persistentVolumeClaim: {claimName: data}}
- {name: host, hostPath: {path: /}}
- {name: lost, configMap: {name: none}}
- {name: keyless, configMap: {name: settings, items: [{key: none, path: a}]}}
containers:
- name: app
  resources: {requests: {cpu: 100m}}
  env: [{name: WHERE, value: deep}, {name: OUTSIDE, value: ../x}]
  volumeMounts:
  - {name: some, mountPath: /etc/some/}
  - {name: all, mountPath: /etc}
  - {name: all, mountPath: /srv/color, subPath: color, readOnly: true}
  - {name: some, mountPath: /srv/deep, subPathExpr: $(WHERE)}
  - {name: some, mountPath: /srv/out, subPath: ../out}
  - {name: all, mountPath: /srv/none, subPath: none}
  - {name: some, mountPath: /srv/de, subPath: de}
  - {name: some, mountPath: /srv/outside, subPathExpr: $(OUTSIDE)}
  - {name: scratch, mountPath: /srv/made, subPath: made}
  - {name: scratch, mountPath: /srv/whole, subPath: ./}
  - {name: some, mountPath: /srv/unset, subPathExpr: $(NOWHERE)/x}
  - {name: down, mountPath: /down}
  - {name: together, mountPath: /together}
  - {name: scratch, mountPath: /tmp/x}
  - {name: disk, mountPath: /data}
  - {name: host, mountPath: /host}
  - {name: lost, mountPath: /lost}
  - {name: keyless, mountPath: /keyless}
`
	mounts, volumes, problems := reader(t, fake.NewClientset(objectsOf(t, manifests)...), spec).Volumes(t.Context())
	if diff := cmp.Diff([]Mount{
		{Path: "/down", Volume: "down", ReadOnly: true},
		{Path: "/etc", Volume: "all", ReadOnly: true},
		{Path: "/etc/some", Volume: "some", ReadOnly: true},
		{Path: "/srv/color", Volume: "all", SubPath: "color", ReadOnly: true},
		{Path: "/srv/deep", Volume: "some", SubPath: "deep", ReadOnly: true},
		{Path: "/srv/made", Volume: "scratch", SubPath: "made"},
		{Path: "/srv/whole", Volume: "scratch"},
		{Path: "/tmp/x", Volume: "scratch"},
		{Path: "/together", Volume: "together", ReadOnly: true},
	}, mounts); diff != "" {
		t.Errorf("mounts: -want +got\n%s", diff)
	}
	var got []string
	for _, v := range volumes {
		if v.Empty {
			got = append(got, v.Name+" empty")
		}
		for _, f := range v.Files {
			got = append(got, fmt.Sprintf("%s %s %04o %q", v.Name, f.Path, f.Mode, f.Data))
		}
	}
	if diff := cmp.Diff([]string{
		`all LATER 0644 "of the map"`, `all MODE 0644 "quick"`, `all color 0644 "blue"`, `all raw 0644 "\x00\x01\x02"`,
		`down cpu 0644 "100"`, `down labels 0644 "app=\"web\"\ntier=\"front\""`,
		`scratch empty`,
		`some deep/name 0440 "ann"`, `some pw 0400 "hunter2"`,
		`together color 0600 "ann"`,
	}, got); diff != "" {
		t.Errorf("files: -want +got\n%s", diff)
	}
	if diff := cmp.Diff([]string{
		`volume some at /srv/out: "../out" is not a valid path within a volume`,
		`volume all at /srv/none: the volume has nothing at none`,
		`volume some at /srv/de: the volume has nothing at de`,
		`volume some at /srv/outside: "$(OUTSIDE)" is not a valid path within a volume`,
		`volume some at /srv/unset: its subPathExpr is $(NOWHERE)/x, and NOWHERE has no value`,
		`file most of volume down: limits.cpu of container app is not set: the node defines it, and the pod has no node`,
		`volume together: secrets "missing" not found`,
		"volume disk at /data: PersistentVolumeClaim data: its content is in the cluster only; --volume disk=remote mounts it, and =DIRECTORY uses a directory of this machine",
		"volume host at /host: its content is in the cluster only; --volume host=remote mounts it, and =DIRECTORY uses a directory of this machine",
		`volume lost at /lost: configmaps "none" not found`,
		`volume keyless at /keyless: ConfigMap settings has no key "none"`,
	}, messages(problems)); diff != "" {
		t.Errorf("problems: -want +got\n%s", diff)
	}
}

func TestHereReplacesVolumes(t *testing.T) {
	const spec = `
volumes:
- {name: disk, persistentVolumeClaim: {claimName: data}}
- {name: settings, configMap: {name: settings}}
containers:
- name: app
  volumeMounts:
  - {name: disk, mountPath: /data}
  - {name: disk, mountPath: /dot, subPath: .}
  - {name: disk, mountPath: /inner, subPath: inner}
  - {name: disk, mountPath: /uploads, subPath: web/uploads, readOnly: true}
  - {name: disk, mountPath: /cache, subPath: cache}
  - {name: disk, mountPath: /out, subPath: out}
  - {name: settings, mountPath: /etc/settings}
`
	dir := t.TempDir()
	if err := os.Symlink("/etc", filepath.Join(dir, "out")); err != nil {
		t.Fatal(err)
	}
	if err := os.MkdirAll(filepath.Join(dir, "web", "uploads"), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink("web", filepath.Join(dir, "inner")); err != nil {
		t.Fatal(err)
	}
	r := reader(t, fake.NewClientset(objectsOf(t, manifests)...), spec)
	if err := r.Here(map[string]string{"disk": dir, "disc": dir}); err == nil || err.Error() != `the pod has no volume "disc"` || api.AsError(err).Hint != "it has disk, settings" {
		t.Error(err)
	}
	if err := r.Here(map[string]string{"disk": dir}); err != nil {
		t.Fatal(err)
	}
	mounts, volumes, problems := r.Volumes(t.Context())
	if diff := cmp.Diff([]Mount{
		{Path: "/data", Volume: "disk", Source: dir},
		{Path: "/dot", Volume: "disk", Source: dir},
		{Path: "/etc/settings", Volume: "settings", ReadOnly: true},
		{Path: "/inner", Volume: "disk", SubPath: "inner", Source: filepath.Join(dir, "web")}, // not the link
		{Path: "/uploads", Volume: "disk", SubPath: "web/uploads", Source: filepath.Join(dir, "web", "uploads"), ReadOnly: true},
	}, mounts); diff != "" {
		t.Errorf("mounts: -want +got\n%s", diff)
	}
	if len(volumes) != 1 || volumes[0].Name != "settings" {
		t.Errorf("%+v", volumes)
	}
	if diff := cmp.Diff([]string{
		"volume disk at /cache: in " + dir + ": statat cache: no such file or directory", "volume disk at /out: in " + dir + ": statat out: path escapes from parent",
	}, messages(problems)); diff != "" {
		t.Errorf("problems: -want +got\n%s", diff)
	}
}

// Reader requests a token once, bound to the pod, and again when most of its lifetime has passed.
func TestTokenIsRenewedBeforeItExpires(t *testing.T) {
	kube := fake.NewClientset(objectsOf(t, manifests)...)
	life, asked := time.Hour, 0
	kube.PrependReactor("create", "serviceaccounts/token", func(a clienttesting.Action) (bool, runtime.Object, error) {
		create := a.(clienttesting.CreateActionImpl)
		r := create.GetObject().(*authenticationv1.TokenRequest)
		asked++
		if diff := cmp.Diff(authenticationv1.TokenRequestSpec{
			Audiences: []string{"vault"}, ExpirationSeconds: new(int64(3607)),
			BoundObjectRef: &authenticationv1.BoundObjectReference{APIVersion: "v1", Kind: "Pod", Name: "web-1", UID: "u-1"},
		}, r.Spec); diff != "" || create.Name != "robot" {
			t.Errorf("asked for %s's: -want +got\n%s", create.Name, diff)
		}
		r.Status = authenticationv1.TokenRequestStatus{Token: fmt.Sprintf("token %d", asked), ExpirationTimestamp: metav1.NewTime(time.Now().Add(life))}
		return true, r, nil
	})
	r := reader(t, kube, `
serviceAccountName: robot
volumes: [{name: t, projected: {sources: [{serviceAccountToken: {path: token, audience: vault, expirationSeconds: 3607}}]}}]
containers: [{name: app, volumeMounts: [{name: t, mountPath: /t}]}]`)
	read := func() string {
		_, volumes, problems := r.Volumes(t.Context())
		if len(problems) > 0 {
			t.Fatal(problems)
		}
		f := volumes[0].Files[0]
		return fmt.Sprintf("%s %o %s", f.Path, f.Mode, f.Data)
	}
	for range 2 {
		if got := read(); got != "token 600 token 1" {
			t.Error(got)
		}
	}
	// The monotonic clock stops while the machine sleeps, so the time must not contain it.
	if known := r.tokens[tokenOf{"vault", 3607}]; known.renewAt != known.renewAt.Round(0) {
		t.Errorf("it is renewed at %v", known.renewAt)
	}
	r.tokens[tokenOf{"vault", 3607}] = token{value: "token 1", renewAt: time.Now()}
	if got := read(); got != "token 600 token 2" {
		t.Error(got)
	}
	kube.PrependReactor("create", "serviceaccounts/token", func(clienttesting.Action) (bool, runtime.Object, error) {
		return true, nil, apierrors.NewForbidden(corev1.Resource("serviceaccounts/token"), "robot", errors.New("no"))
	})
	// If the request fails, Reader keeps a token that is still valid.
	r.tokens[tokenOf{"vault", 3607}] = token{value: "token 2", renewAt: time.Now(), expires: time.Now().Add(time.Minute)}
	if got := read(); got != "token 600 token 2" {
		t.Error(got)
	}
	r.tokens[tokenOf{"vault", 3607}] = token{value: "token 2", renewAt: time.Now(), expires: time.Now()}
	if _, _, problems := r.Volumes(t.Context()); len(problems) != 1 || !apierrors.IsForbidden(problems[0]) {
		t.Errorf("%v", problems)
	}
}

// The environment of a program in the container adds variables to those of the API, and replaces none.
func TestSeenAddsVariablesOfImage(t *testing.T) {
	seen := []byte("PATH=/bin\x00HOSTNAME=web-1\x00LANG=C\x00COLOR=of the image\x00TOKEN=t0k\x00BULK=b\x00A=B=C\x00noise\x00")
	environment := func(kube *fake.Clientset, spec string) (string, []string) {
		r := reader(t, kube, spec)
		r.Seen(seen)
		variables, problems := r.Environment(t.Context())
		var got []string
		for _, v := range variables {
			text := v.Name + "=" + v.Value
			if v.Secret {
				text += "*"
			}
			if v.Image {
				text += " (image)"
			}
			if !strings.HasPrefix(v.Name, "KUBERNETES_") {
				got = append(got, text)
			}
		}
		return strings.Join(got, "\n"), messages(problems)
	}
	const spec = `{enableServiceLinks: false, containers: [{name: app, env: [{name: COLOR, valueFrom: {configMapKeyRef: {name: settings, key: color}}},
		{name: TOKEN, valueFrom: {secretKeyRef: {name: hidden, key: token}}}, {name: OTHER, valueFrom: {secretKeyRef: {name: hidden, key: other}}}]}]}`
	got, problems := environment(fake.NewClientset(objectsOf(t, manifests)...), spec)
	if diff := cmp.Diff("A=B=C (image)\nBULK=b (image)\nCOLOR=blue\nHOSTNAME=web-1\nLANG=C (image)\nPATH=/bin (image)\nTOKEN=t0k*", got); diff != "" {
		t.Errorf("-want +got\n%s", diff)
	}
	if diff := cmp.Diff([]string{`variable OTHER: secrets "hidden" not found`}, problems); diff != "" {
		t.Errorf("problems: -want +got\n%s", diff)
	}
	// Each variable may come from the unreadable Secret, so it counts as secret.
	got, problems = environment(fake.NewClientset(objectsOf(t, manifests)...), `{enableServiceLinks: false, containers: [{name: app, envFrom: [{secretRef: {name: hidden}}],
		env: [{name: MADE, value: "$(BULK) $(NOBODY)"}]}]}`)
	if diff := cmp.Diff("A=B=C* (image)\nBULK=b* (image)\nCOLOR=of the image* (image)\nHOSTNAME=web-1*\nLANG=C* (image)\nMADE=b $(NOBODY)*\nPATH=/bin* (image)\nTOKEN=t0k* (image)", got); diff != "" || problems != nil {
		t.Errorf("-want +got\n%s\n%v", diff, problems)
	}
	// If all objects are readable, $(NAME) does not expand to a variable of the image.
	got, _ = environment(fake.NewClientset(objectsOf(t, manifests)...), `{enableServiceLinks: false, containers: [{name: app, env: [{name: MADE, value: $(BULK)}]}]}`)
	if !strings.Contains(got, "MADE=$(BULK)\n") {
		t.Error(got)
	}
}

// A user with rights in one namespace may not read the Service of the API server.
func TestMasterHasDefaultsWhenForbidden(t *testing.T) {
	for _, tt := range []struct {
		name, seen, host, port string
	}{
		{name: "not seen", host: "kubernetes.default.svc", port: "443"},
		{name: "seen", seen: "KUBERNETES_SERVICE_HOST=fd00::1\x00KUBERNETES_SERVICE_PORT=6443\x00HOME=/root\x00", host: "fd00::1", port: "6443"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			kube := fake.NewClientset(objectsOf(t, manifests)...)
			kube.PrependReactor("get", "services", func(clienttesting.Action) (bool, runtime.Object, error) {
				return true, nil, apierrors.NewForbidden(corev1.Resource("services"), "kubernetes", errors.New("no"))
			})
			r := reader(t, kube, `{containers: [{name: app, env: [{name: API, value: $(KUBERNETES_SERVICE_HOST)}]}]}`)
			if tt.seen != "" {
				r.Seen([]byte(tt.seen))
			}
			variables, problems := r.Environment(t.Context())
			got := map[string]Variable{}
			for _, v := range variables {
				got[v.Name] = v
			}
			url := "tcp://" + net.JoinHostPort(tt.host, tt.port)
			for name, want := range map[string]string{
				"API": tt.host, "KUBERNETES_SERVICE_HOST": tt.host, "KUBERNETES_SERVICE_PORT": tt.port, "KUBERNETES_SERVICE_PORT_HTTPS": tt.port, "KUBERNETES_PORT": url,
				"KUBERNETES_PORT_" + tt.port + "_TCP": url, "KUBERNETES_PORT_" + tt.port + "_TCP_ADDR": tt.host, "DATA_BASE_SERVICE_HOST": "10.96.0.7",
			} {
				if v := got[name]; v.Value != want || v.Secret || v.Image {
					t.Errorf("%s: %+v, want %s", name, v, want)
				}
			}
			if v := got["HOME"]; tt.seen != "" && (!v.Image || v.Secret) {
				t.Errorf("%+v", v)
			}
			if len(problems) > 0 {
				t.Error(problems)
			}
		})
	}
}

// A binary value of a Secret appears in no variable and in no message.
func TestEnvironmentOmitsBinaryValues(t *testing.T) {
	kube := fake.NewClientset(append(objectsOf(t, manifests), &corev1.Secret{ObjectMeta: metav1.ObjectMeta{Name: "binary", Namespace: "shop"},
		Data: map[string][]byte{"STORE": []byte("s3cr3t\x00"), "text": []byte("fine")}})...)
	variables, problems := reader(t, kube, `{enableServiceLinks: false, containers: [{name: app, envFrom: [{secretRef: {name: binary}}], env: [{name: MADE, value: "of $(STORE)"}]}]}`).Environment(t.Context())
	names := map[string]bool{}
	for _, v := range variables {
		names[v.Name] = true
	}
	if names["STORE"] || names["MADE"] || !names["text"] {
		t.Errorf("%v", names)
	}
	if diff := cmp.Diff([]string{"variable MADE: its value contains a NUL byte, which environment variables cannot contain", "variable STORE: its value contains a NUL byte, which environment variables cannot contain"}, messages(problems)); diff != "" {
		t.Errorf("problems: -want +got\n%s", diff)
	}
}

func FuzzExpand(f *testing.F) {
	for s, want := range map[string]string{
		"": "", "$": "$", "$$": "$", "$(": "$(", "$(A)": "1", "$$(A)": "$(A)", "$$$(A)": "$1", "a$(B)$(": "a$(B)$(", "$()": "$()", "$(A$(A))": "$(A$(A))", "$x$(A)": "$x1",
	} {
		e := environment{known: map[string]Variable{"A": {Value: "1"}}}
		if got, _ := e.expand(s); got != want {
			f.Errorf("%q became %q, want %q", s, got, want)
		}
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, s string) {
		e := environment{known: map[string]Variable{"A": {Value: "1"}}}
		got, _ := e.expand(s)
		if !strings.Contains(s, "$") && got != s {
			t.Errorf("%q became %q", s, got)
		}
		if len(got) > len(s) {
			t.Errorf("%q grew to %q", s, got)
		}
	})
}

// An image whose cat writes without end does not fill this machine's memory.
func TestSeeIsBounded(t *testing.T) {
	r := reader(t, fake.NewClientset(), "containers: [{name: app}]")
	written := 0
	err := r.See(t.Context(), func(_ context.Context, _ string, _ []string, stdout io.Writer) error {
		for written < 64<<20 {
			n, err := stdout.Write(make([]byte, 1<<20))
			if written += n; err != nil {
				return err
			}
		}
		return nil
	})
	if err == nil || written > environBytes {
		t.Errorf("%d bytes were taken, %v", written, err)
	}
}
