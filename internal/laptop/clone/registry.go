package clone

import (
	"context"
	"fmt"
	"net/http"
	"slices"

	"github.com/google/go-containerregistry/pkg/authn"
	"github.com/google/go-containerregistry/pkg/name"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/remote"
)

// imageConfig reads the configuration of an image from its registry, with the credentials of keys.
func (c *Clone) imageConfig(ctx context.Context, image name.Reference, keys authn.Keychain) (*v1.ConfigFile, error) {
	guarded := &onlyTLS{inner: c.registry, insecure: c.cfg.Spec.InsecureRegistries}
	found, err := remote.Image(image, remote.WithContext(ctx), remote.WithTransport(guarded),
		remote.WithAuthFromKeychain(authn.NewMultiKeychain(keys, authn.DefaultKeychain)))
	if err != nil {
		return nil, err
	}
	return found.ConfigFile()
}

// onlyTLS rejects requests without TLS, except to insecure hosts, for which it removes the credentials. It sees every
// request: to registries, redirects and token servers. The library itself also tries HTTP if the name of a registry
// looks private.
type onlyTLS struct {
	inner    http.RoundTripper
	insecure []string // HOST or HOST:PORT
}

func (t *onlyTLS) RoundTrip(r *http.Request) (*http.Response, error) {
	if r.URL.Scheme == "https" {
		return t.inner.RoundTrip(r)
	}
	if r.Body != nil {
		defer r.Body.Close()
	}
	if !slices.Contains(t.insecure, r.URL.Host) {
		return nil, fmt.Errorf("%s does not use TLS, which is required", r.URL.Host)
	}
	if r.Method != http.MethodGet && r.Method != http.MethodHead { // a token is exchanged in the body
		return nil, fmt.Errorf("refusing to send credentials to %s without TLS", r.URL.Host)
	}
	bare := r.Clone(r.Context())
	bare.Header.Del("Authorization")
	bare.Header.Del("Cookie")
	bare.Body = nil
	return t.inner.RoundTrip(bare)
}
