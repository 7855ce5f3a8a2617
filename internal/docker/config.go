package docker

import (
	"context"
	"io"
	"log/slog"
	"os"
	"path/filepath"
	"regexp"
	"strconv"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/client-go/kubernetes"

	"kubevpn/internal/config"
	"kubevpn/internal/podenv"
	"kubevpn/pkg/sandbox"
)

// Command is the hidden command with which our binary is a container's first process. Its first argument is a role; with
// networkRole and removeRole the second is the run.
const Command = "container"

const (
	programRole = "program"
	networkRole = "network"
	removeRole  = "remove"
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

	Places                []Place // for the pod's files; the first that is in memory and can be had is used
	Executable            string  // our binary
	Stdin, Stdout, Stderr *os.File

	// Connect gives the network container the cluster's network, and its requests if there are any, until ctx ends. It calls ready
	// when programs may begin.
	Connect func(ctx context.Context, place *sandbox.Remote, ready func()) error
	// Begin is called right before the program starts: the terminal is its own then. False: there is to be none.
	Begin  func() bool
	Step   func(text string, done bool)
	Pull   func() io.Writer // is called before an image is pulled, and gives what takes that command's output
	Warn   func(string)     // what the pod has and its containers here have not
	Logger *slog.Logger
}

// Place is where a directory with those of all runs may be made. Its RuntimeDir is the user's alone, and need not exist.
type Place struct {
	config.Paths
	Own bool // nothing else is in RuntimeDir: it goes with the last run
}

// base is the directory of all runs.
func (p Place) base() string { return filepath.Join(p.RuntimeDir, "docker") }

// directory is a run's, in memory.
type directory struct {
	place Place
	base  string   // the place's
	id    string   // this run's, below base
	lock  *os.File // held while kubevpn lives
}

// What is in a run's directory.
const (
	lockName   = "lock"
	controlDir = "c" // with a directory for the sockets of each container: paths of sockets have to be short
	volumesDir = "volumes"
)

func (d *directory) control(n int) string {
	return filepath.Join(d.base, d.id, controlDir, strconv.Itoa(n))
}

// validID reports whether a run may be called so: what is removed by that name is below the directory of all runs.
func validID(id string) bool { return regexp.MustCompile(`^[0-9a-f]{10}$`).MatchString(id) }
