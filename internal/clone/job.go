// Package clone runs a copy of a workload beside it, for one developer.
//
//	template of the workload ─▶ plan ─▶ Job ─▶ pods        that no Service, budget or workload selects
//	                                     ▲
//	daemon ── activeDeadlineSeconds ─────┘ moved ahead while the laptop lives
//
// The Job owns a Service, the clone's own name, which goes with it.
//
// The copy is a Job whatever the workload is: Kubernetes itself removes one whose laptop never comes back. Its deadline is the
// lease. When it passes, the Job controller ends the pods, and half a minute later (ttlSecondsAfterFinished) the TTL controller
// deletes it. So neither the traffic manager nor anybody else needs a right to delete what developers made.
package clone

import (
	"cmp"
	"fmt"
	"maps"
	"regexp"
	"slices"
	"strings"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	batchv1 "k8s.io/api/batch/v1"
	corev1 "k8s.io/api/core/v1"
	networkingv1 "k8s.io/api/networking/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/util/validation"

	"kubevpn/internal/api"
)

const (
	labelManagedBy = "app.kubernetes.io/managed-by"
	managedBy      = "kubevpn"
	// labelClone of a Job and of its pods is the clone's name.
	labelClone = "kubevpn.dev/clone"
	// Annotations of the Job.
	annotationWorkload = "kubevpn.dev/workload" // NAMESPACE/TYPE/NAME
	annotationOwner    = "kubevpn.dev/owner"    // user@host
	annotationKey      = "kubevpn.dev/key"      // the hash of the owner's public key

	// lease is how long a clone lives that nobody renews, and renewEvery how often it is renewed.
	lease      = 2 * time.Minute
	renewEvery = 20 * time.Second

	// kept is how long a Job is there that has ended: longer than until the next renewal, which tells from it that it was not
	// somebody who deleted it. keptDone is for one that was to end, so that its log can be read.
	kept     = 30 * time.Second
	keptDone = 2 * time.Minute

	// tokenMount is where the API server mounts a service account's token, in a volume whose name begins with tokenVolume.
	tokenMount  = "/var/run/secrets/kubernetes.io/serviceaccount"
	tokenVolume = "kube-api-access-"
)

// source is what a clone is a copy of.
type source struct {
	workload  string // TYPE/NAME
	namespace string
	template  corev1.PodTemplateSpec
	container string // of template
	// claims are the PersistentVolumeClaims that a clone does not simply share, by name.
	claims map[string]exclusive
	// claimTemplates are a StatefulSet's: volumes of its pods that the template does not have.
	claimTemplates []string
	selectors      []selector
	policies       []networkingv1.NetworkPolicy // of both namespaces
}

// exclusive is a PersistentVolumeClaim that cannot be shared as it is.
type exclusive struct {
	mode   corev1.PersistentVolumeAccessMode // ReadWriteOnce or ReadWriteOncePod; "": several nodes can have it
	node   string                            // of a pod that has it, or ""
	absent bool                              // from the clone's namespace
}

// selector is what somebody in the clone's namespace chooses pods by.
type selector struct {
	of string // "Service web"
	labels.Selector
}

// job is the clone, and what is to be told of it. owner is user@host, and key the hash of the owner's key.
func (s source) job(spec api.CloneSpec, owner, key string) (*batchv1.Job, []string, error) {
	name := spec.Name
	if name == "" {
		name = nameFor(s.workload, owner)
	} else if errs := validation.IsDNS1123Label(name); len(errs) > 0 {
		return nil, nil, api.Errorf(api.ExitUsage, "%q is no name for a clone: %s", name, strings.Join(errs, "; "))
	}
	p := plan{source: s, spec: spec, template: *s.template.DeepCopy()}
	if err := p.build(name); err != nil {
		return nil, nil, err
	}
	ttl := kept
	if s.ends() {
		ttl = keptDone
	}
	return &batchv1.Job{
		TypeMeta: metav1.TypeMeta{APIVersion: "batch/v1", Kind: "Job"},
		ObjectMeta: metav1.ObjectMeta{
			Name: name, Namespace: cmp.Or(spec.Namespace, s.namespace),
			Labels: map[string]string{labelManagedBy: managedBy, labelClone: name},
			Annotations: map[string]string{
				annotationWorkload: s.namespace + "/" + s.workload, annotationOwner: owner, annotationKey: key,
			},
		},
		Spec: batchv1.JobSpec{
			Parallelism:             new(cmp.Or(spec.Replicas, 1)),
			BackoffLimit:            new(int32(1 << 30)), // a program that ends is started again, as in the workload
			ActiveDeadlineSeconds:   new(int64(lease / time.Second)),
			TTLSecondsAfterFinished: new(int32(ttl / time.Second)),
			Template:                p.template,
		},
	}, p.notes, nil
}

// ends reports whether what the pods run is meant to come to an end, as a CronJob's is.
func (s source) ends() bool {
	policy := s.template.Spec.RestartPolicy
	return policy == corev1.RestartPolicyNever || policy == corev1.RestartPolicyOnFailure
}

// controllersLabels are those that Kubernetes' controllers give to each pod that they make: a copy of such a pod is none of theirs,
// and a Job refuses those of another one.
var controllersLabels = []string{
	appsv1.DefaultDeploymentUniqueLabelKey, appsv1.ControllerRevisionHashLabelKey, appsv1.StatefulSetPodNameLabel, appsv1.PodIndexLabel,
	appsv1.DeprecatedTemplateGeneration, batchv1.JobNameLabel, batchv1.ControllerUidLabel, batchv1.JobCompletionIndexAnnotation,
	"job-name", "controller-uid", // as they were called before
}

var notInNames = regexp.MustCompile(`[^a-z0-9]+`)

// nameFor is WORKLOAD-USER, as long as a Job's name may be so that its pods can have it as a label.
func nameFor(workload, owner string) string {
	_, name, _ := strings.Cut(workload, "/")
	user, _, _ := strings.Cut(owner, "@")
	user = strings.Trim(notInNames.ReplaceAllString(strings.ToLower(user), "-"), "-")
	name = notInNames.ReplaceAllString(strings.ToLower(name), "-")
	const most = validation.DNS1123LabelMaxLength
	user = user[:min(len(user), most/2)]
	name = name[:min(len(name), most-1-len(user))]
	return strings.Trim(strings.Trim(name, "-")+"-"+user, "-")
}

// plan is a template on its way to be a clone's.
type plan struct {
	source
	spec     api.CloneSpec
	template corev1.PodTemplateSpec
	node     string // that the pods have to run on, or ""
	notes    []string
}

func (p *plan) note(format string, args ...any) {
	p.notes = append(p.notes, fmt.Sprintf(format, args...))
}

func (p *plan) build(name string) error {
	p.comeTogether()
	were := labels.Set(p.template.Labels)
	p.template.ObjectMeta = metav1.ObjectMeta{Labels: p.labels(name), Annotations: maps.Clone(p.template.Annotations)}
	p.judge(were)
	pod := &p.template.Spec
	// What belongs to a pod that runs, and not to what it is made from.
	pod.NodeName, pod.Hostname, pod.Subdomain, pod.EphemeralContainers = "", "", "", nil
	pod.Priority, pod.PreemptionPolicy = nil, nil
	p.dropAgents()
	p.dropTokenMounts()
	if pod.RestartPolicy == "" || pod.RestartPolicy == corev1.RestartPolicyAlways {
		pod.RestartPolicy = corev1.RestartPolicyOnFailure // Jobs have no other
	}
	for _, all := range [][]corev1.Container{pod.InitContainers, pod.Containers} {
		for n := range all {
			for m := range all[n].Ports {
				if port := &all[n].Ports[m]; port.HostPort != 0 {
					p.note("port %d of the node (hostPort) stays the workload's", port.HostPort)
					port.HostPort = 0
				}
			}
		}
	}
	if err := p.volumes(); err != nil {
		return err
	}
	return p.change()
}

// labels are the template's, without those that anybody chooses pods by, and our own.
func (p *plan) labels(name string) map[string]string {
	kept := maps.Clone(p.template.Labels)
	if kept == nil {
		kept = map[string]string{}
	}
	for _, label := range controllersLabels {
		delete(kept, label)
	}
	for _, s := range p.selectors {
		requirements, _ := s.Requirements()
		for _, r := range requirements {
			delete(kept, r.Key())
		}
	}
	kept[labelManagedBy], kept[labelClone] = managedBy, name
	for _, s := range p.selectors {
		if s.Matches(labels.Set(kept)) {
			p.note("%s selects every pod of the namespace, the clone's too", s.of)
		}
	}
	return kept
}

// comeTogether removes what keeps the workload's pods from each other's nodes, which would keep the clone from them as well. The labels
// by which it does are selectors: the scheduler asks the pods that are there, too.
func (p *plan) comeTogether() {
	affinity := p.template.Spec.Affinity
	if affinity == nil || affinity.PodAntiAffinity == nil {
		return
	}
	var own []selector
	anti := affinity.PodAntiAffinity
	anti.RequiredDuringSchedulingIgnoredDuringExecution = slices.DeleteFunc(anti.RequiredDuringSchedulingIgnoredDuringExecution, func(t corev1.PodAffinityTerm) bool {
		s, err := metav1.LabelSelectorAsSelector(t.LabelSelector)
		if err != nil || !s.Matches(labels.Set(p.template.Labels)) {
			return false // the API server says what is wrong with it
		}
		own = append(own, selector{"podAntiAffinity", s})
		return true
	})
	if len(own) > 0 {
		p.selectors = slices.Concat(p.selectors, own)
		p.note("the clone may run on the workload's nodes: a podAntiAffinity that keeps the workload's pods apart is left out")
	}
}

// dropAgents removes what an intercept in sidecar mode has added.
func (p *plan) dropAgents() {
	p.template.Spec.Containers = slices.DeleteFunc(p.template.Spec.Containers, func(c corev1.Container) bool {
		return strings.HasPrefix(c.Name, api.AgentPrefix)
	})
}

// dropTokenMounts removes what the API server adds to each pod by itself.
func (p *plan) dropTokenMounts() {
	pod := &p.template.Spec
	pod.Volumes = slices.DeleteFunc(pod.Volumes, func(v corev1.Volume) bool { return strings.HasPrefix(v.Name, tokenVolume) })
	for _, all := range [][]corev1.Container{pod.InitContainers, pod.Containers} {
		for n := range all {
			all[n].VolumeMounts = slices.DeleteFunc(all[n].VolumeMounts, func(m corev1.VolumeMount) bool {
				return m.MountPath == tokenMount && strings.HasPrefix(m.Name, tokenVolume)
			})
		}
	}
}

// volumes gives the clone directories of its own in place of what it cannot share.
func (p *plan) volumes() error {
	pod := &p.template.Spec
	unknown := maps.Clone(p.spec.Volumes)
	for _, name := range p.claimTemplates {
		delete(unknown, name)
		if p.spec.Volumes[name] == api.VolumeShare {
			return api.Errorf(api.ExitUsage, "volume %s is made anew for each pod of %s: there is none that a clone could share", name, p.workload)
		}
		p.note("volume %s is empty: each pod of the workload has one of its own", name)
		if !slices.ContainsFunc(pod.Volumes, func(v corev1.Volume) bool { return v.Name == name }) {
			pod.Volumes = append(pod.Volumes, corev1.Volume{Name: name, VolumeSource: corev1.VolumeSource{EmptyDir: &corev1.EmptyDirVolumeSource{}}})
		}
	}
	for n := range pod.Volumes {
		v := &pod.Volumes[n]
		if v.PersistentVolumeClaim == nil {
			continue
		}
		claim := v.PersistentVolumeClaim.ClaimName
		held, is := p.claims[claim]
		if !is {
			continue
		}
		delete(unknown, v.Name)
		asked := p.spec.Volumes[v.Name]
		if held.absent {
			if asked == api.VolumeShare || held.mode == "" && asked != api.VolumeEmpty {
				return api.Errorf(api.ExitWorkload, "the namespace %s has no PersistentVolumeClaim %s", cmp.Or(p.spec.Namespace, p.namespace), claim).
					WithHint("Make one there, or give the clone an empty directory: --volume %s=empty", v.Name)
			}
			p.note("volume %s is empty: the namespace %s has no PersistentVolumeClaim %s", v.Name, cmp.Or(p.spec.Namespace, p.namespace), claim)
			v.VolumeSource = corev1.VolumeSource{EmptyDir: &corev1.EmptyDirVolumeSource{}}
			continue
		}
		if asked != api.VolumeShare {
			p.note("volume %s is empty: only one node can have PersistentVolumeClaim %s (%s) at a time; --volume %s=share runs the clone on that node, where both write to it",
				v.Name, claim, held.mode, v.Name)
			if held.mode == corev1.ReadWriteOncePod {
				p.notes[len(p.notes)-1] = fmt.Sprintf("volume %s is empty: only one pod can have PersistentVolumeClaim %s (%s)", v.Name, claim, held.mode)
			}
			v.VolumeSource = corev1.VolumeSource{EmptyDir: &corev1.EmptyDirVolumeSource{}}
			continue
		}
		if held.mode == corev1.ReadWriteOncePod {
			return api.Errorf(api.ExitWorkload, "PersistentVolumeClaim %s is %s: no second pod can have it", claim, held.mode).
				WithHint("Give the clone an empty directory: --volume %s=empty", v.Name)
		}
		if held.node != "" {
			if p.node != "" && p.node != held.node {
				return api.Errorf(api.ExitWorkload, "PersistentVolumeClaim %s is on node %s, and another one that the clone shares on %s", claim, held.node, p.node)
			}
			p.node = held.node
		}
		p.note("volume %s is the workload's: both write to PersistentVolumeClaim %s", v.Name, claim)
	}
	if names := slices.Sorted(maps.Keys(unknown)); len(names) > 0 {
		return api.Errorf(api.ExitUsage, "%s has no volume %q that cannot be shared", p.workload, names[0])
	}
	if p.node != "" {
		pin(pod, p.node)
	}
	return nil
}

// pin has pods run on one node. It is by the node's name, which its label kubernetes.io/hostname need not have.
func pin(pod *corev1.PodSpec, node string) {
	name := []corev1.NodeSelectorRequirement{{Key: metav1.ObjectNameField, Operator: corev1.NodeSelectorOpIn, Values: []string{node}}}
	if pod.Affinity == nil {
		pod.Affinity = &corev1.Affinity{}
	}
	if pod.Affinity.NodeAffinity == nil {
		pod.Affinity.NodeAffinity = &corev1.NodeAffinity{}
	}
	required := &pod.Affinity.NodeAffinity.RequiredDuringSchedulingIgnoredDuringExecution
	if *required == nil {
		*required = &corev1.NodeSelector{NodeSelectorTerms: []corev1.NodeSelectorTerm{{MatchFields: name}}}
		return
	}
	for n := range (*required).NodeSelectorTerms { // of which one is enough; one that says nothing chooses no node
		if t := &(*required).NodeSelectorTerms[n]; len(t.MatchExpressions)+len(t.MatchFields) > 0 {
			t.MatchFields = append(t.MatchFields, name...)
		}
	}
}

// change does what the user asked for.
func (p *plan) change() error {
	at := slices.IndexFunc(p.template.Spec.Containers, func(c corev1.Container) bool { return c.Name == p.container })
	if at < 0 {
		return api.Errorf(api.ExitWorkload, "%s has no container %q", p.workload, p.container)
	}
	c := &p.template.Spec.Containers[at]
	if p.spec.Image != "" {
		c.Image = p.spec.Image
	}
	if len(p.spec.Command) > 0 {
		c.Command, c.Args = literals(p.spec.Command), nil
	}
	for _, e := range p.spec.Env {
		name, value, found := strings.Cut(e, "=")
		if !found || name == "" {
			return api.Errorf(api.ExitUsage, "--env %q is not NAME=VALUE", e)
		}
		v := corev1.EnvVar{Name: name, Value: literal(value)}
		if n := slices.IndexFunc(c.Env, func(o corev1.EnvVar) bool { return o.Name == name }); n >= 0 {
			c.Env[n] = v
		} else {
			c.Env = append(c.Env, v)
		}
	}
	if supervised(p.spec) && (c.LivenessProbe != nil || c.StartupProbe != nil) {
		c.LivenessProbe, c.StartupProbe = nil, nil
		p.note("the liveness and startup probes are left out: where a save breaks the program, they would end the container, and what mends it could not come in")
	}
	return nil
}

// literal has the kubelet hand on a word as it is: it would replace $(NAME), which is not what a shell's user means.
func literal(word string) string { return strings.ReplaceAll(word, "$", "$$") }

func literals(words []string) []string {
	all := make([]string, len(words))
	for n, word := range words {
		all[n] = literal(word)
	}
	return all
}
