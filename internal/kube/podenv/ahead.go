package podenv

import (
	"context"
	"slices"
	"sync"

	corev1 "k8s.io/api/core/v1"
)

// ReadAhead reads the ConfigMaps, Secrets, Services and tokens of the container's environment and volumes, all at once,
// for the next Environment and Volumes. It may run concurrently with See.
func (r *Reader) ReadAhead(ctx context.Context) {
	all := r.objects(ctx)
	var reading sync.WaitGroup
	for _, of := range References(corev1.PodSpec{Containers: []corev1.Container{*r.container}, Volumes: r.mounted()}) {
		reading.Go(func() { // Environment and Volumes report the error
			if of.Kind != KindServiceAccount {
				_, _ = all.data(of.Kind, of.Name, false)
			}
		})
	}
	if r.serviceLinks() {
		reading.Go(func() { _, _ = all.servicesBeside() })
	}
	reading.Go(func() { _, _ = all.apiServerService() })
	reading.Go(func() {
		for _, of := range r.tokensNamed() {
			_, _ = r.token(ctx, of) // Volumes tries again
		}
	})
	reading.Wait()
	r.ahead = all
}

// mounted returns the volumes that the container mounts from the pod.
func (r *Reader) mounted() (all []corev1.Volume) {
	for _, v := range r.pod.Spec.Volumes {
		_, replaced := r.here[v.Name]
		if !replaced && slices.ContainsFunc(r.container.VolumeMounts, func(m corev1.VolumeMount) bool {
			return m.Name == v.Name
		}) {
			all = append(all, v)
		}
	}
	return all
}

// tokensNamed returns the tokens of the container's volumes.
func (r *Reader) tokensNamed() (all []tokenOf) {
	for _, v := range r.mounted() {
		if v.Projected == nil {
			continue
		}
		for _, s := range v.Projected.Sources {
			if s.ServiceAccountToken != nil {
				all = append(all, tokenOfProjection(s.ServiceAccountToken))
			}
		}
	}
	return all
}
