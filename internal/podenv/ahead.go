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
	var mu sync.Mutex
	var reading sync.WaitGroup
	configMaps, secrets := r.named()
	for _, name := range configMaps {
		reading.Go(func() {
			one := r.objects(ctx)
			_, _ = one.configMap(name) // an error is kept as well
			mu.Lock()
			defer mu.Unlock()
			all.configMaps[name] = one.configMaps[name]
		})
	}
	for _, name := range secrets {
		reading.Go(func() {
			one := r.objects(ctx)
			_, _ = one.secret(name)
			mu.Lock()
			defer mu.Unlock()
			all.secrets[name] = one.secrets[name]
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

// mountsVolume reports whether the container mounts the volume from the pod.
func (r *Reader) mountsVolume(name string) bool {
	_, replaced := r.here[name]
	return !replaced && slices.ContainsFunc(r.container.VolumeMounts, func(m corev1.VolumeMount) bool {
		return m.Name == name
	})
}

// tokensNamed returns the tokens of the container's volumes.
func (r *Reader) tokensNamed() (all []tokenOf) {
	for _, v := range r.pod.Spec.Volumes {
		if v.Projected == nil || !r.mountsVolume(v.Name) {
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

// named returns the names of the ConfigMaps and Secrets of the container's environment and volumes, each once.
func (r *Reader) named() (configMaps, secrets []string) {
	for _, from := range r.container.EnvFrom {
		if from.ConfigMapRef != nil {
			configMaps = append(configMaps, from.ConfigMapRef.Name)
		}
		if from.SecretRef != nil {
			secrets = append(secrets, from.SecretRef.Name)
		}
	}
	for _, v := range r.container.Env {
		if v.ValueFrom != nil && v.ValueFrom.ConfigMapKeyRef != nil {
			configMaps = append(configMaps, v.ValueFrom.ConfigMapKeyRef.Name)
		}
		if v.ValueFrom != nil && v.ValueFrom.SecretKeyRef != nil {
			secrets = append(secrets, v.ValueFrom.SecretKeyRef.Name)
		}
	}
	for _, v := range r.pod.Spec.Volumes {
		if !r.mountsVolume(v.Name) {
			continue
		}
		if v.ConfigMap != nil {
			configMaps = append(configMaps, v.ConfigMap.Name)
		}
		if v.Secret != nil {
			secrets = append(secrets, v.Secret.SecretName)
		}
		if v.Projected == nil {
			continue
		}
		for _, s := range v.Projected.Sources {
			if s.ConfigMap != nil {
				configMaps = append(configMaps, s.ConfigMap.Name)
			}
			if s.Secret != nil {
				secrets = append(secrets, s.Secret.Name)
			}
		}
	}
	slices.Sort(configMaps)
	slices.Sort(secrets)
	return slices.Compact(configMaps), slices.Compact(secrets)
}
