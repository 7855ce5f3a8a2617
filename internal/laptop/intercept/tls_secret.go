package intercept

import (
	"context"
	"crypto/tls"
	"fmt"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"kubevpn/internal/api"
	"kubevpn/internal/kube/client"
)

// TLSTermination reads the certificate and key of a Secret with the user's own rights. Agents use them to match
// requests inside TLS.
func TLSTermination(ctx context.Context, c *client.Cluster, namespace, name string) (*api.TLSTermination, error) {
	secret, err := c.Kube().CoreV1().Secrets(namespace).Get(ctx, name, metav1.GetOptions{})
	if apierrors.IsNotFound(err) {
		return nil, api.Errorf(api.ExitWorkload, "secrets %q not found in namespace %q", name, namespace).
			WithHint("`kubectl -n %s get secrets --field-selector type=%s` lists the TLS Secrets", namespace,
				corev1.SecretTypeTLS)
	}
	if ctx.Err() != nil {
		return nil, ctx.Err()
	}
	if err != nil {
		return nil, c.Explain(fmt.Errorf("reading the Secret %s/%s: %w", namespace, name, err))
	}
	t := &api.TLSTermination{Certificate: secret.Data[corev1.TLSCertKey], Key: secret.Data[corev1.TLSPrivateKeyKey]}
	if err := checkPair(namespace+"/"+name, t); err != nil {
		return nil, err
	}
	return t, nil
}

// checkPair returns an error if a TLS server cannot use the certificate and key.
func checkPair(name string, t *api.TLSTermination) error {
	_, err := tls.X509KeyPair(t.Certificate, t.Key)
	if err == nil {
		return nil
	}
	if len(t.Certificate) == 0 || len(t.Key) == 0 {
		err = fmt.Errorf("it has no %s or no %s", corev1.TLSCertKey, corev1.TLSPrivateKeyKey)
	}
	return api.Errorf(api.ExitWorkload, "cannot serve TLS with the Secret %s: %w", name, err).
		WithHint("--tls-secret needs the Secret of type kubernetes.io/tls that the application uses")
}
