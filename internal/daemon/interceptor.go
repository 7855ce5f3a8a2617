package daemon

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"fmt"
	"log/slog"
	"net"
	"os"
	"os/user"
	"strings"

	"kubevpn/internal/api"
)

// Intercept is one workload whose requests come to this laptop. Run is called once; the other methods may be called at
// any time, concurrently, also after Run has returned.
type Intercept interface {
	// Run makes the intercept and keeps it until ctx ends or it cannot be kept; it has left when it returns.
	Run(ctx context.Context) error
	// Begun is closed once requests were seen to come, or will as soon as the workload has a pod. It stays closed.
	Begun() <-chan struct{}
	// Status is a snapshot; it does not block.
	Status() api.Intercept
}

// Interceptor makes intercepts. Its methods may be called concurrently.
type Interceptor interface {
	// Resolve gives a workload, which users may call by several names, its one name: "deployment/web" of "deploy/web".
	Resolve(ctx context.Context, account api.ConnectRequest, workload string) (string, error)
	// Intercept makes an Intercept: no I/O, no goroutine before Run.
	Intercept(cfg InterceptConfig) (Intercept, error)
}

// InterceptConfig is what an Intercept is made from.
type InterceptConfig struct {
	Account    api.ConnectRequest // whose rights it is made with, and the namespace
	Connection Connection         // it is connected
	Workload   string             // as Resolve has it
	Spec       api.InterceptSpec
	Owner      Owner
	// Dial connects to the programs that the requests are for; nil: those of this machine.
	Dial     func(ctx context.Context, network, address string) (net.Conn, error)
	Progress func(api.Event) // may be called concurrently
	Logger   *slog.Logger
}

// Owner is who has the intercepts of a daemon.
type Owner struct {
	Name string            // "ann@laptop": others are told
	Key  *ecdsa.PrivateKey // P-256; in memory only, it dies with the daemon
}

// NewOwner makes an owner that nobody was before, with the name of this user and machine.
func NewOwner() (Owner, error) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return Owner{}, fmt.Errorf("making the key of intercepts: %w", err)
	}
	name, host := fmt.Sprint(os.Getuid()), "localhost"
	if u, err := user.Current(); err == nil {
		name = u.Username[strings.LastIndexByte(u.Username, '\\')+1:] // Windows has DOMAIN\user
	}
	if h, err := os.Hostname(); err == nil {
		host = h
	}
	return Owner{Name: name + "@" + host, Key: key}, nil
}
