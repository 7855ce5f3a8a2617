package manager

import (
	"context"
	"crypto/rand"
	"crypto/x509"
	"encoding/json"
	"encoding/pem"
	"fmt"
	"io"
	"slices"
	"time"

	authorizationv1 "k8s.io/api/authorization/v1"
	certificatesv1 "k8s.io/api/certificates/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/validation"

	"kubevpn/internal/api"
	"kubevpn/pkg/wire/transport"
)

// identifyTime limits the laptop's answer to a Challenge. Its credential plugin may be slow.
const identifyTime = time.Minute

// user is a laptop's user, as the API server knows it.
type user struct {
	name       string
	mayForward *answers[podRef] // ports of the pod
}

// mayForward reports whether the laptop's user may forward ports of the pod. It may wait for the API server.
func (c caller) mayForward(pod podRef) bool {
	return c.user != nil && c.user.mayForward.get(podRef{namespace: pod.namespace, name: pod.name})
}

// authenticate finds out who uses the laptop (api.Challenge). An *api.Error ends the session for good.
//
//	laptop                              API server                          manager
//	  │◀──────────────────────────────────────────────────── Challenge: nonce ─│
//	  │─ create CertificateSigningRequest ─▶│ writes user and groups           │
//	  │─ Identity: its name ──────────────────────────────────────────────────▶│
//	  │                                     │◀── get CertificateSigningRequest ─│
//
// A session without an identity (ClientHello.Client) learns the state and reaches nothing, so it has no user.
func (s *session) authenticate(ctx context.Context, laptop *transport.Stream, hello *api.ClientHello) (who *user,
	err error) {
	if !s.manager.cfg.Authorize || hello.Client == "" {
		return nil, nil
	}
	if !hello.Identifies {
		return nil, api.Errorf(api.ExitIncompatible,
			"this traffic manager asks who uses a laptop, which kubevpn %s cannot answer", hello.Version).
			WithHint("install a newer kubevpn on this machine")
	}
	nonce := rand.Text()
	if err := json.NewEncoder(laptop).Encode(api.ControlMessage{Challenge: &api.Challenge{Nonce: nonce}}); err != nil {
		return nil, err
	}
	if err := laptop.SetReadDeadline(time.Now().Add(identifyTime)); err != nil {
		return nil, err
	}
	var identity api.Identity
	if err := json.NewDecoder(io.LimitReader(laptop, maxHello)).Decode(&identity); err != nil {
		return nil, fmt.Errorf("the laptop does not say who uses it: %w", err)
	}
	if len(validation.IsDNS1123Subdomain(identity.Request)) > 0 { // it would become a part of the request's path
		return nil, api.Errorf(api.ExitUsage, "%q is not the name of a CertificateSigningRequest", identity.Request)
	}
	ctx, cancel := context.WithTimeout(ctx, readTimeout)
	defer cancel()
	csr, err := s.manager.cfg.Kube.CertificatesV1().CertificateSigningRequests().Get(ctx, identity.Request,
		metav1.GetOptions{})
	switch {
	case apierrors.IsNotFound(err), apierrors.IsForbidden(err):
		return nil, api.Errorf(api.ExitPermission, "the traffic manager cannot find out who you are: %w", err)
	case err != nil:
		return nil, fmt.Errorf("reading who uses the laptop: %w", err)
	}
	if err := identifies(csr, nonce, s.manager.cfg.Namespace); err != nil {
		return nil, api.Errorf(api.ExitPermission, "the CertificateSigningRequest %s does not identify you: %w",
			csr.Name, err)
	}
	return s.manager.newUser(&csr.Spec), laptop.SetReadDeadline(time.Time{})
}

// identifies returns an error unless the request answers the manager's challenge.
func identifies(csr *certificatesv1.CertificateSigningRequest, nonce, namespace string) error {
	if csr.Spec.SignerName != api.IdentitySigner {
		return fmt.Errorf("it is for the signer %q", csr.Spec.SignerName)
	}
	block, _ := pem.Decode(csr.Spec.Request)
	if block == nil {
		return fmt.Errorf("its request is not in PEM")
	}
	request, err := x509.ParseCertificateRequest(block.Bytes)
	if err != nil {
		return err
	}
	if request.Subject.CommonName != nonce || !slices.Equal(request.Subject.OrganizationalUnit, []string{namespace}) {
		return fmt.Errorf("its subject is %q", request.Subject)
	}
	return nil
}

// newUser returns the user that the API server wrote into a CertificateSigningRequest.
func (m *Manager) newUser(csr *certificatesv1.CertificateSigningRequestSpec) *user {
	extra := make(map[string]authorizationv1.ExtraValue, len(csr.Extra))
	for key, values := range csr.Extra {
		extra[key] = authorizationv1.ExtraValue(values)
	}
	ask := func(ctx context.Context, pod podRef) (bool, error) {
		spec := authorizationv1.SubjectAccessReviewSpec{
			User: csr.Username, UID: csr.UID, Groups: csr.Groups, Extra: extra,
			ResourceAttributes: &authorizationv1.ResourceAttributes{Namespace: pod.namespace, Verb: "create",
				Version: "v1", Resource: "pods", Subresource: "portforward", Name: pod.name},
		}
		review, err := m.cfg.Kube.AuthorizationV1().SubjectAccessReviews().Create(ctx,
			&authorizationv1.SubjectAccessReview{Spec: spec}, metav1.CreateOptions{})
		switch {
		case err != nil:
			return false, err
		case !review.Status.Allowed && review.Status.EvaluationError != "": // who did not answer could allow it
			return false, fmt.Errorf("asking whether %q may forward ports: %s", csr.Username,
				review.Status.EvaluationError)
		}
		return review.Status.Allowed, nil
	}
	return &user{csr.Username, newAnswers(ask, m.log)}
}
