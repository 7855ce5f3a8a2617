package clone

import (
	"context"
	"maps"
	"strings"
	"time"

	batchv1 "k8s.io/api/batch/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/validation"

	"kubevpn/internal/api"
	"kubevpn/internal/kube/workloads"
)

// Made is what runs in place of a copy: one pod, and the Service that sends to it.
type Made struct {
	Template    corev1.PodTemplateSpec
	Ports       []corev1.ServicePort
	Annotations map[string]string // of the Service
}

const (
	// madeLease and madeTTL are lease and jobTTL for what is made: others send requests there, so that it is gone with
	// all of its objects within two minutes.
	madeLease = 90 * time.Second
	madeTTL   = 5 * time.Second
)

// kind returns the word for what runs.
func (c *Clone) kind() string {
	if c.cfg.Make != nil {
		return "Service"
	}
	return "clone"
}

// advice returns the command that makes it again, and how to choose another name.
func (c *Clone) advice() (command, otherName string) {
	if c.cfg.Make != nil {
		return "expose", "Choose another name."
	}
	return "clone", "Choose another name: --name NAME"
}

// planMade is plan for what is made. It needs no rights to read anything.
func (c *Clone) planMade(ctx context.Context) (*batchv1.Job, *corev1.Service, error) {
	name := c.cfg.Spec.Name
	if errs := validation.IsDNS1035Label(name); len(errs) > 0 {
		return nil, nil, api.Errorf(api.ExitUsage, "%q is not a valid name for a Service: %s", name,
			strings.Join(errs, "; "))
	}
	image, err := c.cfg.Image(ctx)
	if err != nil {
		return nil, nil, err
	}
	made, err := c.cfg.Make(image)
	if err != nil {
		return nil, nil, err
	}
	meta := metav1.ObjectMeta{Name: name, Namespace: c.cfg.Namespace}
	job := newJob(meta, c.cfg.Namespace+"/"+c.cfg.Workload, c.cfg.Owner, c.cfg.Key, madeLease, madeTTL)
	job.Spec.Template = made.Template
	job.Spec.Template.Labels = maps.Clone(job.Labels)
	workloads.Decorate(job, c.cfg.Objects)
	workloads.Decorate(&job.Spec.Template, c.cfg.Objects)
	own := &corev1.Service{ObjectMeta: meta, Spec: corev1.ServiceSpec{
		Selector: map[string]string{labelClone: name}, Ports: made.Ports,
		IPFamilyPolicy: new(corev1.IPFamilyPolicyPreferDualStack)}}
	own.Labels, own.Annotations = maps.Clone(job.Labels), maps.Clone(job.Annotations)
	maps.Copy(own.Annotations, made.Annotations)
	c.change(func(s *api.Clone) { s.Name = job.Name })
	return job, own, nil
}

// runs reports whether the containers of a pod run.
func runs(p corev1.Pod) bool {
	return p.Status.Phase == corev1.PodRunning && p.DeletionTimestamp == nil
}
