//go:build e2e && linux

package e2e

import (
	"bytes"
	"context"
	"encoding/base64"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	clientcmdapi "k8s.io/client-go/tools/clientcmd/api"

	"kubevpn/internal/testenv"
	"kubevpn/test/e2e/build"
)

const showRef = "docker.io/kubevpn/show:e2e"

var buildShow = sync.OnceValue(func() error { return build.Show(context.Background(), bin, showRef) })

// kubeletObjects is applied before the pods: a kubelet that does not know a Service yet omits its variables.
var kubeletObjects = devObjects("kubelet", `data: {color: blue, MODE: quick, page: "welcome\n", dotted.name: d}
binaryData: {raw: AAECgP8=}`, "password: hunter2, USER_NAME: ann") + `
apiVersion: v1
kind: ConfigMap
metadata: {name: empty, namespace: kubelet}
---
apiVersion: v1
kind: Service
metadata: {name: data-base, namespace: kubelet}
spec: {ports: [{port: 5432, name: sql}, {port: 53, protocol: UDP, name: d-ns}]}
---
apiVersion: v1
kind: Service
metadata: {name: headless, namespace: kubelet}
spec: {clusterIP: None, ports: [{port: 1}]}
`

const kubeletPods = `
apiVersion: apps/v1
kind: Deployment
metadata: {name: everything, namespace: kubelet}
spec:
  selector: {matchLabels: {app: everything}}
  template:
    metadata:
      labels: {app: everything, tier: "front"}
      annotations: {note: "a \"b\"\n\\ c", example.com/Team: core}
    spec:
      serviceAccountName: robot
      terminationGracePeriodSeconds: 1
      volumes:
      - {name: all, configMap: {name: settings}}
      - {name: some, configMap: {name: settings, defaultMode: 0440, items: [{key: color, path: deep/er/color}, {key: raw, path: raw, mode: 0400}]}}
      - {name: keys, secret: {secretName: keys, defaultMode: 0400}}
      - {name: absent, secret: {secretName: none, optional: true}}
      - {name: partly, configMap: {name: settings, optional: true, items: [{key: none, path: none}, {key: MODE, path: mode}]}}
      - {name: down, downwardAPI: {items: [{path: labels, fieldRef: {fieldPath: metadata.labels}}, {path: annotations, fieldRef: {fieldPath: metadata.annotations}},
          {path: deep/uid, fieldRef: {fieldPath: metadata.uid}, mode: 0400}, {path: cpu, resourceFieldRef: {containerName: app, resource: limits.cpu, divisor: 1m}},
          {path: memory, resourceFieldRef: {containerName: other, resource: limits.memory}}, {path: team, fieldRef: {fieldPath: "metadata.annotations['example.com/Team']"}}]}}
      - name: together
        projected:
          defaultMode: 0444
          sources:
          - {configMap: {name: settings, items: [{key: color, path: same}]}}
          - {secret: {name: keys, items: [{key: password, path: sub/pw, mode: 0400}]}}
          - {secret: {name: none, optional: true}}
          - {downwardAPI: {items: [{path: name, fieldRef: {fieldPath: metadata.name}}]}}
          - {serviceAccountToken: {path: vault, audience: vault, expirationSeconds: 7200}}
      - {name: scratch, emptyDir: {}}
      - {name: host, hostPath: {path: /etc}}
      containers:
      - name: other
        image: SHOW_IMAGE
        imagePullPolicy: Never
        args: [-wait]
      - name: app
        image: SHOW_IMAGE
        imagePullPolicy: Never
        args: [-wait]
        resources: {requests: {cpu: 5m, memory: 8Mi}, limits: {memory: 64Mi}}
        envFrom: [{configMapRef: {name: settings}}, {prefix: K_, secretRef: {name: keys}}, {configMapRef: {name: none, optional: true}}, {configMapRef: {name: empty}}, {prefix: COPY_, configMapRef: {name: settings}}]
        env:
        - {name: FIRST, value: "$(SECOND) $(color) $(K_password) $(DATA_BASE_SERVICE_HOST) $(HOSTNAME)"}
        - {name: SECOND, value: "2 $(FIRST)"}
        - {name: ESCAPED, value: "$$(FIRST) $$$(MODE) $ $$ $( $x $(not known)"}
        - {name: MODE, value: "slow, not $(MODE)"}
        - {name: EMPTY, value: ""}
        - {name: LINES, value: "a\nb\tc=d"}
        - {name: COLOR, valueFrom: {configMapKeyRef: {name: settings, key: color}}}
        - {name: NONE, valueFrom: {secretKeyRef: {name: keys, key: none, optional: true}}}
        - {name: PASSWORD, valueFrom: {secretKeyRef: {name: keys, key: password}}}
        - {name: DATA_BASE_PORT, value: mine}
        - {name: HOME, value: /data}
        - {name: N_NAME, valueFrom: {fieldRef: {fieldPath: metadata.name}}}
        - {name: N_NAMESPACE, valueFrom: {fieldRef: {fieldPath: metadata.namespace}}}
        - {name: N_UID, valueFrom: {fieldRef: {fieldPath: metadata.uid}}}
        - {name: N_LABEL, valueFrom: {fieldRef: {fieldPath: "metadata.labels['tier']"}}}
        - {name: N_NOTE, valueFrom: {fieldRef: {fieldPath: "metadata.annotations['note']"}}}
        - {name: N_NODE, valueFrom: {fieldRef: {fieldPath: spec.nodeName}}}
        - {name: N_ACCOUNT, valueFrom: {fieldRef: {fieldPath: spec.serviceAccountName}}}
        - {name: N_HOST, valueFrom: {fieldRef: {fieldPath: status.hostIP}}}
        - {name: N_HOSTS, valueFrom: {fieldRef: {fieldPath: status.hostIPs}}}
        - {name: N_IP, valueFrom: {fieldRef: {fieldPath: status.podIP}}}
        - {name: N_IPS, valueFrom: {fieldRef: {fieldPath: status.podIPs}}}
        - {name: R_CPU, valueFrom: {resourceFieldRef: {resource: limits.cpu}}}
        - {name: R_MEMORY, valueFrom: {resourceFieldRef: {resource: limits.memory, divisor: 1Mi}}}
        - {name: R_STORAGE, valueFrom: {resourceFieldRef: {resource: limits.ephemeral-storage}}}
        - {name: R_ASKED, valueFrom: {resourceFieldRef: {resource: requests.cpu, divisor: 1m}}}
        - {name: R_NOT_ASKED, valueFrom: {resourceFieldRef: {resource: requests.ephemeral-storage}}}
        - {name: R_OTHER, valueFrom: {resourceFieldRef: {containerName: other, resource: limits.memory}}}
        volumeMounts:
        - {name: all, mountPath: /w/all}
        - {name: all, mountPath: /w/one/file, subPath: page}
        - {name: some, mountPath: /w/some/}
        - {name: some, mountPath: /w/sub, subPathExpr: deep/$(SUB)}
        - {name: keys, mountPath: /w/keys, readOnly: true}
        - {name: absent, mountPath: /w/absent}
        - {name: partly, mountPath: /w/partly}
        - {name: down, mountPath: /w/down}
        - {name: together, mountPath: /w/together}
        - {name: scratch, mountPath: /w/scratch}
        - {name: scratch, mountPath: /w/scratch-sub, subPath: a/b}
        - {name: host, mountPath: /w/host}
---
apiVersion: apps/v1
kind: Deployment
metadata: {name: bare, namespace: kubelet}
spec:
  selector: {matchLabels: {app: bare}}
  template:
    metadata: {labels: {app: bare}}
    spec:
      enableServiceLinks: false
      hostname: db
      terminationGracePeriodSeconds: 1
      containers: [{name: app, image: SHOW_IMAGE, imagePullPolicy: Never, args: [-wait]}]
`

// shown is the output of the program show.
type shown struct {
	Env   map[string]string
	Files map[string]struct {
		Mode string
		Data []byte
	}
	Writable map[string]bool
}

func told(t *testing.T, text string) shown {
	t.Helper()
	var s shown
	if err := json.Unmarshal([]byte(text), &s); err != nil {
		t.Fatalf("%v\n%s", err, text)
	}
	for path, f := range s.Files {
		if header, rest, ok := strings.Cut(string(f.Data), "."); ok && strings.HasPrefix(header, "eyJ") { // each token is different
			payload, _, _ := strings.Cut(rest, ".")
			f.Data = claims(t, payload)
			f.Mode = "" // as documented, only the user can read it
			s.Files[path] = f
		}
	}
	return s
}

// claims returns the claims of a token that do not depend on when it was issued.
func claims(t *testing.T, payload string) []byte {
	t.Helper()
	text, err := base64.RawURLEncoding.DecodeString(payload)
	if err != nil {
		t.Fatal(err)
	}
	var c struct {
		Audience   []string `json:"aud"`
		Subject    string   `json:"sub"`
		Kubernetes struct {
			Pod struct{ Name, UID string }
		} `json:"kubernetes.io"`
	}
	if err := json.Unmarshal(text, &c); err != nil {
		t.Fatal(err)
	}
	return fmt.Appendf(nil, "%+v", c)
}

// devKubelet checks that a program sees the same in a pod and on the laptop, except what docs/dev.md lists.
func devKubelet(t *testing.T, l *laptop) {
	if err := buildShow(); err != nil {
		t.Fatal(err)
	}
	if err := l.Load(t.Context(), filepath.Join(bin, "show.tar")); err != nil {
		t.Fatal(err)
	}
	l.apply(t, kubeletObjects)
	l.apply(t, strings.NewReplacer("SHOW_IMAGE", showRef, "$(SUB)", "$(N_DEEP)", "- {name: HOME,", "- {name: N_DEEP, value: er}\n        - {name: HOME,").Replace(kubeletPods))
	for _, tt := range []struct {
		deployment string
		paths      []string
	}{
		{"everything", []string{"/w/all", "/w/one/file", "/w/some", "/w/sub", "/w/keys", "/w/absent", "/w/partly", "/w/down", "/w/together", "/w/scratch", "/w/scratch-sub", "/var/run/secrets/kubernetes.io/serviceaccount"}},
		{"bare", []string{"/var/run/secrets/kubernetes.io/serviceaccount"}},
	} {
		t.Run(tt.deployment, func(t *testing.T) {
			s := &shop{world: l.world, namespace: "kubelet", workload: "deployment/" + tt.deployment}
			s.rolledOut(t)
			pod := told(t, l.kubectl(t, append([]string{"-n", s.namespace, "exec", s.workload, "-c", "app", "--", "/show"}, tt.paths...)...))
			r := l.dev(t, s, append([]string{"-c", "app", "--", filepath.Join(bin, "show")}, tt.paths...)...)
			if r.code != 0 {
				t.Fatal(r)
			}
			here := told(t, r.stdout)
			if f, ok := pod.Files["/w/down/annotations"]; ok {
				lines := slices.DeleteFunc(strings.Split(string(f.Data), "\n"), func(line string) bool { // annotations of the kubelet
					return strings.HasPrefix(line, "kubernetes.io/config.")
				})
				f.Data = []byte(strings.Join(lines, "\n"))
				pod.Files["/w/down/annotations"] = f
			}

			own := map[string]string{} // variables of the laptop that the pod does not replace
			for _, e := range l.environment() {
				name, value, _ := strings.Cut(e, "=")
				own[name] = value
			}
			want := own
			for name, value := range pod.Env {
				switch {
				case name == "PATH", name == "JAVA_HOME", name == "GOPATH": // set by the image, or paths in it
				case own[name] == "" || name == "HOSTNAME": // what the laptop sets stays, such as HOME
					want[name] = value
				}
			}
			if diff := cmp.Diff(want, here.Env); diff != "" {
				t.Errorf("environment: -pod +here\n%s", diff)
			}
			if diff := cmp.Diff(pod.Files, here.Files); diff != "" {
				t.Errorf("files: -pod +here\n%s", diff)
			}
			if diff := cmp.Diff(pod.Writable, here.Writable); diff != "" {
				t.Errorf("writable: -pod +here\n%s", diff)
			}
			var warned []string
			for line := range strings.Lines(r.stderr) {
				if strings.HasPrefix(line, "! ") {
					warned = append(warned, strings.TrimSpace(line))
				}
			}
			var wanted []string
			if tt.deployment == "everything" {
				wanted = []string{"! volume host at /w/host: its content is in the cluster only; --volume host=remote mounts it, and =DIRECTORY uses a directory of this machine",
					"! keeping this machine's values of HOME: it sets them, or they may decide what programs execute; --env-from-pod NAME takes the pod's"}
			}
			if diff := cmp.Diff(wanted, warned); diff != "" {
				t.Errorf("warnings: -want +got\n%s", diff)
			}
			if len(pod.Files) < 3 || pod.Env["FLAVOUR"] != "vanilla" {
				t.Errorf("the pod shows too little: %+v", pod)
			}
		})
	}
	t.Run("container_names_are_completed", func(t *testing.T) {
		out := l.must(t, "kubevpn", "__complete", "dev", "deployment/everything", "-n", "kubelet", "-c", "")
		if names := strings.Fields(out); !slices.Contains(names, "app") || !slices.Contains(names, "other") {
			t.Error(out)
		}
	})
	t.Run("namespace_rights_are_enough", func(t *testing.T) { devInOneNamespace(t, l) })
	t.Run("works_without_a_running_pod", func(t *testing.T) { devScaledDown(t, l) })
	t.Run("secrets_stay_in_memory", func(t *testing.T) { devSecrets(t, l) })
}

// devInOneNamespace checks that a user with rights in one namespace, who cannot read the API server's Service, gets its
// address, and that their own variables override those of the image.
func devInOneNamespace(t *testing.T, l *laptop) {
	l.apply(t, `
apiVersion: v1
kind: ServiceAccount
metadata: {name: ann, namespace: kubelet}
---
apiVersion: v1
kind: ServiceAccount
metadata: {name: bob, namespace: kubelet}
---
apiVersion: rbac.authorization.k8s.io/v1
kind: RoleBinding
metadata: {name: ann, namespace: kubelet}
roleRef: {apiGroup: rbac.authorization.k8s.io, kind: ClusterRole, name: edit}
subjects: [{kind: ServiceAccount, name: ann, namespace: kubelet}]
---
apiVersion: rbac.authorization.k8s.io/v1
kind: Role
metadata: {name: no-exec, namespace: kubelet}
rules:
- {apiGroups: [""], resources: [pods, services, configmaps, secrets], verbs: [get, list, watch]}
- {apiGroups: [""], resources: [services, pods/portforward, serviceaccounts/token], verbs: [create]} # of Services: which networks they have
- {apiGroups: [apps], resources: [deployments, replicasets], verbs: [get, list, watch]}
---
apiVersion: rbac.authorization.k8s.io/v1
kind: RoleBinding
metadata: {name: bob, namespace: kubelet}
roleRef: {apiGroup: rbac.authorization.k8s.io, kind: Role, name: no-exec}
subjects: [{kind: ServiceAccount, name: bob, namespace: kubelet}]
`)
	t.Cleanup(func() { uninstall(t, l, "kubelet") })
	s := &shop{world: l.world, namespace: "kubelet", workload: "deployment/bare"}
	s.rolledOut(t)
	for _, tt := range []struct{ user, host, flavour string }{
		{"ann", l.clusterIP(t, "default", "kubernetes"), "vanilla"}, // first, because she may install
		{"bob", "kubernetes.default.svc", ""},                       // cannot exec into the pod
	} {
		t.Run(tt.user, func(t *testing.T) {
			token := l.kubectl(t, "-n", "kubelet", "create", "token", tt.user)
			kubeconfig := l.variant(t, func(_ *clientcmdapi.Cluster, u *clientcmdapi.AuthInfo) { *u = clientcmdapi.AuthInfo{Token: token} })
			if out, err := l.tryKubectl(t.Context(), "--as=system:serviceaccount:kubelet:"+tt.user, "-n", "default", "get", "service", "kubernetes"); err == nil {
				t.Errorf("%s may read the Service: %s", tt.user, out)
			}
			r := l.run(t, "env", "GOPATH=/home/go", filepath.Join(bin, "kubevpn"), "dev", s.workload, "-n", s.namespace, "--kubeconfig", kubeconfig, "--manager-namespace", "kubelet", "--", "sh", "-c",
				`echo "$KUBERNETES_SERVICE_HOST $KUBERNETES_SERVICE_PORT|$FLAVOUR|$HOME|$GOPATH|$JAVA_HOME|$PATH" &&
				curl -sS -o /dev/null -w '%{http_code}\n' --cacert /var/run/secrets/kubernetes.io/serviceaccount/ca.crt "https://$KUBERNETES_SERVICE_HOST:$KUBERNETES_SERVICE_PORT/version"`)
			path := ""
			for _, e := range l.environment() {
				if value, ok := strings.CutPrefix(e, "PATH="); ok {
					path = value
				}
			}
			if want := fmt.Sprintf("%s 443|%s|%s|/home/go||%s\n200\n", tt.host, tt.flavour, l.home, path); r.code != 0 || r.stdout != want {
				t.Errorf("%v\nwant %s", r, want)
			}
			for _, not := range []string{"variable ", "variables "} {
				if strings.Contains(r.stderr, "! "+not) {
					t.Error(r)
				}
			}
		})
	}
}

// devScaledDown checks that a program gets everything without a running pod, including a service account token.
func devScaledDown(t *testing.T, l *laptop) {
	s := &shop{world: l.world, namespace: "kubelet", workload: "deployment/everything"}
	l.kubectl(t, "-n", s.namespace, "scale", s.workload, "--replicas=0")
	l.kubectl(t, "-n", s.namespace, "wait", "--for=delete", "pod", "-l", "app=everything", "--timeout=120s")
	r := l.dev(t, s, "-c", "app", "--", "sh", "-c", `echo "$COLOR $N_IP." && cat /w/keys/password && echo && cd /var/run/secrets/kubernetes.io/serviceaccount &&
		curl -sS -o /dev/null -w '%{http_code}\n' --cacert ca.crt -H "Authorization: Bearer $(cat token)" -H 'Content-Type: application/json' \
		-d '{"apiVersion":"authentication.k8s.io/v1","kind":"SelfSubjectReview"}' https://kubernetes.default/apis/authentication.k8s.io/v1/selfsubjectreviews`)
	if r.code != 0 || r.stdout != "blue .\nhunter2\n201\n" || !strings.Contains(r.stderr, "! no pod of deployment/everything runs, so ") {
		t.Error(r)
	}
	l.kubectl(t, "-n", s.namespace, "scale", s.workload, "--replicas=1")
}

// devSecrets checks that a Secret exists only in the memory and in the volumes of the program.
func devSecrets(t *testing.T, l *laptop) {
	secret := strings.Join([]string{"s3cr3t", "9f1c", fmt.Sprint(time.Now().UnixNano())}, "-")
	l.kubectl(t, "-n", "kubelet", "create", "secret", "generic", "precious", "--from-literal=key="+secret)
	l.apply(t, strings.ReplaceAll(`
apiVersion: apps/v1
kind: Deployment
metadata: {name: precious, namespace: kubelet}
spec:
  selector: {matchLabels: {app: precious}}
  template:
    metadata: {labels: {app: precious}}
    spec:
      terminationGracePeriodSeconds: 1
      volumes: [{name: keys, secret: {secretName: precious}}]
      containers:
      - name: app
        image: SHOW_IMAGE
        imagePullPolicy: Never
        args: [-wait]
        env: [{name: KEY, valueFrom: {secretKeyRef: {name: precious, key: key}}}, {name: MADE, value: "of $(KEY)"}]
        volumeMounts: [{name: keys, mountPath: /w/keys}]
`, "SHOW_IMAGE", showRef))
	s := &shop{world: l.world, namespace: "kubelet", workload: "deployment/precious"}
	s.rolledOut(t)
	dir := t.TempDir()
	stamp, up, output := filepath.Join(dir, "stamp"), filepath.Join(dir, "up"), filepath.Join(dir, "output")
	if err := os.WriteFile(stamp, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	said, err := os.Create(output)
	if err != nil {
		t.Fatal(err)
	}
	defer said.Close()
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	cmd := l.command(ctx, t, "kubevpn", "dev", s.workload, "-n", s.namespace, "--", "sh", "-c",
		`test "$(cat /w/keys/key)" = "$KEY" && test "$MADE" = "of $KEY" && echo up >`+up+`; exec sleep 600`)
	cmd.Stdout, cmd.Stderr = said, said
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	testenv.Eventually(t, 60*time.Second, func() error {
		_, err := os.Stat(up)
		return err
	})
	// Search only recently written files where programs write: the lab keeps the cluster's state on the same disk, and
	// Go's build cache is large.
	found := func() []string {
		written := l.run(t, "find", "/dev/shm", "/etc", "/home", "/root", "/run", "/tmp", "/var", "(", "-path", "/var/lib/kubevpn-lab", "-o", "-path", "/root/go",
			"-o", "-path", "/root/.cache", "-o", "-name", "go-build*", "-o", "-path", "/run/containerd", "-o", "-path", "/run/netns", ")", "-prune",
			"-o", "-type", "f", "-newer", stamp, "-print").stdout // it fails if a file disappears during the search
		commands, err := filepath.Glob("/proc/[0-9]*/cmdline")
		if err != nil {
			t.Fatal(err)
		}
		return slices.DeleteFunc(append(strings.Split(written, "\n"), commands...), func(path string) bool {
			text, err := os.ReadFile(path)
			return err != nil || !bytes.Contains(text, []byte(secret)) // other programs create and remove files
		})
	}
	if out := found(); len(out) > 0 {
		t.Errorf("the Secret is in %s", out)
	}
	// The search finds a planted copy.
	planted := filepath.Join(dir, "planted")
	if err := os.WriteFile(planted, []byte("x"+secret+"x"), 0o600); err != nil {
		t.Fatal(err)
	}
	if out := found(); !slices.Equal(out, []string{planted}) {
		t.Errorf("the search found %q, want only the planted file", out)
	}
	if err := cmd.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	_ = cmd.Wait() // the signal makes it fail
	text, err := os.ReadFile(output)
	if err != nil {
		t.Fatal(err)
	}
	if strings.Contains(string(text), secret) {
		t.Errorf("the Secret is in the output:\n%s", text)
	}
}
