package lab

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"fmt"
	"math/big"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"time"
)

// lifetime is the lifetime of every certificate: longer than any lab exists.
const lifetime = 10 * 365 * 24 * time.Hour

// authority is the lab's certificate authority. It signs all certificates: servers, components, users.
type authority struct {
	certificate *x509.Certificate
	key         *ecdsa.PrivateKey
	serial      int64
}

// identity is the subject of a certificate.
type identity struct {
	name      string       // common name: a user's name to Kubernetes
	groups    []string     // organizations: the user's groups
	hosts     []string     // DNS names of a server
	addresses []netip.Addr // of a server
}

// keyPair is a certificate and its key, both in PEM.
type keyPair struct{ certificate, key []byte }

// newAuthority creates a CA with a new key (ECDSA P-256, which takes a hundredth of the time of RSA).
func newAuthority() (*authority, error) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return nil, fmt.Errorf("making the CA's key: %w", err)
	}
	now := time.Now()
	template := &x509.Certificate{
		SerialNumber:          big.NewInt(1),
		Subject:               pkix.Name{CommonName: "kubevpn-lab-ca"},
		NotBefore:             now.Add(-time.Hour),
		NotAfter:              now.Add(lifetime),
		IsCA:                  true,
		BasicConstraintsValid: true,
		KeyUsage:              x509.KeyUsageCertSign | x509.KeyUsageDigitalSignature,
	}
	der, err := x509.CreateCertificate(rand.Reader, template, template, key.Public(), key)
	if err != nil {
		return nil, fmt.Errorf("making the CA's certificate: %w", err)
	}
	certificate, err := x509.ParseCertificate(der)
	if err != nil {
		return nil, fmt.Errorf("reading the CA's certificate back: %w", err)
	}
	return &authority{certificate: certificate, key: key, serial: 1}, nil
}

// pem returns the CA's certificate.
func (a *authority) pem() []byte {
	return pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: a.certificate.Raw})
}

// issue creates a key and a certificate for it, valid for servers and clients.
func (a *authority) issue(id identity) (keyPair, error) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return keyPair{}, fmt.Errorf("making the key of %s: %w", id.name, err)
	}
	a.serial++
	now := time.Now()
	template := &x509.Certificate{
		SerialNumber: big.NewInt(a.serial),
		Subject:      pkix.Name{CommonName: id.name, Organization: id.groups},
		NotBefore:    now.Add(-time.Hour),
		NotAfter:     now.Add(lifetime),
		KeyUsage:     x509.KeyUsageDigitalSignature,
		ExtKeyUsage:  []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth, x509.ExtKeyUsageClientAuth},
		DNSNames:     id.hosts,
	}
	for _, ip := range id.addresses {
		template.IPAddresses = append(template.IPAddresses, net.IP(ip.AsSlice()))
	}
	der, err := x509.CreateCertificate(rand.Reader, template, a.certificate, key.Public(), a.key)
	if err != nil {
		return keyPair{}, fmt.Errorf("making the certificate of %s: %w", id.name, err)
	}
	private, err := keyPEM(key)
	if err != nil {
		return keyPair{}, err
	}
	return keyPair{pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der}), private}, nil
}

func keyPEM(key *ecdsa.PrivateKey) ([]byte, error) {
	der, err := x509.MarshalECPrivateKey(key)
	if err != nil {
		return nil, fmt.Errorf("encoding a key: %w", err)
	}
	return pem.EncodeToMemory(&pem.Block{Type: "EC PRIVATE KEY", Bytes: der}), nil
}

// serviceAccountKeys creates the key pair for ServiceAccount tokens.
func serviceAccountKeys() (private, public []byte, err error) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return nil, nil, fmt.Errorf("making the ServiceAccount key: %w", err)
	}
	if private, err = keyPEM(key); err != nil {
		return nil, nil, err
	}
	der, err := x509.MarshalPKIXPublicKey(key.Public())
	if err != nil {
		return nil, nil, fmt.Errorf("encoding the ServiceAccount key: %w", err)
	}
	return private, pem.EncodeToMemory(&pem.Block{Type: "PUBLIC KEY", Bytes: der}), nil
}

// The users with a kubeconfig, see Lab.Kubeconfig.
const (
	Admin     = "admin" // may do everything
	Developer = "dev"   // bound to the built-in ClusterRole edit in the namespace default, and to nothing else
	Token     = "token" // may do the same with a bearer token: of ServiceAccount developer, until a test deletes that
)

// clients lists everyone with a certificate and a kubeconfig: Kubernetes' components by file name, and the users.
func (c Config) clients() map[string]identity {
	clients := map[string]identity{
		"kube-controller-manager": {name: "system:kube-controller-manager"},
		"kube-scheduler":          {name: "system:kube-scheduler"},
		"kube-proxy":              {name: "system:kube-proxy"},
		Admin:                     {name: "admin", groups: []string{"system:masters"}},
		Developer:                 {name: "dev", groups: []string{"developers"}},
	}
	for n := 1; n <= c.Nodes; n++ {
		clients[fmt.Sprintf("node%d", n)] = c.nodeIdentity(n)
	}
	return clients
}

func (c Config) nodeIdentity(n int) identity {
	id := identity{name: "system:node:" + c.NodeName(n), groups: []string{"system:nodes"},
		hosts: []string{c.NodeName(n)}}
	for _, f := range c.Families() {
		id.addresses = append(id.addresses, f.Node(n))
	}
	return id
}

func (c Config) apiServerIdentity() identity {
	id := identity{
		name: "kube-apiserver",
		hosts: []string{"kubernetes", "kubernetes.default", "kubernetes.default.svc",
			"kubernetes.default.svc.cluster.local", "localhost"},
		addresses: []netip.Addr{netip.AddrFrom4([4]byte{127, 0, 0, 1}), netip.IPv6Loopback()},
	}
	for _, f := range c.Families() {
		id.addresses = append(id.addresses, c.APIServer(f), f.Kubernetes)
	}
	return id
}

// writePKI creates all keys, certificates and kubeconfigs in dir.
func (c Config) writePKI(dir string) error {
	ca, err := newAuthority()
	if err != nil {
		return err
	}
	files := map[string][]byte{"ca.crt": ca.pem()}
	if files["ca.key"], err = keyPEM(ca.key); err != nil {
		return err
	}
	if files["sa.key"], files["sa.pub"], err = serviceAccountKeys(); err != nil {
		return err
	}
	servers := map[string]identity{
		"apiserver":      c.apiServerIdentity(),
		"kubelet-client": {name: "kube-apiserver-kubelet-client", groups: []string{"system:masters"}},
		"front-proxy":    {name: "front-proxy-client"},
	}
	for name, id := range servers {
		pair, err := ca.issue(id)
		if err != nil {
			return err
		}
		files[name+".crt"], files[name+".key"] = pair.certificate, pair.key
	}
	for name, id := range c.clients() {
		pair, err := ca.issue(id)
		if err != nil {
			return err
		}
		files[name+".crt"], files[name+".key"] = pair.certificate, pair.key
		files[name+".kubeconfig"] = c.kubeconfig(name, ca.pem(), pair)
	}
	for name, content := range files {
		if err := os.WriteFile(filepath.Join(dir, name), content, 0o600); err != nil {
			return err
		}
	}
	return nil
}

// bearer returns the kubeconfig with the token that the API server's response to a TokenRequest contains.
func (c Config) bearer(ca []byte, token string) []byte {
	return c.kubeconfigWith(Token, ca, "token: "+token)
}
