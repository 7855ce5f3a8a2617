package docker

import (
	"context"
	"io"
	"log/slog"
	"os"

	"kubevpn/internal/config"
	"kubevpn/internal/kube/podenv"
	"kubevpn/pkg/host/sandbox"
)

// Command is the hidden command that makes our binary the first process of a container. Its argument is a role.
const Command = "container"

const (
	programRole = "program"
	networkRole = "network"
)

// Config configures Run.
type Config struct {
	podenv.Source // the pod

	Engine    *Engine
	Workload  string // its name, in case the pod has none
	Container string // the main container, which owns the terminal
	Alone     bool   // run no other container

	Image            string    // replaces that of the main container; empty: the pod's
	Interactive, TTY bool      // -i and -t of `docker run`
	Terminal         bool      // Stdin is a terminal
	Publish          []string  // -p of `docker run`
	Arguments        Arguments // more flags for the main container
	Env              []string  // NAME=VALUE; overrides the main container's

	Paths                 config.Paths // RuntimeDir holds the sockets of the containers
	Executable            string       // our binary
	Stdin, Stdout, Stderr *os.File

	// Connect connects the network container to the cluster, with the intercept if there is one, until ctx ends. It
	// calls ready when programs may start.
	Connect func(ctx context.Context, place sandbox.Place, ready func()) error
	// Begin hands the terminal to the program, right before it starts. If Begin returns false, it must not start.
	Begin  func() bool
	Step   func(text string, done bool)
	Pull   func() io.Writer // is called before an image is pulled; receives the output of that command
	Warn   func(string)     // is called for each difference from the pod
	Logger *slog.Logger
}
