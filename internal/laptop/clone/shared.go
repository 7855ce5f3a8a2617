package clone

import (
	"maps"
	"path"
	"slices"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"

	"kubevpn/internal/api"
)

// checkShared notes each volume that both the clone and others write to, and rejects --sync to it without
// --sync-shared.
func (p *templateBuilder) checkShared() error {
	pod := &p.template.Spec
	for _, v := range pod.Volumes {
		what := writtenByOthers(v)
		writes := func(c corev1.Container) bool {
			return slices.ContainsFunc(c.VolumeMounts, func(m corev1.VolumeMount) bool {
				return m.Name == v.Name && !m.ReadOnly
			})
		}
		if what == "" || !slices.ContainsFunc(pod.InitContainers, writes) &&
			!slices.ContainsFunc(pod.Containers, writes) {
			continue
		}
		if p.spec.Volumes[v.Name] != api.VolumeShare { // volumes has added a note
			p.note("volume %s is shared: the clone writes to %s as the workload does; --volume %s=empty gives it an "+
				"empty directory", v.Name, what, v.Name)
		}
		if p.spec.SyncShared {
			continue
		}
		at := slices.IndexFunc(pod.Containers, func(c corev1.Container) bool { return c.Name == p.container })
		for _, pair := range p.spec.Sync {
			if at >= 0 && slices.Contains(writesTo(pod.Containers[at].VolumeMounts, pair.Remote), v.Name) {
				return api.Errorf(api.ExitUsage, "--sync %s would change files that others use: volume %s is %s",
					pair.Remote, v.Name, what).
					WithHint("give the clone an empty directory (--volume %s=empty), sync to another one, or add "+
						"--sync-shared to change them", v.Name)
			}
		}
	}
	return nil
}

// writesTo returns the names of the volumes that may contain files below a path of the container.
func writesTo(mounts []corev1.VolumeMount, remote string) []string {
	remote = path.Clean("/" + remote)
	var names []string
	var around, nearest string // the mount that contains the path itself
	for _, m := range mounts {
		at := path.Clean("/" + m.MountPath) // for runtimes, a relative path starts at the root
		name := m.Name
		if m.ReadOnly {
			name = ""
		}
		switch {
		case api.Within(remote, at) && len(at) >= len(nearest):
			around, nearest = name, at
		case api.Within(at, remote):
			names = append(names, name)
		}
	}
	return append(names, around)
}

// writtenByOthers describes a volume that others may write to. It returns "" if only the pod itself does, or nobody. A
// volume of an unknown type counts as shared.
func writtenByOthers(v corev1.Volume) string {
	switch s := v.VolumeSource; {
	case s.PersistentVolumeClaim != nil:
		if s.PersistentVolumeClaim.ReadOnly {
			return ""
		}
		return "PersistentVolumeClaim " + s.PersistentVolumeClaim.ClaimName
	case s.HostPath != nil:
		return "the node's " + s.HostPath.Path + " (hostPath)"
	}
	source, err := runtime.DefaultUnstructuredConverter.ToUnstructured(&v.VolumeSource)
	if err != nil {
		return "unknown"
	}
	for _, own := range []string{"emptyDir", "configMap", "secret", "downwardAPI", "projected", "ephemeral", "image",
		"gitRepo"} {
		delete(source, own)
	}
	for _, kind := range slices.Sorted(maps.Keys(source)) { // there is one
		if readOnly, _, _ := unstructured.NestedBool(source, kind, "readOnly"); !readOnly {
			return kind
		}
	}
	return ""
}
