// Image makes a container image of static binaries and writes it to a file or pushes it, without Docker. The Makefile's
// image and push-image use it. See package kubevpn/test/image.
package main

import "os"

func main() { os.Exit(run(os.Args[1:], os.Stdout, os.Stderr)) }
