// Package clone runs a copy of a workload in the cluster for one developer.
//
//	template of the workload ─▶ plan ─▶ Job ─▶ pods        that no Service, budget or workload selects
//	                                     ▲
//	daemon ── activeDeadlineSeconds ─────┘ extended while the laptop lives
//
// The Job owns a Service, which gives the clone its name.
//
// The copy is a Job, whatever the workload is, since Kubernetes itself removes a Job whose laptop never comes back. Its
// deadline is the lease. When the lease expires, the Job controller ends the pods, and half a minute later
// (ttlSecondsAfterFinished) the TTL controller deletes the Job. So neither the traffic manager nor anybody else needs
// the permission to delete it.
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
	"k8s.io/kubectl/pkg/util/fieldpath"
	"k8s.io/utils/ptr"

	"kubevpn/internal/api"
	"kubevpn/internal/kube/workloads"
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

	// lease is how long a clone lives after its last renewal.
	lease      = 2 * time.Minute
	renewEvery = 20 * time.Second

	// jobTTL is how long a Job exists after its end: longer than renewEvery, so that the next renewal can tell an end
	// from a deletion. doneJobTTL applies to Jobs that are expected to end, so that the user can read the log.
	jobTTL     = 30 * time.Second
	doneJobTTL = 2 * time.Minute

	// tokenMount is where the API server mounts a service account's token, in a volume whose name begins with
	// tokenVolume.
	tokenMount  = "/var/run/secrets/kubernetes.io/serviceaccount"
	tokenVolume = "kube-api-access-"
)

// original is what a clone copies.
type original struct {
	workload  string // TYPE/NAME
	namespace string
	template  corev1.PodTemplateSpec
	container string // of template
	// claims are the PersistentVolumeClaims that a clone cannot simply share, by name.
	claims map[string]exclusive
	// claimTemplates are those of a StatefulSet: volumes of its pods that the template does not contain.
	claimTemplates []string
	selectors      []selector
	policies       []networkingv1.NetworkPolicy // of both namespaces
}

// exclusive is a PersistentVolumeClaim that only one node or pod can mount, or that does not exist.
type exclusive struct {
	mode   corev1.PersistentVolumeAccessMode // ReadWriteOnce or ReadWriteOncePod; "": several nodes can mount it
	node   string                            // of a pod that mounts it, or ""
	absent bool                              // from the clone's namespace
}

// selector selects pods in the namespace of the clone.
type selector struct {
	of string // "Service web"
	labels.Selector
}

// job returns the Job of the clone and notes for the user. owner is user@host, and key the hash of the owner's key.
func (s original) job(spec api.CloneSpec, owner, key string) (*batchv1.Job, []string, error) {
	name := spec.Name
	if name == "" {
		name = nameFor(s.workload, owner)
	} else if errs := validation.IsDNS1123Label(name); len(errs) > 0 {
		return nil, nil, api.Errorf(api.ExitUsage, "%q is not a valid name for a clone: %s", name,
			strings.Join(errs, "; "))
	}
	p := templateBuilder{original: s, spec: spec, template: *s.template.DeepCopy()}
	if err := p.build(name); err != nil {
		return nil, nil, err
	}
	ttl := jobTTL
	if s.ends() {
		ttl = doneJobTTL
	}
	job := newJob(metav1.ObjectMeta{Name: name, Namespace: cmp.Or(spec.Namespace, s.namespace)},
		s.namespace+"/"+s.workload, owner, key, lease, ttl)
	job.Spec.Parallelism, job.Spec.Template = new(cmp.Or(spec.Replicas, 1)), p.template
	return job, p.notes, nil
}

// newJob returns a Job without pods, whose annotations name the workload, NAMESPACE/TYPE/NAME, and the owner.
func newJob(meta metav1.ObjectMeta, workload, owner, key string, lease, ttl time.Duration) *batchv1.Job {
	meta.Labels = map[string]string{labelManagedBy: managedBy, labelClone: meta.Name}
	meta.Annotations = map[string]string{annotationWorkload: workload, annotationOwner: owner, annotationKey: key}
	return &batchv1.Job{
		TypeMeta:   metav1.TypeMeta{APIVersion: "batch/v1", Kind: "Job"},
		ObjectMeta: meta,
		Spec: batchv1.JobSpec{
			BackoffLimit:            new(int32(1 << 30)), // a program that ends is restarted, as in the workload
			ActiveDeadlineSeconds:   new(int64(lease / time.Second)),
			TTLSecondsAfterFinished: new(int32(ttl / time.Second)),
		},
	}
}

// ends reports whether the pods are expected to end, as those of a CronJob are.
func (s original) ends() bool {
	policy := s.template.Spec.RestartPolicy
	return policy == corev1.RestartPolicyNever || policy == corev1.RestartPolicyOnFailure
}

// controllersLabels are labels that the controllers of Kubernetes add to each of their pods. A copy belongs to no
// controller, and a Job rejects the labels of another Job.
var controllersLabels = []string{
	appsv1.DefaultDeploymentUniqueLabelKey, appsv1.ControllerRevisionHashLabelKey, appsv1.StatefulSetPodNameLabel,
	appsv1.PodIndexLabel,
	appsv1.DeprecatedTemplateGeneration, batchv1.JobNameLabel, batchv1.ControllerUidLabel,
	batchv1.JobCompletionIndexAnnotation,
	"job-name", "controller-uid", // the older names of two of them
}

var notInNames = regexp.MustCompile(`[^a-z0-9]+`)

// nameFor returns WORKLOAD-USER, shortened so that the pods can have it as a label.
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

// templateBuilder turns the template of a workload into that of a clone.
type templateBuilder struct {
	original
	spec     api.CloneSpec
	template corev1.PodTemplateSpec
	node     string // on which the pods must run, or ""
	notes    []string
}

func (p *templateBuilder) note(format string, args ...any) {
	p.notes = append(p.notes, fmt.Sprintf(format, args...))
}

func (p *templateBuilder) build(name string) error {
	p.dropAntiAffinity()
	before := p.template.Labels
	p.template.ObjectMeta = metav1.ObjectMeta{Labels: p.labels(name), Annotations: maps.Clone(p.template.Annotations)}
	p.notePolicies(before)
	p.keepLabels(before)
	pod := &p.template.Spec
	// A template that was read from a pod has fields that only pods have.
	pod.NodeName, pod.Hostname, pod.Subdomain, pod.EphemeralContainers = "", "", "", nil
	pod.Priority, pod.PreemptionPolicy = nil, nil
	pod.Containers = slices.DeleteFunc(pod.Containers, func(c corev1.Container) bool { return api.IsAgent(c.Name) })
	p.dropTokenMounts()
	if pod.RestartPolicy == "" || pod.RestartPolicy == corev1.RestartPolicyAlways {
		pod.RestartPolicy = corev1.RestartPolicyOnFailure // Jobs have no other
	}
	for _, all := range [][]corev1.Container{pod.InitContainers, pod.Containers} {
		for n := range all {
			for m := range all[n].Ports {
				if port := &all[n].Ports[m]; port.HostPort != 0 {
					p.note("the clone does not use port %d of the node (hostPort)", port.HostPort)
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

// keepLabels lets variables and files that refer to labels which the clone lacks refer to annotations with the values
// that they have in the workload. So do files of all labels.
func (p *templateBuilder) keepLabels(before map[string]string) {
	workload := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Labels: before}}
	for n, field := range p.fields() {
		name, one := strings.CutPrefix(field.FieldPath, "metadata.labels['")
		_, kept := p.template.Labels[strings.TrimSuffix(name, "']")]
		if one && !kept || field.FieldPath == "metadata.labels" {
			// The API server reports a path that is wrong.
			value, _ := fieldpath.ExtractFieldPathAsString(workload, field.FieldPath)
			key := fmt.Sprint("kubevpn.dev/field-", n)
			metav1.SetMetaDataAnnotation(&p.template.ObjectMeta, key, value)
			field.FieldPath = "metadata.annotations['" + key + "']"
		}
	}
}

// fields returns the references to fields of the pod in variables and files.
func (p *templateBuilder) fields() (all []*corev1.ObjectFieldSelector) {
	for _, c := range slices.Concat(p.template.Spec.InitContainers, p.template.Spec.Containers) {
		for _, e := range c.Env {
			if e.ValueFrom != nil {
				all = append(all, e.ValueFrom.FieldRef)
			}
		}
	}
	var files []corev1.DownwardAPIVolumeFile
	for _, v := range p.template.Spec.Volumes {
		files = append(files, ptr.Deref(v.DownwardAPI, corev1.DownwardAPIVolumeSource{}).Items...)
		for _, s := range ptr.Deref(v.Projected, corev1.ProjectedVolumeSource{}).Sources {
			files = append(files, ptr.Deref(s.DownwardAPI, corev1.DownwardAPIProjection{}).Items...)
		}
	}
	for _, f := range files {
		all = append(all, f.FieldRef)
	}
	return slices.DeleteFunc(all, func(f *corev1.ObjectFieldSelector) bool { return f == nil })
}

// labels returns the labels of the template without those that a selector uses, and with those of the clone.
func (p *templateBuilder) labels(name string) map[string]string {
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

// dropAntiAffinity removes required anti-affinity between the pods of the workload, which would keep the clone from
// their nodes. Its labels become selectors: the scheduler also evaluates the anti-affinity of pods that run.
func (p *templateBuilder) dropAntiAffinity() {
	affinity := p.template.Spec.Affinity
	if affinity == nil || affinity.PodAntiAffinity == nil {
		return
	}
	var own []selector
	anti := affinity.PodAntiAffinity
	required := &anti.RequiredDuringSchedulingIgnoredDuringExecution
	*required = slices.DeleteFunc(*required, func(t corev1.PodAffinityTerm) bool {
		s, err := metav1.LabelSelectorAsSelector(t.LabelSelector)
		if err != nil || !s.Matches(labels.Set(p.template.Labels)) {
			return false // the API server reports what is wrong with it
		}
		own = append(own, selector{"podAntiAffinity", s})
		return true
	})
	if len(own) > 0 {
		p.selectors = slices.Concat(p.selectors, own)
		p.note("the clone may run on the workload's nodes: it ignores the podAntiAffinity of the workload's pods")
	}
}

// dropTokenMounts removes the token volumes that the API server adds to each pod.
func (p *templateBuilder) dropTokenMounts() {
	pod := &p.template.Spec
	pod.Volumes = slices.DeleteFunc(pod.Volumes, func(v corev1.Volume) bool {
		return strings.HasPrefix(v.Name, tokenVolume)
	})
	for _, all := range [][]corev1.Container{pod.InitContainers, pod.Containers} {
		for n := range all {
			all[n].VolumeMounts = slices.DeleteFunc(all[n].VolumeMounts, func(m corev1.VolumeMount) bool {
				return m.MountPath == tokenMount && strings.HasPrefix(m.Name, tokenVolume)
			})
		}
	}
}

// volumes replaces volumes that the clone cannot share by empty directories.
func (p *templateBuilder) volumes() error {
	pod := &p.template.Spec
	unknown := maps.Clone(p.spec.Volumes)
	for _, name := range p.claimTemplates {
		delete(unknown, name)
		if p.spec.Volumes[name] == api.VolumeShare {
			return api.Errorf(api.ExitUsage, "each pod of %[2]s has its own volume %[1]s, so a clone cannot share it",
				name, p.workload)
		}
		p.note("volume %s is empty: each pod of the workload has its own", name)
		if !slices.ContainsFunc(pod.Volumes, func(v corev1.Volume) bool { return v.Name == name }) {
			pod.Volumes = append(pod.Volumes, corev1.Volume{Name: name, VolumeSource: emptyDir()})
		}
	}
	for n := range pod.Volumes {
		v := &pod.Volumes[n]
		if c := v.PersistentVolumeClaim; c != nil {
			if held, is := p.claims[c.ClaimName]; is {
				delete(unknown, v.Name)
				if err := p.shareOrEmpty(v, held); err != nil {
					return err
				}
				continue
			}
		}
		if p.spec.Volumes[v.Name] == api.VolumeEmpty && writtenByOthers(*v) != "" {
			delete(unknown, v.Name)
			v.VolumeSource = emptyDir()
		}
	}
	if names := slices.Sorted(maps.Keys(unknown)); len(names) > 0 {
		return api.Errorf(api.ExitUsage, "%s has no volume %q that needs --volume", p.workload, names[0])
	}
	if p.node != "" {
		pin(pod, p.node)
	}
	return p.checkShared()
}

func emptyDir() corev1.VolumeSource {
	return corev1.VolumeSource{EmptyDir: &corev1.EmptyDirVolumeSource{}}
}

// shareOrEmpty replaces an exclusive claim by an empty directory, unless the user asked to share it.
func (p *templateBuilder) shareOrEmpty(v *corev1.Volume, held exclusive) error {
	claim, asked := v.PersistentVolumeClaim.ClaimName, p.spec.Volumes[v.Name]
	if held.absent {
		if asked == api.VolumeShare || held.mode == "" && asked != api.VolumeEmpty {
			return api.Errorf(api.ExitWorkload, "the namespace %s has no PersistentVolumeClaim %s",
				cmp.Or(p.spec.Namespace, p.namespace), claim).
				WithHint("Create one there, or give the clone an empty directory: --volume %s=empty", v.Name)
		}
		p.note("volume %s is empty: the namespace %s has no PersistentVolumeClaim %s", v.Name,
			cmp.Or(p.spec.Namespace, p.namespace), claim)
		v.VolumeSource = emptyDir()
		return nil
	}
	if asked != api.VolumeShare {
		if held.mode == corev1.ReadWriteOncePod {
			p.note("volume %s is empty: only one pod can have PersistentVolumeClaim %s (%s)", v.Name, claim, held.mode)
		} else {
			p.note("volume %s is empty: only one node can have PersistentVolumeClaim %s (%s) at a time; --volume "+
				"%[1]s=share runs the clone on that node, where both write to it", v.Name, claim, held.mode)
		}
		v.VolumeSource = emptyDir()
		return nil
	}
	if held.mode == corev1.ReadWriteOncePod {
		return api.Errorf(api.ExitWorkload, "PersistentVolumeClaim %s is %s: no second pod can have it", claim,
			held.mode).
			WithHint("Give the clone an empty directory: --volume %s=empty", v.Name)
	}
	if held.node != "" {
		if p.node != "" && p.node != held.node {
			return api.Errorf(api.ExitWorkload,
				"PersistentVolumeClaim %s is on node %s, and another one that the clone shares on %s", claim, held.node,
				p.node)
		}
		p.node = held.node
	}
	p.note("the clone shares volume %s with the workload: both write to PersistentVolumeClaim %s", v.Name, claim)
	return nil
}

// pin makes pods run on one node, by its name: the label kubernetes.io/hostname may differ.
func pin(pod *corev1.PodSpec, node string) {
	name := []corev1.NodeSelectorRequirement{{Key: metav1.ObjectNameField, Operator: corev1.NodeSelectorOpIn,
		Values: []string{node}}}
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
	for n := range (*required).NodeSelectorTerms { // one of them is enough; an empty one selects no node
		if t := &(*required).NodeSelectorTerms[n]; len(t.MatchExpressions)+len(t.MatchFields) > 0 {
			t.MatchFields = append(t.MatchFields, name...)
		}
	}
}

// change applies the flags of the user.
func (p *templateBuilder) change() error {
	at := slices.IndexFunc(p.template.Spec.Containers, func(c corev1.Container) bool { return c.Name == p.container })
	if at < 0 {
		return api.Errorf(api.ExitWorkload, "%s has no container %q", p.workload, p.container)
	}
	c := &p.template.Spec.Containers[at]
	if p.spec.Image != "" {
		c.Image = p.spec.Image
	}
	if len(p.spec.Command) > 0 {
		c.Command, c.Args = api.Texts(p.spec.Command, workloads.Literal), nil
	}
	for _, e := range p.spec.Env {
		name, value, found := strings.Cut(e, "=")
		if !found || name == "" {
			return api.Errorf(api.ExitUsage, "--env %q is not NAME=VALUE", e)
		}
		v := corev1.EnvVar{Name: name, Value: workloads.Literal(value)}
		if n := slices.IndexFunc(c.Env, func(o corev1.EnvVar) bool { return o.Name == name }); n >= 0 {
			c.Env[n] = v
		} else {
			c.Env = append(c.Env, v)
		}
	}
	if supervised(p.spec) && (c.LivenessProbe != nil || c.StartupProbe != nil) {
		c.LivenessProbe, c.StartupProbe = nil, nil
		p.note("the liveness and startup probes are removed: after a save that breaks the program, they would end " +
			"the container before the next save")
	}
	return nil
}
