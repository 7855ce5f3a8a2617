package manager

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"time"
	"unicode"

	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"

	"kubevpn/internal/process/version"
	"kubevpn/pkg/wakeup"
)

const (
	serviceAccountDir = "/var/run/secrets/kubernetes.io/serviceaccount"
	// apiServerName is a name in the certificate of every API server that pods can use.
	apiServerName = "kubernetes.default.svc"
	// nextServerAfter is how long dialFirst waits before it also dials the next address, as in RFC 8305.
	nextServerAfter = 250 * time.Millisecond
	connectTimeout  = 30 * time.Second
)

// apiServers returns addresses of the API server, by preference: the ClusterIP, which the kubelet passes to every pod,
// then the endpoints behind it, which the installer stores in KUBEVPN_APISERVERS. The ClusterIP does not work in a
// cluster in which no proxy serves ClusterIPs.
func apiServers(getenv func(string) string) []string {
	var addrs []string
	if host, port := getenv("KUBERNETES_SERVICE_HOST"), getenv("KUBERNETES_SERVICE_PORT"); host != "" && port != "" {
		addrs = append(addrs, net.JoinHostPort(host, port))
	}
	return append(addrs, strings.FieldsFunc(getenv("KUBEVPN_APISERVERS"), func(r rune) bool {
		return r == ',' || unicode.IsSpace(r)
	})...)
}

// apiServerVIP returns the ClusterIP of the API server from the pod's environment, or the zero value.
func apiServerVIP(getenv func(string) string) netip.AddrPort {
	host, port := getenv("KUBERNETES_SERVICE_HOST"), getenv("KUBERNETES_SERVICE_PORT")
	vip, _ := netip.ParseAddrPort(net.JoinHostPort(host, port)) // an error: a host name, or not in a pod
	return vip
}

// kubeClient returns a client with the pod's service account, or nil if the pod has none.
func kubeClient(dir string, servers []string) (kubernetes.Interface, error) {
	token := filepath.Join(dir, "token")
	if _, err := os.Stat(token); errors.Is(err, os.ErrNotExist) || len(servers) == 0 {
		return nil, nil
	} else if err != nil {
		return nil, err
	}
	client, err := kubernetes.NewForConfig(restConfig(token, filepath.Join(dir, "ca.crt"), servers))
	if err != nil {
		return nil, fmt.Errorf("preparing a client for the API server: %w", err)
	}
	return client, nil
}

func restConfig(token, ca string, servers []string) *rest.Config {
	return &rest.Config{
		Host:            "https://" + apiServerName,
		BearerTokenFile: token, // read again when it changes
		TLSClientConfig: rest.TLSClientConfig{CAFile: ca, ServerName: apiServerName},
		ContentConfig: rest.ContentConfig{
			ContentType:        runtime.ContentTypeProtobuf,
			AcceptContentTypes: runtime.ContentTypeProtobuf + "," + runtime.ContentTypeJSON,
		},
		UserAgent: "kubevpn-traffic-manager/" + version.String(),
		QPS:       50, // the default of 5 would make the start, a dozen requests, take half a second
		Burst:     100,
		Dial: func(ctx context.Context, network, _ string) (net.Conn, error) {
			return dialFirst(ctx, network, servers)
		},
	}
}

// dialFirst connects to the first of addrs that answers. It dials an address after the one before has failed, or has
// not answered for nextServerAfter.
func dialFirst(ctx context.Context, network string, addrs []string) (net.Conn, error) {
	ctx, cancel := context.WithTimeout(ctx, connectTimeout)
	defer cancel()
	return wakeup.First(ctx, len(addrs), nextServerAfter, func(ctx context.Context, n int) (net.Conn, error) {
		var to net.Dialer
		return to.DialContext(ctx, network, addrs[n])
	})
}
