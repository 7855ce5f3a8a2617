// Lab starts a real Kubernetes cluster on this machine, with a laptop beside it, for the demo and the tests. See
// `lab --help` and package kubevpn/test/lab.
package main

import "os"

func main() { os.Exit(run(os.Args[1:], os.Stdin, os.Stdout, os.Stderr)) }
