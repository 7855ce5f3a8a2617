package session

import (
	"context"
	"fmt"
	"net"
	"net/netip"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"kubevpn/internal/api"
	"kubevpn/internal/cluster"
	"kubevpn/internal/install"
)

// What the rest of the laptop does over a connection that is up, past the device and the machine's routes.

// Cluster is the connection's cluster, with the credentials that it was made with.
func (s *Session) Cluster() *cluster.Cluster { return s.cluster }

// Dial connects to an address of the cluster as a flow of the laptop does: the traffic manager dials, and resolves
// ClusterIPs. A conn of "udp" has one datagram per Read and Write. While the tunnel is down it fails at once.
func (s *Session) Dial(ctx context.Context, network string, addr netip.AddrPort) (net.Conn, error) {
	return s.dialDNS(ctx, network, addr)
}

// Image is that of the traffic manager which serves the session: nodes can pull it, and what is in it speaks the
// session's protocol. Errors are *api.Error.
func (s *Session) Image(ctx context.Context) (string, error) {
	st := s.Status()
	pod, err := s.cluster.Kube().CoreV1().Pods(st.ManagerNamespace).Get(ctx, st.ManagerPod, metav1.GetOptions{})
	if err != nil {
		return "", s.cluster.Explain(fmt.Errorf("reading the traffic manager's pod: %w", err))
	}
	image := install.ImageOf(pod.Spec)
	if image == "" {
		return "", api.Errorf(api.ExitIncompatible, "the pod %s/%s is no traffic manager's", pod.Namespace, pod.Name)
	}
	return image, nil
}
