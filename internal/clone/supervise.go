package clone

import (
	"bytes"
	"context"
	"fmt"
	"path"
	"slices"

	"github.com/docker/cli/cli/config/configfile"
	"github.com/google/go-containerregistry/pkg/authn"
	"github.com/google/go-containerregistry/pkg/name"
	"github.com/google/go-containerregistry/pkg/v1/remote"
	batchv1 "k8s.io/api/batch/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"kubevpn/internal/api"
	"kubevpn/internal/podenv"
)

// supervisorVolume is the volume that has the supervisor.
const supervisorVolume = "kubevpn"

// supervise has the container's command be run by the supervisor.
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
		if !path.IsAbs(pair.Remote) {
			return api.Errorf(api.ExitUsage, "--sync: %q is no path of the container, which begin with /", pair.Remote)
		}
		args = append(args, "--dir", pair.Remote)
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
	pod.Volumes = append(pod.Volumes, corev1.Volume{Name: supervisorVolume, VolumeSource: corev1.VolumeSource{EmptyDir: &corev1.EmptyDirVolumeSource{}}})
	pod.InitContainers = append([]corev1.Container{{
		Name: supervisorVolume, Image: image, ImagePullPolicy: corev1.PullIfNotPresent, Args: []string{"copy", api.SupervisorProgram},
		VolumeMounts:             []corev1.VolumeMount{mount},
		TerminationMessagePolicy: corev1.TerminationMessageFallbackToLogsOnError,
		SecurityContext: &corev1.SecurityContext{
			RunAsUser: new(int64(65532)), RunAsGroup: new(int64(65532)), RunAsNonRoot: new(true), AllowPrivilegeEscalation: new(false),
			ReadOnlyRootFilesystem: new(true), Capabilities: &corev1.Capabilities{Drop: []corev1.Capability{"ALL"}},
			SeccompProfile: &corev1.SeccompProfile{Type: corev1.SeccompProfileTypeRuntimeDefault},
		},
	}}, pod.InitContainers...)
	return nil
}

// command is what the container runs: what its template says, or the image.
func (c *Clone) command(ctx context.Context, job *batchv1.Job, target corev1.Container) ([]string, error) {
	if len(target.Command) > 0 {
		return podenv.Program(target.Command, target.Args, nil, nil), nil
	}
	done := c.step("Asking the registry what %s runs", target.Image)
	ref, err := name.ParseReference(target.Image)
	if err != nil {
		return nil, api.Errorf(api.ExitUsage, "%q is no image: %w", target.Image, err)
	}
	unknown := func(err error) error {
		return api.Errorf(api.ExitImagePull, "it is not known what %s runs: its template has no command, and the registry does not say: %w", target.Image, err).
			WithHint("Say it: --command, or a command in the template.")
	}
	keys, err := c.pullSecrets(ctx, job)
	if err != nil {
		return nil, unknown(err)
	}
	image, err := remote.Image(ref, remote.WithContext(ctx), remote.WithAuthFromKeychain(authn.NewMultiKeychain(keys, authn.DefaultKeychain)))
	if err != nil {
		return nil, unknown(err)
	}
	config, err := image.ConfigFile()
	if err != nil {
		return nil, unknown(err)
	}
	command := podenv.Program(nil, target.Args, config.Config.Entrypoint, config.Config.Cmd)
	if len(command) == 0 {
		return nil, unknown(fmt.Errorf("the image has no command"))
	}
	done("%q", command)
	return command, nil
}

// pullSecrets are the credentials by which the pod's images are pulled.
func (c *Clone) pullSecrets(ctx context.Context, job *batchv1.Job) (keychain, error) {
	var keys keychain
	for _, ref := range job.Spec.Template.Spec.ImagePullSecrets {
		secret, err := c.kube.CoreV1().Secrets(job.Namespace).Get(ctx, ref.Name, metav1.GetOptions{})
		if err != nil {
			return nil, fmt.Errorf("reading the pull secret: %w", err)
		}
		file := configfile.New("")
		switch {
		case secret.Data[corev1.DockerConfigJsonKey] != nil:
			err = file.LoadFromReader(bytes.NewReader(secret.Data[corev1.DockerConfigJsonKey]))
		case secret.Data[corev1.DockerConfigKey] != nil: // the same without what is around it
			whole := slices.Concat([]byte(`{"auths":`), secret.Data[corev1.DockerConfigKey], []byte("}"))
			err = file.LoadFromReader(bytes.NewReader(whole))
		}
		if err != nil {
			return nil, fmt.Errorf("reading the pull secret %s: %w", ref.Name, err)
		}
		keys = append(keys, file)
	}
	return keys, nil
}

// keychain is an authn.Keychain of pull secrets.
type keychain []*configfile.ConfigFile

// Resolve gives the credentials for a registry, or none.
func (k keychain) Resolve(to authn.Resource) (authn.Authenticator, error) {
	for _, file := range k {
		for _, at := range []string{to.String(), to.RegistryStr()} {
			if at == name.DefaultRegistry {
				at = authn.DefaultAuthKey
			}
			a, ok := file.AuthConfigs[at]
			if !ok {
				continue
			}
			return authn.FromConfig(authn.AuthConfig{
				Username: a.Username, Password: a.Password, Auth: a.Auth, IdentityToken: a.IdentityToken, RegistryToken: a.RegistryToken,
			}), nil
		}
	}
	return authn.Anonymous, nil
}
