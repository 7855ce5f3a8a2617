package docker

import (
	"context"
	"io"
	"log/slog"
	"os"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/client-go/kubernetes"

	"kubevpn/internal/config"
	"kubevpn/internal/podenv"
	"kubevpn/pkg/host/sandbox"
)

// Command is the hidden command with which our binary is a container's first process. Its argument is a role.
const Command = "container"

const (
	programRole = "program"
	networkRole = "network"
)

// Config is what Run needs.
type Config struct {
	Engine    *Engine
	Kube      kubernetes.Interface
	Pod       *corev1.Pod // one that runs, or one made of the workload's template
	Workload  string      // its name, for a pod that has none
	Container string      // the one that the user works on: the terminal is its
	Alone     bool        // no other container runs

	Image            string    // of that container; empty: the pod's
	Interactive, TTY bool      // as -i and -t of `docker run`
	Terminal         bool      // Stdin is one
	Publish          []string  // as -p of `docker run`
	Arguments        Arguments // more, for that container
	Env              []string  // NAME=VALUE that wins over the container's

	Volumes map[string]string // directories of this machine that stand for volumes of the pod

	Exec podenv.Exec // in the cluster; nil: no container runs there
	// Running finds another pod of the workload, if Pod does not go on running; nil: there is none.
	Running func(ctx context.Context) (*corev1.Pod, error)

	Paths                 config.Paths // RuntimeDir is for the containers' sockets
	Executable            string       // our binary
	Stdin, Stdout, Stderr *os.File

	// Connect gives the network container the cluster's network, and its requests if there are any, until ctx ends. It
	// calls ready when programs may begin.
	Connect func(ctx context.Context, place sandbox.Place, ready func()) error
	// Begin is called right before the program starts: the terminal is its own then. False: there is to be none.
	Begin  func() bool
	Step   func(text string, done bool)
	Pull   func() io.Writer // is called before an image is pulled, and gives what takes that command's output
	Warn   func(string)     // what the pod has and its containers here have not
	Logger *slog.Logger
}
