package daemon

import (
	"context"
	"crypto/ecdsa"
	"crypto/x509"
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"os"
	"os/user"
	"strings"

	"kubevpn/internal/api"
	"kubevpn/internal/kube/client"
	"kubevpn/internal/laptop/connection"
	"kubevpn/internal/laptop/intercept"
)

// Factory makes connections and intercepts. The product has one, factory; tests have others. Its methods
// are safe for concurrent use.
type Factory interface {
	// Identify returns the IDs of the cluster and of the connection that NewConnection would make.
	Identify(kubeconfig []byte) (client.IDs, error)
	// Prepare returns what NewConnection can use for the request. It does no I/O.
	Prepare(req api.ConnectRequest, logger *slog.Logger) (*connection.Prepared, error)
	// NewConnection does no I/O and starts no goroutine. It owns cfg.Prepared.
	NewConnection(cfg connection.Config) (Connection, error)
	// Workload returns the canonical name of a workload: "deployment/web" for "deploy/web".
	Workload(ctx context.Context, account api.ConnectRequest, name string) (string, error)
	// NewIntercept does no I/O and starts no goroutine. It completes cfg: the requests arrive through c, and the
	// Intercept changes the workload with the rights of account.
	NewIntercept(account api.ConnectRequest, c Connection, cfg intercept.Config) (Intercept, error)
}

// Connection is one connection to a cluster. Call Run once. The other methods are safe for concurrent use, also after
// Run has returned.
type Connection interface {
	intercept.Session
	// DialFlow is Dial from where the flows of programs leave: the traffic manager, or a pod.
	DialFlow(ctx context.Context, network string, addr netip.AddrPort) (net.Conn, error)
	// Inside reports whether flows to an address leave from there, and not from this machine.
	Inside(dst netip.Addr) bool
	// Flows returns the open flows. Stall is set if bytes wait now.
	Flows(local connection.LocalSockets) []api.Flow
	// NameOf returns the name of the Service, pod or host with the address, if it is known; it does not block.
	NameOf(a netip.Addr) api.ObjectName
	// Cluster is the API of the cluster, with the rights of the user who connected.
	Cluster() *client.Cluster
	// Run makes the connection and keeps it until ctx ends or the connection is lost. It cleans up before it returns.
	Run(ctx context.Context) error
	// Connected is closed once probes have shown that the connection works.
	Connected() <-chan struct{}
	// Moved returns a channel that is closed when this machine has woken up or its network has changed.
	Moved() <-chan struct{}
	// SetNamespace changes the namespace in which short names are looked up first.
	SetNamespace(namespace string)
	// SetCredential replaces the credential that the user's credential plugin returned. It interrupts nothing.
	SetCredential(credential *api.Credential) error
	// Counters returns what the connection counts, for metrics.
	Counters() connection.Counters
	// Keep makes a temporary traffic manager one that stays.
	Keep(ctx context.Context, progress func(api.Event)) error
	// Upgrade replaces the traffic manager with one that runs the image, unless it does already, and moves the
	// connection, which must be connected, to it.
	Upgrade(ctx context.Context, image string, progress func(api.Event)) error
}

// Intercept is one workload whose requests go to this laptop or a clone. Call Run once. The other methods are safe for
// concurrent use, also after Run has returned.
type Intercept interface {
	// Run makes the intercept and keeps it until ctx ends or the intercept fails. It removes it before it returns.
	Run(ctx context.Context) error
	// Begun is closed once a probe has shown that requests arrive, or that they will as soon as the workload has a pod.
	Begun() <-chan struct{}
	// Status returns a snapshot; it does not block.
	Status() api.Intercept
	// Requests calls emit with what is recorded of its requests; see intercept.Intercept.
	Requests(ctx context.Context, req api.RequestsRequest, emit func(api.Record)) error
	// Trace announces a trace ID to the agents with an order, and returns what they have noted of its requests.
	Trace(ctx context.Context, order api.AgentOrder) api.InterceptTrace
}

// Owner is the user and machine that hold the intercepts of a daemon.
type Owner struct {
	Name string            // "ann@laptop", for other developers to read; it proves nothing
	Key  *ecdsa.PrivateKey // P-256: proves ownership
}

// client returns the secret that identifies this user of this machine to traffic managers; see connection.Config.
func (o Owner) client() ([]byte, error) {
	secret, err := o.Key.Bytes()
	if err != nil {
		return nil, fmt.Errorf("cannot encode the client's key: %w", err)
	}
	return secret, nil
}

// keyHash returns the hash by which agents and clones identify the key of the owner.
func (o Owner) keyHash() (string, error) {
	der, err := x509.MarshalPKIXPublicKey(&o.Key.PublicKey)
	if err != nil {
		return "", fmt.Errorf("cannot encode the owner's key: %w", err)
	}
	return api.KeyHash(der), nil
}

// NewOwner returns an Owner with the key and the name of this user and machine.
func NewOwner(key *ecdsa.PrivateKey) Owner {
	name, host := fmt.Sprint(os.Getuid()), "localhost"
	if u, err := user.Current(); err == nil {
		name = u.Username[strings.LastIndexByte(u.Username, '\\')+1:] // Windows has DOMAIN\user
	}
	if h, err := os.Hostname(); err == nil {
		host = h
	}
	return Owner{Name: name + "@" + host, Key: key}
}
