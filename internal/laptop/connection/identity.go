package connection

import (
	"context"
	"crypto/ed25519"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"fmt"

	certificatesv1 "k8s.io/api/certificates/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"

	"kubevpn/internal/api"
)

// identify answers a challenge of the traffic manager in the namespace (api.Challenge). It returns the name of a
// CertificateSigningRequest, which the cluster deletes after a day.
func identify(ctx context.Context, kube kubernetes.Interface, namespace, nonce string) (string, error) {
	_, key, err := ed25519.GenerateKey(nil)
	if err != nil {
		return "", err
	}
	request, err := x509.CreateCertificateRequest(nil, &x509.CertificateRequest{Subject: pkix.Name{CommonName: nonce,
		OrganizationalUnit: []string{namespace}}}, key)
	if err != nil {
		return "", fmt.Errorf("answering the traffic manager's challenge: %w", err)
	}
	csr, err := kube.CertificatesV1().CertificateSigningRequests().Create(ctx,
		&certificatesv1.CertificateSigningRequest{
			ObjectMeta: metav1.ObjectMeta{GenerateName: "kubevpn-"},
			Spec: certificatesv1.CertificateSigningRequestSpec{SignerName: api.IdentitySigner,
				Request: pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE REQUEST", Bytes: request}),
				Usages:  []certificatesv1.KeyUsage{certificatesv1.UsageClientAuth}},
		}, metav1.CreateOptions{})
	switch {
	case apierrors.IsForbidden(err): // for good
		return "", api.Errorf(api.ExitPermission,
			"the traffic manager asks who you are, and you may not create CertificateSigningRequests to tell it: %w",
			err).
			WithHint("ask an admin to add you to the chart's `access.users` or `access.groups`")
	case err != nil:
		return "", fmt.Errorf("telling the traffic manager who uses this laptop: %w", err)
	}
	return csr.Name, nil
}
