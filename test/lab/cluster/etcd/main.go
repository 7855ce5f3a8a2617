// Etcd is the lab's etcd, built from its Go module: Debian 12's etcd 3.4 is too old for Kubernetes 1.34 (a watch
// without a resourceVersion hangs there). A nested module, so that it stays out of the product's go.mod.
package main

import (
	"os"

	"go.etcd.io/etcd/server/v3/etcdmain"
)

func main() { etcdmain.Main(os.Args) }
