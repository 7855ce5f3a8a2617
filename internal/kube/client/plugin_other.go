//go:build !unix

package client

import "os/exec"

// ownGroup does nothing: without process groups only the plugin itself is killed, which cmd does by default.
func ownGroup(*exec.Cmd) {}
