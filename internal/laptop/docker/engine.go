package docker

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"kubevpn/internal/api"
	"kubevpn/pkg/wakeup"
)

// Engine is the Docker Engine of this machine that the docker command uses.
type Engine struct {
	command  string
	security []string // features: "seccomp", "selinux", "rootless", "userns"
}

// instead names the modes that need no engine.
const instead = "or without Docker: `kubevpn dev TYPE/NAME -- COMMAND` runs a program of this machine (with " +
	"--isolate in a network of its own)"

func noEngine(next, format string, args ...any) *api.Error {
	return api.Errorf(api.ExitEngine, format, args...).WithHint("%s\n%s", next, instead)
}

// Find finds the engine. Its errors name what is missing and an alternative.
func Find(ctx context.Context) (*Engine, error) {
	command, err := exec.LookPath("docker")
	if err != nil {
		return nil, noEngine("install Docker Engine (Debian and Ubuntu: sudo apt install docker.io)",
			"--docker needs the docker command, which is not in PATH")
	}
	e := &Engine{command: command}
	host, err := e.output(ctx, "context", "inspect", "--format", "{{.Endpoints.docker.Host}}")
	if err != nil {
		return nil, e.unreachable(ctx, err)
	}
	if err := local(strings.TrimSpace(string(host))); err != nil {
		return nil, err
	}
	if _, err := e.output(ctx, "version", "--format", "{{.Server.Version}}"); err != nil {
		return nil, e.unreachable(ctx, err)
	}
	out, err := e.output(ctx, "info", "--format", "{{json .}}")
	if err != nil {
		return nil, e.unreachable(ctx, err)
	}
	if e.security, err = capable(out); err != nil {
		return nil, err
	}
	return e, nil
}

// local rejects an engine on another machine: it could neither mount this binary nor share its network with this
// process.
func local(host string) error {
	if strings.HasPrefix(host, "unix://") {
		return nil
	}
	return noEngine("choose a local engine: unset DOCKER_HOST and DOCKER_CONTEXT, and run `docker context use default`",
		"the docker command uses an engine on another machine (%s), and --docker needs one on this machine", host)
}

// capable returns the security features in the output of `docker info`, or an error if the engine does not fit.
func capable(info []byte) ([]string, error) {
	var i struct {
		OSType, OperatingSystem string
		SecurityOptions         []string
	}
	if err := json.Unmarshal(info, &i); err != nil {
		return nil, fmt.Errorf("cannot read the output of `docker info`: %w", err)
	}
	if i.OSType != "linux" {
		return nil, noEngine("switch Docker to Linux containers on a Linux machine",
			"the engine runs %s containers, and the pod has Linux containers", i.OSType)
	}
	if strings.Contains(i.OperatingSystem, "Docker Desktop") {
		return nil, noEngine("choose Docker Engine itself: `docker context use default`",
			"Docker Desktop runs its engine in a virtual machine, and kubevpn cannot share a network with it")
	}
	var features []string
	for _, o := range i.SecurityOptions { // "name=seccomp,profile=default"
		for field := range strings.SplitSeq(o, ",") {
			if name, ok := strings.CutPrefix(field, "name="); ok {
				features = append(features, name)
			}
		}
	}
	return features, nil
}

func (e *Engine) has(feature string) bool { return slices.Contains(e.security, feature) }

// unreachable returns an error that explains why the engine does not answer.
func (e *Engine) unreachable(ctx context.Context, err error) error {
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	text := strings.ToLower(err.Error())
	switch {
	case strings.Contains(text, "permission denied"):
		return noEngine("join the group docker (sudo usermod -aG docker $USER, and log in again)",
			"you have no permission to use the Docker Engine: %w", err)
	case strings.Contains(text, "cannot connect"), strings.Contains(text, "is the docker daemon running"),
		strings.Contains(text, "failed to connect"):
		return noEngine("start it (sudo systemctl start docker)", "the Docker Engine does not run: %w", err)
	}
	return noEngine("run `docker info` to find the cause", "the docker command fails: %w", err)
}

// output runs the docker command and returns its standard output. An error contains its standard error.
func (e *Engine) output(ctx context.Context, args ...string) ([]byte, error) {
	cmd := exec.CommandContext(ctx, e.command, args...)
	var stderr bytes.Buffer
	cmd.Stderr = &stderr
	out, err := cmd.Output()
	if err != nil {
		return nil, fmt.Errorf("docker %s: %w", args[0], said(err, stderr.String()))
	}
	return out, nil
}

// remove ends and removes a container, and waits until the engine, which may be removing it already, has done so.
func (e *Engine) remove(ctx context.Context, name string) error {
	var why error
	for {
		_, err := e.output(ctx, "rm", "--force", "--volumes", name)
		if err == nil || strings.Contains(strings.ToLower(err.Error()), "no such container") {
			return nil
		}
		if ctx.Err() == nil {
			why = err
		}
		if !wakeup.Pause(ctx, 100*time.Millisecond) {
			return errors.Join(why, context.Cause(ctx))
		}
	}
}

// mountpoint returns the directory on this machine of the volume that a container has at target.
func (e *Engine) mountpoint(ctx context.Context, container, target string) (string, error) {
	format := fmt.Sprintf("{{range .Mounts}}{{if eq .Destination %q}}{{.Source}}{{end}}{{end}}", target)
	out, err := e.output(ctx, "inspect", "--format", format, container)
	dir := strings.TrimSpace(string(out))
	if err == nil && !filepath.IsAbs(dir) {
		err = fmt.Errorf("docker inspect: the container %s has no volume at %s", container, target)
	}
	return dir, err
}

// removeVolumes removes volumes of earlier runs, which stay when an engine ends during a run. They are empty: a tmpfs
// does not outlive its containers. (`docker volume prune` skips volumes with options.)
func (e *Engine) removeVolumes(ctx context.Context) error {
	out, err := e.output(ctx, "volume", "ls", "--quiet", "--filter", "dangling=true", "--filter", "label="+label)
	names := strings.Fields(string(out))
	if err != nil || len(names) == 0 {
		return err
	}
	_, err = e.output(ctx, append([]string{"volume", "rm", "--force"}, names...)...)
	return err
}

// said returns the standard error of a command as an error, or err if text is empty.
func said(err error, text string) error {
	text = strings.TrimPrefix(strings.TrimSpace(text), "docker: ")
	text, _, _ = strings.Cut(text, "\nSee 'docker") // how to get help
	text, _, _ = strings.Cut(text, "\n\nRun 'docker")
	if text = strings.Join(strings.Fields(text), " "); text == "" {
		return err
	}
	return errors.New(strings.TrimSuffix(text, "."))
}

// image is the configuration of an image.
type image struct {
	Architecture string // as GOARCH
	Config       struct {
		User                 string
		Env, Entrypoint, Cmd []string
	}
}

func (e *Engine) inspect(ctx context.Context, ref string) (i image, err error) {
	out, err := e.output(ctx, "image", "inspect", "--format", "{{json .}}", ref)
	if err == nil {
		err = json.Unmarshal(out, &i)
	}
	return i, err
}

// image inspects an image. It pulls a missing image and, with alwaysPull, also one that exists locally; if that fails,
// it warns and uses the local one. The output of a pull goes to progress.
func (e *Engine) image(ctx context.Context, ref string, alwaysPull bool, progress func() io.Writer,
	warn func(string)) (image, error) {
	if strings.HasPrefix(ref, "-") { // docker would read it as a flag
		return image{}, api.Errorf(api.ExitEngine, "%q is not the name of an image", ref)
	}
	i, err := e.inspect(ctx, ref)
	switch {
	case ctx.Err() != nil:
		return i, context.Cause(ctx)
	case err == nil && !alwaysPull:
		return i, nil
	case err != nil && !strings.Contains(strings.ToLower(err.Error()), "no such image"):
		return i, api.Errorf(api.ExitEngine, "cannot inspect the image %s: %w", ref, err)
	}
	here := err == nil
	cmd := exec.CommandContext(ctx, e.command, "pull", ref)
	var stderr bytes.Buffer
	cmd.Stdout, cmd.Stderr = progress(), &stderr
	switch err := cmd.Run(); {
	case ctx.Err() != nil:
		return i, context.Cause(ctx)
	case err != nil && here:
		warn(fmt.Sprintf("using this machine's copy of the image %s; the registry may have a newer one: %v", ref,
			said(err, stderr.String())))
		return i, nil
	case err != nil:
		registry, _, found := strings.Cut(ref, "/")
		if !found || !strings.ContainsAny(registry, ".:") || registry == "docker.io" {
			registry = ""
		}
		return i, api.Errorf(api.ExitEngine, "cannot pull the image %s: %w", ref, said(err, stderr.String())).
			WithHint("run `%s` if the registry requires it: kubevpn does not use the cluster's pull secrets;\nor "+
				"choose an image of this machine with --image",
				strings.TrimSpace("docker login "+registry))
	}
	if i, err = e.inspect(ctx, ref); err != nil {
		return i, api.Errorf(api.ExitEngine, "cannot inspect the image %s after the pull: %w", ref, err)
	}
	return i, nil
}
