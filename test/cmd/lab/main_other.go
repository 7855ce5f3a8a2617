//go:build !linux

// Lab starts a real Kubernetes cluster on this machine, with a laptop beside it. It needs Linux's namespaces.
package main

import (
	"fmt"
	"os"
	"runtime"
)

func main() {
	fmt.Fprintf(os.Stderr, "lab: this machine runs %s; a lab needs Linux\n", runtime.GOOS)
	os.Exit(1)
}
