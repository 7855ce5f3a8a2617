package client

import (
	"context"
	"errors"
	"io"

	clientcmdapi "k8s.io/client-go/tools/clientcmd/api"

	"kubevpn/internal/api"
	"kubevpn/pkg/wakeup"
	"kubevpn/pkg/wire/sshjump"
)

// Jump selects SSH jump hosts before the API server. The zero value selects none.
type Jump struct {
	Hosts sshjump.Hosts
	Dir   string // of the SSH control sockets: see sshjump.Config
}

// jumpExtension is the extension of the kubeconfig's cluster that contains the jump hosts. Only Prepare writes it. Like
// a proxy, they are part of the path to the API server.
const jumpExtension = "kubevpn/ssh-jump"

// prepareJump writes the jump hosts into the kubeconfig, in place of a proxy: the last host connects to the API server.
func prepareJump(cluster *clientcmdapi.Cluster, in Inputs) *api.Error {
	delete(cluster.Extensions, jumpExtension)
	if len(in.Jump.Hosts) == 0 {
		return nil
	}
	program, err := lookPath("ssh", environment(in.Environ)["PATH"])
	if err != nil {
		return api.Errorf(api.ExitUsage, "--ssh-jump needs the program ssh: %w", err).
			WithHint("Install OpenSSH's client (the package openssh-client or openssh-clients), or put its folder " +
				"into PATH.")
	}
	cluster.ProxyURL = ""
	return setExtension(&cluster.Extensions, jumpExtension, sshjump.Config{
		Hosts: in.Jump.Hosts, Program: program, Env: in.Environ, Dir: in.Jump.Dir,
	})
}

// jumpOf returns a client for the jump hosts of a kubeconfig with one context, or nil.
func jumpOf(raw *clientcmdapi.Config) (*sshjump.Client, error) {
	kctx := raw.Contexts[raw.CurrentContext]
	if kctx == nil || raw.Clusters[kctx.Cluster] == nil {
		return nil, nil
	}
	var config sshjump.Config
	if ok, err := extension(raw.Clusters[kctx.Cluster].Extensions, jumpExtension, &config); !ok || err != nil {
		return nil, err
	}
	return sshjump.New(config), nil
}

// OpenJump logs in to the jump hosts, if there are any. ssh may ask the user on the terminal. It returns the hosts, or
// "". Errors are *api.Error, or ctx's.
func (c *Cluster) OpenJump(ctx context.Context, t Terminal) (string, error) {
	if c.dial.jump == nil {
		return "", nil
	}
	messages := t.Stderr
	if messages == nil && t.Stdin != nil {
		messages = io.Discard
	}
	hosts := c.dial.jump.Hosts().String()
	err := c.dial.jump.Open(ctx, messages)
	if err != nil && messages != nil {
		wakeup.Pause(ctx, interruptTime) // ssh receives Ctrl-C too
	}
	if err == nil || ctx.Err() != nil {
		return hosts, ctx.Err()
	}
	return hosts, c.Explain(err)
}

// jump explains a failure of ssh.
func (f facts) jump(err error) *api.Error {
	var failed *sshjump.Error
	if !errors.As(err, &failed) {
		return nil
	}
	e := api.Errorf(api.ExitUnreachable, "%s cannot be reached: %s", f.api(), api.CleanLine(failed.Error()))
	ssh := commandLine(append([]string{"ssh"}, failed.Hosts.Arguments()...))
	if failed.To != "" {
		return e.WithHint("The jump host must be able to connect to `server` of the kubeconfig, and its sshd must " +
			"allow TCP forwarding.")
	}
	return e.WithHint("`%s` must log in; if it fails, it shows the cause. If ssh has to ask you, run\n"+
		"`kubevpn connect --ssh-jump %s` in a terminal; the connection continues then.", ssh, failed.Hosts)
}
