// Kube is Kubernetes in one program: `kube COMPONENT FLAGS...` is kube-apiserver, kube-controller-manager,
// kube-scheduler, kubelet, kube-proxy or kubectl, built from their published Go modules. One program, because they
// share most of their code: it is a third of the size and of the build time of six. A nested module, so that
// Kubernetes stays out of the product's go.mod.
//
// go.mod has the newest version. MINOR.mod and MINOR.sum, as in 1.31.mod, are those of an older one: see `lab up
// --kubernetes`.
package main

import (
	"context"
	"fmt"
	"os"

	"github.com/spf13/cobra"
	"k8s.io/component-base/cli"
	_ "k8s.io/component-base/logs/json/register"
	_ "k8s.io/component-base/metrics/prometheus/clientgo"
	_ "k8s.io/component-base/metrics/prometheus/version"
	kubectl "k8s.io/kubectl/pkg/cmd"

	apiserver "k8s.io/kubernetes/cmd/kube-apiserver/app"
	controllermanager "k8s.io/kubernetes/cmd/kube-controller-manager/app"
	proxy "k8s.io/kubernetes/cmd/kube-proxy/app"
	scheduler "k8s.io/kubernetes/cmd/kube-scheduler/app"
	kubelet "k8s.io/kubernetes/cmd/kubelet/app"
)

func main() { os.Exit(run()) }

func run() int {
	if len(os.Args) < 2 {
		return usage()
	}
	name := os.Args[1]
	os.Args = append([]string{name}, os.Args[2:]...)
	var command *cobra.Command
	switch name {
	case "kube-apiserver":
		command = apiserver.NewAPIServerCommand()
	case "kube-controller-manager":
		command = controllermanager.NewControllerManagerCommand()
	case "kube-scheduler":
		command = scheduler.NewSchedulerCommand()
	case "kube-proxy":
		command = proxy.NewProxyCommand()
	case "kubelet":
		command = kubeletCommand(kubelet.NewKubeletCommand)
	case "kubectl":
		command = kubectl.NewDefaultKubectlCommand()
	default:
		return usage()
	}
	return cli.Run(command)
}

// kubeletCommand calls kubelet's constructor, which takes no context before Kubernetes 1.32.
func kubeletCommand(constructor any) *cobra.Command {
	if old, ok := constructor.(func() *cobra.Command); ok {
		return old()
	}
	return constructor.(func(context.Context) *cobra.Command)(context.Background())
}

func usage() int {
	fmt.Fprintln(os.Stderr,
		"usage: kube kube-apiserver|kube-controller-manager|kube-scheduler|kubelet|kube-proxy|kubectl [flags]")
	return 2
}
