package docker

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os/exec"
	"slices"
	"strings"

	"kubevpn/internal/api"
)

// Engine is the Docker Engine that the docker command speaks to, on this machine.
type Engine struct {
	command  string
	security []string // features: "seccomp", "selinux", "rootless", "userns"
}

// instead names the ways to work that need no engine.
const instead = "or without Docker: `kubevpn dev TYPE/NAME -- COMMAND` runs a program of this machine (with --isolate in a network of its own)"

func noEngine(next, format string, args ...any) *api.Error {
	return api.Errorf(api.ExitEngine, format, args...).WithHint("%s\n%s", next, instead)
}

// Find finds the engine. Its errors say what is missing, and what to do instead.
func Find(ctx context.Context) (*Engine, error) {
	command, err := exec.LookPath("docker")
	if err != nil {
		return nil, noEngine("install Docker Engine (Debian and Ubuntu: sudo apt install docker.io)", "--docker needs the docker command, and there is none in PATH")
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

// local refuses an engine that is not on this machine: it could neither see this binary nor give its network to this process.
func local(host string) error {
	if strings.HasPrefix(host, "unix://") {
		return nil
	}
	return noEngine("choose one that is here: unset DOCKER_HOST and DOCKER_CONTEXT, `docker context use default`",
		"the docker command is set to an engine on another machine (%s), and --docker needs one on this machine", host)
}

// capable reads what `docker info` says of the engine, and gives its security features.
func capable(info []byte) ([]string, error) {
	var i struct {
		OSType, OperatingSystem string
		SecurityOptions         []string
	}
	if err := json.Unmarshal(info, &i); err != nil {
		return nil, fmt.Errorf("reading what `docker info` says: %w", err)
	}
	if i.OSType != "linux" {
		return nil, noEngine("switch Docker to Linux containers on a Linux machine", "the engine runs containers of %s, and the pod's are Linux containers", i.OSType)
	}
	if strings.Contains(i.OperatingSystem, "Docker Desktop") {
		return nil, noEngine("choose Docker Engine itself: `docker context use default`",
			"Docker Desktop runs its engine in a virtual machine, which this machine's kubevpn cannot share a network with")
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

// unreachable explains why the engine does not answer.
func (e *Engine) unreachable(ctx context.Context, err error) error {
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	text := strings.ToLower(err.Error())
	switch {
	case strings.Contains(text, "permission denied"):
		return noEngine("become one of those who may (sudo usermod -aG docker $USER, and log in again)", "you may not speak to the Docker Engine: %w", err)
	case strings.Contains(text, "cannot connect"), strings.Contains(text, "is the docker daemon running"), strings.Contains(text, "failed to connect"):
		return noEngine("start it (sudo systemctl start docker)", "the Docker Engine does not run: %w", err)
	}
	return noEngine("`docker info` has to work first", "the docker command fails: %w", err)
}

// output runs the docker command and gives its standard output; an error has what it said.
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

// said is what a command wrote, or, if it wrote nothing, err.
func said(err error, text string) error {
	text = strings.TrimPrefix(strings.TrimSpace(text), "docker: ")
	text, _, _ = strings.Cut(text, "\nSee 'docker") // how to get help
	text, _, _ = strings.Cut(text, "\n\nRun 'docker")
	if text = strings.Join(strings.Fields(text), " "); text == "" {
		return err
	}
	return errors.New(strings.TrimSuffix(text, "."))
}

// image is what an image says of its containers.
type image struct {
	Architecture string
	Config       struct {
		Entrypoint, Cmd []string
	}
}

// image finds an image, and pulls it if it is not here; what is seen of that goes to progress.
func (e *Engine) image(ctx context.Context, ref string, progress func() io.Writer) (image, error) {
	look := func() (image, error) {
		var i image
		out, err := e.output(ctx, "image", "inspect", "--format", "{{json .}}", ref)
		if err == nil {
			err = json.Unmarshal(out, &i)
		}
		return i, err
	}
	i, err := look()
	if err == nil || ctx.Err() != nil {
		return i, err
	}
	if !strings.Contains(strings.ToLower(err.Error()), "no such image") {
		return i, api.Errorf(api.ExitEngine, "looking for the image %s: %w", ref, err)
	}
	cmd := exec.CommandContext(ctx, e.command, "pull", ref)
	var stderr bytes.Buffer
	cmd.Stdout, cmd.Stderr = progress(), &stderr
	if err := cmd.Run(); err != nil {
		if ctx.Err() != nil {
			return i, context.Cause(ctx)
		}
		registry, _, found := strings.Cut(ref, "/")
		if !found || !strings.ContainsAny(registry, ".:") || registry == "docker.io" {
			registry = ""
		}
		return i, api.Errorf(api.ExitEngine, "the image %s cannot be pulled: %w", ref, said(err, stderr.String())).
			WithHint("`%s` if the registry asks for it: the cluster's pull secrets are not used here;\nor name an image of this machine with --image",
				strings.TrimSpace("docker login "+registry))
	}
	if i, err = look(); err != nil {
		return i, api.Errorf(api.ExitEngine, "looking for the image %s, which was pulled: %w", ref, err)
	}
	return i, nil
}
