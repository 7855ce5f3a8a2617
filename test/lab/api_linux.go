package lab

import (
	"bytes"
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"os"
	"strings"
	"time"

	"sigs.k8s.io/yaml"
)

// Dial opens a connection from one of the lab's places ("laptop", "router", "node1"...), as a program there would. The
// address must be numeric. Dial has the signature of rest.Config's Dial. From a guest it opens only streams, and the
// connection reports other addresses.
func (l *Lab) Dial(ctx context.Context, place, network, address string) (net.Conn, error) {
	if _, err := netip.ParseAddrPort(address); err != nil {
		return nil, fmt.Errorf("dialing from %s: %w", place, err)
	}
	if l.inGuest(place) {
		return l.guest(place).Dial(ctx, network, address)
	}
	return l.dialFrom(ctx, place, network, address)
}

// dialFrom opens a connection from a place's network namespace.
func (l *Lab) dialFrom(ctx context.Context, place, network, address string) (net.Conn, error) {
	var conn net.Conn
	err := onThread(func() error {
		if err := enterNet(l.config.namespace(place)); err != nil {
			return err
		}
		var err error
		// This goroutine dials a single numeric address itself, so it stays on this thread.
		conn, err = (&net.Dialer{}).DialContext(ctx, network, address)
		return err
	})
	return conn, err
}

// Listen opens a listener in one of the lab's places that is not a guest, as a program there would. The address must be
// numeric. The caller owns the listener; the place's network lasts at least until the caller closes it.
func (l *Lab) Listen(place, network, address string) (net.Listener, error) {
	if _, err := netip.ParseAddrPort(address); err != nil {
		return nil, fmt.Errorf("listening in %s: %w", place, err)
	}
	if l.inGuest(place) {
		return nil, fmt.Errorf("listening in %s: a guest runs its own kernel; use the router", place)
	}
	if err := l.checkPlace(place); err != nil {
		return nil, err
	}
	var listener net.Listener
	err := onThread(func() error {
		if err := enterNet(l.config.namespace(place)); err != nil {
			return err
		}
		var err error
		// This goroutine resolves a numeric address itself, so it stays on this thread.
		listener, err = net.Listen(network, address)
		return err
	})
	return listener, err
}

// api is a client of the lab's API server with the few calls that starting a lab needs.
type api struct {
	http *http.Client
	url  string
}

func (l *Lab) newAPI() (*api, error) {
	ca, err := os.ReadFile(l.pki("ca.crt"))
	if err != nil {
		return nil, err
	}
	pair, err := tls.LoadX509KeyPair(l.pki(Admin+".crt"), l.pki(Admin+".key"))
	if err != nil {
		return nil, fmt.Errorf("loading the admin's key: %w", err)
	}
	roots := x509.NewCertPool()
	roots.AppendCertsFromPEM(ca)
	return &api{url: l.config.Server(), http: &http.Client{
		Timeout: 10 * time.Second,
		Transport: &http.Transport{
			TLSClientConfig: &tls.Config{RootCAs: roots, Certificates: []tls.Certificate{pair}},
			DialContext: func(ctx context.Context, network, address string) (net.Conn, error) {
				return l.Dial(ctx, l.config.control(), network, address)
			},
		},
	}}, nil
}

func (a *api) close() { a.http.CloseIdleConnections() }

// statusError is a response with a status other than 2xx.
type statusError struct {
	code    int
	message string
}

func (e *statusError) Error() string {
	return fmt.Sprintf("%s: %s", http.StatusText(e.code), e.message)
}

// do sends one request and decodes the JSON response into result unless it is nil.
func (a *api) do(ctx context.Context, method, path, contentType string, body []byte, result any) error {
	request, err := http.NewRequestWithContext(ctx, method, a.url+path, bytes.NewReader(body))
	if err != nil {
		return err
	}
	request.Header.Set("Content-Type", contentType)
	request.Header.Set("Accept", "application/json")
	response, err := a.http.Do(request)
	if err != nil {
		return err
	}
	defer response.Body.Close()
	answer, err := io.ReadAll(response.Body)
	if err != nil {
		return fmt.Errorf("%s %s: %w", method, path, err)
	}
	if response.StatusCode/100 != 2 {
		status := struct{ Message string }{strings.TrimSpace(string(answer))}
		_ = json.Unmarshal(answer, &status) // not every answer is a Status; the message is then the text
		return fmt.Errorf("%s %s: %w", method, path, &statusError{response.StatusCode, status.Message})
	}
	if result == nil {
		return nil
	}
	if err := json.Unmarshal(answer, result); err != nil {
		return fmt.Errorf("%s %s: %w", method, path, err)
	}
	return nil
}

func (a *api) get(ctx context.Context, path string, result any) error {
	return a.do(ctx, http.MethodGet, path, "application/json", nil, result)
}

// apply applies every document of a manifest by server-side apply.
func (a *api) apply(ctx context.Context, manifest string) error {
	for document := range strings.SplitSeq(manifest, "\n---\n") {
		if strings.TrimSpace(document) == "" {
			continue
		}
		path, err := objectPath(document)
		if err != nil {
			return err
		}
		err = a.do(ctx, http.MethodPatch, path+"?fieldManager=lab&force=true", "application/apply-patch+yaml",
			[]byte(document), nil)
		if err != nil {
			return err
		}
	}
	return nil
}

// objectPath returns the API path of the object in a YAML document. It supports only the kinds that the lab uses.
func objectPath(document string) (string, error) {
	var o struct {
		APIVersion string
		Kind       string
		Metadata   struct{ Name, Namespace string }
	}
	if err := yaml.Unmarshal([]byte(document), &o); err != nil {
		return "", fmt.Errorf("reading a manifest: %w", err)
	}
	if o.APIVersion == "" || o.Kind == "" || o.Metadata.Name == "" {
		return "", errors.New("a manifest without apiVersion, kind or name")
	}
	path := "/apis/" + o.APIVersion
	if !strings.Contains(o.APIVersion, "/") {
		path = "/api/" + o.APIVersion
	}
	switch o.Kind {
	case "Namespace", "Node", "ClusterRole", "ClusterRoleBinding":
	default:
		namespace := o.Metadata.Namespace
		if namespace == "" {
			namespace = "default"
		}
		path += "/namespaces/" + namespace
	}
	return path + "/" + strings.ToLower(o.Kind) + "s/" + o.Metadata.Name, nil
}
