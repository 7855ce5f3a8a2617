package clone

import (
	"context"
	"fmt"
	"maps"
	"slices"

	"github.com/google/go-containerregistry/pkg/name"
	batchv1 "k8s.io/api/batch/v1"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"

	"kubevpn/internal/api"
	"kubevpn/internal/kube/podenv"
	"kubevpn/internal/kube/workloads"
)

// supervisorVolume is the name of the volume and of the init container of the supervisor.
const supervisorVolume = "kubevpn"

// supervised reports whether the supervisor runs the command of the container.
func supervised(spec api.CloneSpec) bool { return len(spec.Sync) > 0 || spec.Restart }

// supervise makes the supervisor run the command of the container.
//
//	init container, our image:  traffic copy /.kubevpn/traffic      ┐ an emptyDir
//	the container, its image:   /.kubevpn/traffic supervise -- ...  ┘
func (c *Clone) supervise(ctx context.Context, job *batchv1.Job, container string) error {
	image, err := c.cfg.Image(ctx)
	if err != nil {
		return err
	}
	pod := &job.Spec.Template.Spec
	at := slices.IndexFunc(pod.Containers, func(o corev1.Container) bool { return o.Name == container })
	target := &pod.Containers[at]
	command, err := c.command(ctx, job, *target)
	if err != nil {
		return err
	}
	args := []string{"supervise"}
	for _, pair := range c.cfg.Spec.Sync {
		args = append(args, "--dir", workloads.Literal(pair.Remote))
	}
	if c.cfg.Spec.Restart {
		args = append(args, "--restart")
	}
	if c.ends {
		args = append(args, "--once")
	}
	target.Command, target.Args = []string{api.SupervisorProgram}, append(append(args, "--"), command...)
	mount := corev1.VolumeMount{Name: supervisorVolume, MountPath: api.SupervisorVolume}
	target.VolumeMounts = append(target.VolumeMounts, mount)
	pod.Volumes = append(pod.Volumes, corev1.Volume{Name: supervisorVolume, VolumeSource: emptyDir()})
	pod.InitContainers = append([]corev1.Container{{
		Name: supervisorVolume, Image: image, ImagePullPolicy: corev1.PullIfNotPresent,
		Args:                     []string{"copy", api.SupervisorProgram},
		Resources:                initResources(target.Resources),
		VolumeMounts:             []corev1.VolumeMount{mount},
		TerminationMessagePolicy: corev1.TerminationMessageFallbackToLogsOnError,
		SecurityContext:          workloads.Restricted(),
	}}, pod.InitContainers...)
	return nil
}

// checkPull returns an error if the pods of the Job cannot pull the supervisor's image, as far as the user can see.
func (c *Clone) checkPull(ctx context.Context, w workloads.Workload, job *batchv1.Job) error {
	if c.cfg.NeedsPullSecret == nil {
		return nil
	}
	if needs, err := c.cfg.NeedsPullSecret(ctx); err != nil || !needs {
		return err
	}
	image, err := c.cfg.Image(ctx)
	if err != nil {
		return err
	}
	w.Namespace, w.Template = job.Namespace, job.Spec.Template
	return workloads.CheckPull(ctx, c.kube, &w, nil, image)
}

// initResources returns the resources of the init container: those of the container, without devices such as GPUs.
// Quotas and limit ranges then admit both, the pod needs no more than before, and it keeps its quality of service.
func initResources(of corev1.ResourceRequirements) corev1.ResourceRequirements {
	usual := []corev1.ResourceName{corev1.ResourceCPU, corev1.ResourceMemory, corev1.ResourceEphemeralStorage}
	out := corev1.ResourceRequirements{Requests: maps.Clone(of.Requests), Limits: maps.Clone(of.Limits)}
	for _, list := range []corev1.ResourceList{out.Requests, out.Limits} {
		maps.DeleteFunc(list, func(name corev1.ResourceName, _ resource.Quantity) bool {
			return !slices.Contains(usual, name)
		})
	}
	return out
}

// command returns the command of the container, from the template or else from the image, escaped for the kubelet.
func (c *Clone) command(ctx context.Context, job *batchv1.Job, target corev1.Container) ([]string, error) {
	if len(target.Command) > 0 {
		return podenv.Program(target.Command, target.Args, nil, nil), nil
	}
	done := c.step("Reading the command of %s from its registry", target.Image)
	ref, err := name.ParseReference(target.Image)
	if err == nil && slices.Contains(c.cfg.Spec.InsecureRegistries, ref.Context().RegistryStr()) {
		ref, err = name.ParseReference(target.Image, name.Insecure)
	}
	if err != nil {
		return nil, api.Errorf(api.ExitUsage, "%q is not the name of an image: %w", target.Image, err)
	}
	unknown := func(err error) error {
		return api.Errorf(api.ExitImagePull,
			"cannot find the command of %s: its template has none, and its image cannot be read: %w", target.Image,
			err).
			WithHint("Pass --command, or add a command to the template. --insecure-registry %s allows HTTP for this "+
				"registry, without credentials.",
				ref.Context().RegistryStr())
	}
	secrets, err := workloads.ReadPullSecrets(ctx, c.kube, job.Namespace, job.Spec.Template.Spec)
	if err != nil {
		return nil, err
	}
	config, err := c.imageConfig(ctx, ref, secrets.Keys)
	if err != nil {
		for _, why := range secrets.Missing {
			err = fmt.Errorf("%w; %w", err, why)
		}
		return nil, unknown(err)
	}
	command := podenv.Program(nil, target.Args, api.Texts(config.Config.Entrypoint, workloads.Literal),
		api.Texts(config.Config.Cmd, workloads.Literal))
	if len(command) == 0 {
		return nil, unknown(fmt.Errorf("the image has no command"))
	}
	done("%q", podenv.Program(nil, target.Args, config.Config.Entrypoint, config.Config.Cmd))
	return command, nil
}
