package docker

import (
	"cmp"
	"io/fs"
	"path"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/utils/ptr"

	"kubevpn/internal/kube/podenv"
	"kubevpn/pkg/host/sandbox"
)

// nested returns the mount points of other volumes within each volume, by the volume's name, as
// MakeNestedMountpoints of pkg/volume/util creates them.
func nested(mounts map[string][]podenv.Mount) map[string][]string {
	points := map[string][]string{}
	for _, all := range mounts {
		for n, m := range all {
			for _, outer := range slices.Backward(all[:n]) { // sorted by path: the last that is above it is the nearest
				if below, is := strings.CutPrefix(m.Path, outer.Path+"/"); is && mountable(m.Path) {
					if outer.Source != "" {
						break // docker creates it in the user's directory
					}
					at := path.Join(outer.SubPath, below)
					if !slices.Contains(points[outer.Volume], at) {
						points[outer.Volume] = append(points[outer.Volume], at)
					}
					break
				}
			}
		}
	}
	return points
}

// owned returns a volume with the owners that the kubelet would give it.
func owned(pod *corev1.Pod, v podenv.Volume) sandbox.Volume {
	o := sandbox.Volume{Name: v.Name, Empty: v.Empty, Group: podSecurity(pod).FSGroup}
	tokens := tokensOf(pod, v.Name)
	user := userOf(pod)
	for _, f := range v.Files {
		one := sandbox.File{Path: f.Path, Mode: f.Mode, Data: f.Data}
		if standard, is := tokens[f.Path]; is {
			// pkg/volume/projected: only its reader may read a token, if all containers have one user, or a group.
			one.Mode = standard
			if user != nil || o.Group != nil {
				one.Mode = 0o600
			}
			if user != nil {
				one.Owner = int(*user)
			}
		}
		o.Files = append(o.Files, one)
	}
	return o
}

// tokensOf returns the paths of tokens in a volume, with their modes.
func tokensOf(pod *corev1.Pod, volume string) map[string]fs.FileMode {
	tokens := map[string]fs.FileMode{}
	for _, v := range pod.Spec.Volumes {
		if v.Name != volume || v.Projected == nil {
			continue
		}
		mode := fs.FileMode(ptr.Deref(v.Projected.DefaultMode, 0o644)) & fs.ModePerm
		for _, s := range v.Projected.Sources {
			if s.ServiceAccountToken != nil {
				tokens[s.ServiceAccountToken.Path] = mode
			}
		}
	}
	return tokens
}

// userOf returns the user of all containers if the pod names one user for all of them (FsUser of pkg/kubelet/util).
func userOf(pod *corev1.Pod) *int64 {
	var one *int64
	for _, c := range slices.Concat(pod.Spec.InitContainers, pod.Spec.Containers) {
		user := effective(pod, &c).RunAsUser
		if user == nil || one != nil && *one != *user {
			return nil
		}
		one = user
	}
	return one
}

// effective returns the security context of a container, with the pod's values where the container has none.
func effective(pod *corev1.Pod, c *corev1.Container) corev1.SecurityContext {
	s, of := ptr.Deref(c.SecurityContext, corev1.SecurityContext{}), podSecurity(pod)
	s.RunAsUser, s.RunAsGroup = cmp.Or(s.RunAsUser, of.RunAsUser), cmp.Or(s.RunAsGroup, of.RunAsGroup)
	return s
}

// podSecurity returns the security context of the pod, which may be empty.
func podSecurity(pod *corev1.Pod) corev1.PodSecurityContext {
	return ptr.Deref(pod.Spec.SecurityContext, corev1.PodSecurityContext{})
}
