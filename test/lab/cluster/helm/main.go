// Helm is the helm command, built from its Go module. A nested module, so that it stays out of the product's go.mod.
package main

import (
	"errors"
	"fmt"
	"os"

	helm "helm.sh/helm/v4/pkg/cmd"
	"helm.sh/helm/v4/pkg/kube"
)

func main() { os.Exit(run()) }

func run() int {
	kube.ManagedFieldsManager = "helm" // whatever the program's file is called
	cmd, err := helm.NewRootCmd(os.Stdout, os.Args[1:], helm.SetupLogging)
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	if err := cmd.Execute(); err != nil {
		if failed, ok := errors.AsType[helm.CommandError](err); ok {
			return failed.ExitCode
		}
		return 1
	}
	return 0
}
