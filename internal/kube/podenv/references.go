package podenv

import (
	"slices"

	corev1 "k8s.io/api/core/v1"
)

// The kinds of a Reference.
const (
	KindConfigMap      = "ConfigMap"
	KindSecret         = "Secret"
	KindServiceAccount = "ServiceAccount"
)

// Reference is an object of its namespace that a pod names.
type Reference struct {
	Kind, Name string
	Optional   bool // the pod starts without the object
}

// References returns the objects that a pod names, in the order of its fields, without its claims. An object that it
// names twice is there twice. Names may be empty.
func References(spec corev1.PodSpec) []Reference {
	all := []Reference{{Kind: KindServiceAccount, Name: spec.ServiceAccountName}}
	add := func(kind, name string, optional *bool) { all = append(all, Reference{kind, name, isTrue(optional)}) }
	for _, s := range spec.ImagePullSecrets {
		add(KindSecret, s.Name, nil)
	}
	for _, c := range slices.Concat(spec.InitContainers, spec.Containers) {
		for _, e := range c.EnvFrom {
			if r := e.ConfigMapRef; r != nil {
				add(KindConfigMap, r.Name, r.Optional)
			}
			if r := e.SecretRef; r != nil {
				add(KindSecret, r.Name, r.Optional)
			}
		}
		for _, e := range c.Env {
			if e.ValueFrom == nil {
				continue
			}
			if r := e.ValueFrom.ConfigMapKeyRef; r != nil {
				add(KindConfigMap, r.Name, r.Optional)
			}
			if r := e.ValueFrom.SecretKeyRef; r != nil {
				add(KindSecret, r.Name, r.Optional)
			}
		}
	}
	for _, v := range spec.Volumes {
		if v.ConfigMap != nil {
			add(KindConfigMap, v.ConfigMap.Name, v.ConfigMap.Optional)
		}
		if v.Secret != nil {
			add(KindSecret, v.Secret.SecretName, v.Secret.Optional)
		}
		if v.Projected == nil {
			continue
		}
		for _, p := range v.Projected.Sources {
			if p.ConfigMap != nil {
				add(KindConfigMap, p.ConfigMap.Name, p.ConfigMap.Optional)
			}
			if p.Secret != nil {
				add(KindSecret, p.Secret.Name, p.Secret.Optional)
			}
		}
	}
	return all
}
