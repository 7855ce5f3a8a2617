package clone

import (
	"errors"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/labels"
	"sigs.k8s.io/yaml"

	"kubevpn/internal/api"
)

func selectorsOf(t *testing.T, of ...string) []selector {
	t.Helper()
	var all []selector
	for _, s := range of {
		name, text, _ := strings.Cut(s, ": ")
		parsed, err := labels.Parse(text)
		if err != nil {
			t.Fatal(err)
		}
		all = append(all, selector{name, parsed})
	}
	return all
}

func sourceOf(t *testing.T, template string) original {
	t.Helper()
	s := original{workload: "deployment/web", namespace: "shop", container: "app"}
	if err := yaml.UnmarshalStrict([]byte(template), &s.template); err != nil {
		t.Fatal(err)
	}
	return s
}

// TestJobCopiesTemplate checks that the Job has everything from the template but the parts that belong to the pods of
// the workload.
func TestJobCopiesTemplate(t *testing.T) {
	s := sourceOf(t, `
metadata:
  labels: {app: web, tier: front, sidecar.istio.io/inject: "true"}
  annotations: {prometheus.io/scrape: "true"}
  name: web-1
  uid: u-1
spec:
  nodeName: node-1
  hostname: web-0
  subdomain: web
  priority: 5
  restartPolicy: Always
  serviceAccountName: robot
  volumes:
  - {name: settings, configMap: {name: settings}}
  - {name: kube-api-access-x7k2p, projected: {sources: [{serviceAccountToken: {path: token}}]}}
  containers:
  - {name: kubevpn-agent-1, image: kubevpn}
  - name: app
    image: web:1
    ports: [{containerPort: 8080, hostPort: 80, name: http}]
    volumeMounts:
    - {name: settings, mountPath: /etc/settings}
    - {name: kube-api-access-x7k2p, mountPath: /var/run/secrets/kubernetes.io/serviceaccount}
`)
	s.selectors = selectorsOf(t, "Service web: app=web", "PodDisruptionBudget all: tier in (front, back)", "PodDisruptionBudget every: ")
	before := s.template.DeepCopy()
	job, notes, err := s.job(api.CloneSpec{}, "Ann.Smith@laptop", "hash")
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(before, &s.template); diff != "" {
		t.Errorf("the template itself: -before +after\n%s", diff)
	}
	got, err := yaml.Marshal(job)
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(`apiVersion: batch/v1
kind: Job
metadata:
  annotations:
    kubevpn.dev/key: hash
    kubevpn.dev/owner: Ann.Smith@laptop
    kubevpn.dev/workload: shop/deployment/web
  labels:
    app.kubernetes.io/managed-by: kubevpn
    kubevpn.dev/clone: web-ann-smith
  name: web-ann-smith
  namespace: shop
spec:
  activeDeadlineSeconds: 120
  backoffLimit: 1073741824
  parallelism: 1
  template:
    metadata:
      annotations:
        prometheus.io/scrape: "true"
      labels:
        app.kubernetes.io/managed-by: kubevpn
        kubevpn.dev/clone: web-ann-smith
        sidecar.istio.io/inject: "true"
    spec:
      containers:
      - image: web:1
        name: app
        ports:
        - containerPort: 8080
          name: http
        resources: {}
        volumeMounts:
        - mountPath: /etc/settings
          name: settings
      restartPolicy: OnFailure
      serviceAccountName: robot
      volumes:
      - configMap:
          name: settings
        name: settings
  ttlSecondsAfterFinished: 30
status: {}
`, string(got)); diff != "" {
		t.Errorf("-want +got\n%s", diff)
	}
	if diff := cmp.Diff([]string{
		"PodDisruptionBudget every selects every pod of the namespace, the clone's too",
		"the clone does not use port 80 of the node (hostPort)",
	}, notes); diff != "" {
		t.Errorf("notes: -want +got\n%s", diff)
	}
}

func TestFlagsChangeOnlyTheirContainer(t *testing.T) {
	s := sourceOf(t, `
spec:
  restartPolicy: Never
  containers:
  - {name: app, image: web:1, command: [/web], args: [--quiet], env: [{name: A, value: "1"}, {name: B, value: $(A)}]}
  - {name: log, image: log:1}
`)
	job, _, err := s.job(api.CloneSpec{
		Name: "mine", Namespace: "other", Image: "web:2", Command: []string{"sh", "-c", "echo $$ $(HOME)"}, Env: []string{"A=$(x) y=z", "C="}, Replicas: 3,
	}, "ann@laptop", "hash")
	if err != nil {
		t.Fatal(err)
	}
	if got := job.Namespace + "/" + job.Name; got != "other/mine" || *job.Spec.Parallelism != 3 {
		t.Errorf("%s, %d pods", got, *job.Spec.Parallelism)
	}
	pod := job.Spec.Template.Spec
	if diff := cmp.Diff([]corev1.Container{
		{Name: "app", Image: "web:2", Command: []string{"sh", "-c", "echo $$$$ $$(HOME)"}, Env: []corev1.EnvVar{{Name: "A", Value: "$$(x) y=z"}, {Name: "B", Value: "$(A)"}, {Name: "C"}}},
		{Name: "log", Image: "log:1"},
	}, pod.Containers); diff != "" || pod.RestartPolicy != corev1.RestartPolicyNever {
		t.Errorf("%s: -want +got\n%s", pod.RestartPolicy, diff)
	}
}

func TestVolumesAreSharedOrReplaced(t *testing.T) {
	const template = `
spec:
  nodeSelector: {disk: fast}
  volumes:
  - {name: shared, persistentVolumeClaim: {claimName: many}}
  - {name: data, persistentVolumeClaim: {claimName: once}}
  - {name: lock, persistentVolumeClaim: {claimName: pod}}
  containers: [{name: app, image: web:1}]
`
	const emptyLock = "volume lock is empty: only one pod can have PersistentVolumeClaim pod (ReadWriteOncePod)"
	tests := []struct {
		name    string
		ask     map[string]string
		volumes string // NAME=claim, or NAME=empty
		node    string
		notes   []string
		err     string
		code    api.ExitCode
	}{
		{
			name: "nothing asked for", volumes: "shared=many data=empty lock=empty each=empty",
			notes: []string{
				"volume each is empty: each pod of the workload has its own",
				"volume data is empty: only one node can have PersistentVolumeClaim once (ReadWriteOnce) at a time; --volume data=share runs the clone on that node, where both write to it",
				emptyLock,
			},
		},
		{
			name: "shared", ask: map[string]string{"data": api.VolumeShare, "lock": api.VolumeEmpty}, volumes: "shared=many data=once lock=empty each=empty", node: "node-1",
			notes: []string{
				"volume each is empty: each pod of the workload has its own",
				"the clone shares volume data with the workload: both write to PersistentVolumeClaim once",
				emptyLock,
			},
		},
		{name: "of one pod", ask: map[string]string{"lock": api.VolumeShare}, code: api.ExitWorkload, err: "PersistentVolumeClaim pod is ReadWriteOncePod: no second pod can have it"},
		{name: "of a template", ask: map[string]string{"each": api.VolumeShare}, code: api.ExitUsage, err: "each pod of deployment/web has its own volume each, so a clone cannot share it"},
		{name: "one that is shared as it is", ask: map[string]string{"shared": api.VolumeShare}, code: api.ExitUsage, err: `deployment/web has no volume "shared" that needs --volume`},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			s := sourceOf(t, template)
			s.claims = map[string]exclusive{"once": {mode: corev1.ReadWriteOnce, node: "node-1"}, "pod": {mode: corev1.ReadWriteOncePod, node: "node-1"}}
			s.claimTemplates = []string{"each"}
			job, notes, err := s.job(api.CloneSpec{Volumes: tt.ask}, "ann@laptop", "hash")
			if tt.err != "" {
				checkError(t, err, tt.code, tt.err)
				return
			}
			if err != nil {
				t.Fatal(err)
			}
			var got []string
			for _, v := range job.Spec.Template.Spec.Volumes {
				switch {
				case v.EmptyDir != nil:
					got = append(got, v.Name+"=empty")
				case v.PersistentVolumeClaim != nil:
					got = append(got, v.Name+"="+v.PersistentVolumeClaim.ClaimName)
				}
			}
			if diff := cmp.Diff(tt.volumes, strings.Join(got, " ")); diff != "" {
				t.Errorf("-want +got\n%s", diff)
			}
			if diff := cmp.Diff(tt.notes, notes); diff != "" {
				t.Errorf("notes: -want +got\n%s", diff)
			}
			if node := nodeOf(job.Spec.Template.Spec); node != tt.node {
				t.Errorf("on node %q, want %q", node, tt.node)
			}
		})
	}
}

// nodeOf is the node that pods have to run on.
func nodeOf(pod corev1.PodSpec) string {
	if pod.Affinity == nil || pod.Affinity.NodeAffinity == nil {
		return ""
	}
	terms, err := yaml.Marshal(pod.Affinity.NodeAffinity)
	if err != nil {
		return err.Error()
	}
	_, name, _ := strings.Cut(string(terms), "matchFields:\n    - key: metadata.name\n      operator: In\n      values:\n      - ")
	return strings.TrimSpace(name)
}

// TestMissingClaimBecomesEmptyDirectory checks claims that the namespace of the clone lacks.
func TestMissingClaimBecomesEmptyDirectory(t *testing.T) {
	for _, tt := range []struct {
		name, asked string
		mode        corev1.PersistentVolumeAccessMode
		note, err   string
	}{
		{"one_node", "", corev1.ReadWriteOnce, "volume data is empty: the namespace other has no PersistentVolumeClaim data", ""},
		{"one_node_wanted", api.VolumeShare, corev1.ReadWriteOnce, "", "the namespace other has no PersistentVolumeClaim data"},
		{"many_nodes", "", "", "", "the namespace other has no PersistentVolumeClaim data"},
		{"many_nodes_not_wanted", api.VolumeEmpty, "", "volume data is empty: the namespace other has no PersistentVolumeClaim data", ""},
	} {
		t.Run(tt.name, func(t *testing.T) {
			s := sourceOf(t, `{spec: {volumes: [{name: data, persistentVolumeClaim: {claimName: data}}], containers: [{name: app}]}}`)
			s.claims = map[string]exclusive{"data": {mode: tt.mode, absent: true}}
			spec := api.CloneSpec{Namespace: "other"}
			if tt.asked != "" {
				spec.Volumes = map[string]string{"data": tt.asked}
			}
			job, notes, err := s.job(spec, "ann@laptop", "hash")
			if tt.err != "" {
				checkError(t, err, api.ExitWorkload, tt.err)
				return
			}
			if err != nil {
				t.Fatal(err)
			}
			if v := job.Spec.Template.Spec.Volumes[0]; v.EmptyDir == nil || v.PersistentVolumeClaim != nil || !cmp.Equal([]string{tt.note}, notes) {
				t.Errorf("%+v, %q", v, notes)
			}
		})
	}
}

func TestPinKeepsOtherNodeTerms(t *testing.T) {
	s := sourceOf(t, `
spec:
  affinity:
    nodeAffinity:
      requiredDuringSchedulingIgnoredDuringExecution:
        nodeSelectorTerms:
        - matchExpressions: [{key: disk, operator: In, values: [fast]}]
        - {}
        - matchFields: [{key: metadata.name, operator: NotIn, values: [node-2]}]
  volumes: [{name: data, persistentVolumeClaim: {claimName: data}}]
  containers: [{name: app}]
`)
	s.claims = map[string]exclusive{"data": {mode: corev1.ReadWriteOnce, node: "node-1"}}
	job, _, err := s.job(api.CloneSpec{Volumes: map[string]string{"data": api.VolumeShare}}, "ann@laptop", "hash")
	if err != nil {
		t.Fatal(err)
	}
	got, err := yaml.Marshal(job.Spec.Template.Spec.Affinity.NodeAffinity.RequiredDuringSchedulingIgnoredDuringExecution.NodeSelectorTerms)
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(`- matchExpressions:
  - key: disk
    operator: In
    values:
    - fast
  matchFields:
  - key: metadata.name
    operator: In
    values:
    - node-1
- {}
- matchFields:
  - key: metadata.name
    operator: NotIn
    values:
    - node-2
  - key: metadata.name
    operator: In
    values:
    - node-1
`, string(got)); diff != "" {
		t.Errorf("-want +got\n%s", diff)
	}
}

// TestAntiAffinityOfWorkloadIsDropped checks that neither the required anti-affinity nor the labels that it selects
// stay.
func TestAntiAffinityOfWorkloadIsDropped(t *testing.T) {
	s := sourceOf(t, `
metadata: {labels: {app: web, tier: front, version: "1"}}
spec:
  affinity:
    podAntiAffinity:
      preferredDuringSchedulingIgnoredDuringExecution:
      - {weight: 1, podAffinityTerm: {topologyKey: zone, labelSelector: {matchLabels: {app: web}}}}
      requiredDuringSchedulingIgnoredDuringExecution:
      - {topologyKey: kubernetes.io/hostname, labelSelector: {matchLabels: {tier: front}}}
      - {topologyKey: kubernetes.io/hostname, labelSelector: {matchLabels: {app: noisy}}}
  containers: [{name: app}]
`)
	s.selectors = selectorsOf(t, "Service web: app=web")
	job, notes, err := s.job(api.CloneSpec{}, "ann@laptop", "hash")
	if err != nil {
		t.Fatal(err)
	}
	anti := job.Spec.Template.Spec.Affinity.PodAntiAffinity
	if left := anti.RequiredDuringSchedulingIgnoredDuringExecution; len(left) != 1 || left[0].LabelSelector.MatchLabels["app"] != "noisy" || len(anti.PreferredDuringSchedulingIgnoredDuringExecution) != 1 {
		t.Errorf("%+v", anti)
	}
	if diff := cmp.Diff(map[string]string{"app.kubernetes.io/managed-by": "kubevpn", "kubevpn.dev/clone": "web-ann", "version": "1"}, job.Spec.Template.Labels); diff != "" {
		t.Errorf("labels: -want +got\n%s", diff)
	}
	if diff := cmp.Diff([]string{"the clone may run on the workload's nodes: it ignores the podAntiAffinity of the workload's pods"}, notes); diff != "" {
		t.Errorf("notes: -want +got\n%s", diff)
	}
}

func TestSupervisedContainerKeepsOnlyReadinessProbe(t *testing.T) {
	s := sourceOf(t, `
spec:
  containers:
  - name: app
    livenessProbe: {tcpSocket: {port: 8080}}
    startupProbe: {tcpSocket: {port: 8080}}
    readinessProbe: {tcpSocket: {port: 8080}}
  - {name: mesh, livenessProbe: {tcpSocket: {port: 15000}}}
`)
	for _, tt := range []struct {
		name  string
		spec  api.CloneSpec
		there bool
		notes []string
	}{
		{"as_it_is", api.CloneSpec{}, true, nil},
		{"supervised", api.CloneSpec{Sync: []api.SyncPair{{Local: ".", Remote: "/app"}}}, false, []string{
			"the liveness and startup probes are removed: after a save that breaks the program, they would end the container before the next save",
		}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			job, notes, err := s.job(tt.spec, "ann@laptop", "hash")
			if err != nil {
				t.Fatal(err)
			}
			all := job.Spec.Template.Spec.Containers
			if app := all[0]; (app.LivenessProbe != nil) != tt.there || (app.StartupProbe != nil) != tt.there || app.ReadinessProbe == nil || all[1].LivenessProbe == nil {
				t.Errorf("%+v", all)
			}
			if diff := cmp.Diff(tt.notes, notes); diff != "" {
				t.Errorf("notes: -want +got\n%s", diff)
			}
		})
	}
}

func checkError(t *testing.T, err error, code api.ExitCode, message string) {
	t.Helper()
	said := (*api.Error)(nil)
	if !errors.As(err, &said) || said.Code != code || said.Message != message {
		t.Errorf("%v (%+v), want %d: %s", err, said, code, message)
	}
}

func TestInvalidSpecIsRejected(t *testing.T) {
	const app = `{spec: {containers: [{name: app, image: web:1}]}}`
	tests := []struct {
		name, template string
		spec           api.CloneSpec
		code           api.ExitCode
		err            string
	}{
		{"container", `{spec: {containers: [{name: other}]}}`, api.CloneSpec{}, api.ExitWorkload, `deployment/web has no container "app"`},
		{"variable", app, api.CloneSpec{Env: []string{"A"}}, api.ExitUsage, `--env "A" is not NAME=VALUE`},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			_, _, err := sourceOf(t, tt.template).job(tt.spec, "ann@laptop", "hash")
			checkError(t, err, tt.code, tt.err)
		})
	}
	_, _, err := sourceOf(t, app).job(api.CloneSpec{Name: "No_Name"}, "ann@laptop", "hash")
	if err == nil || !strings.HasPrefix(err.Error(), `"No_Name" is not a valid name for a clone: `) {
		t.Errorf("%v", err)
	}
}

func TestNameForShortensAndCleans(t *testing.T) {
	for _, tt := range []struct{ workload, owner, want string }{
		{"deployment/web", "ann@laptop", "web-ann"},
		{"rollout.argoproj.io/web.front", "DOM\\Ann Smith@x", "web-front-dom-ann-smith"},
		{"deployment/web", "@", "web"},
		{"deployment/" + strings.Repeat("w", 80), strings.Repeat("u", 80), strings.Repeat("w", 31) + "-" + strings.Repeat("u", 31)},
	} {
		if got := nameFor(tt.workload, tt.owner); got != tt.want {
			t.Errorf("%s of %s: %s, want %s", tt.workload, tt.owner, got, tt.want)
		}
	}
}
