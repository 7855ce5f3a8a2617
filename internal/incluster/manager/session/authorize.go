package session

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
	"kubevpn/internal/incluster/access"
	"kubevpn/pkg/wire/transport"
)

const (
	identifyTime  = time.Minute      // for the laptop's answer to a Challenge; its credential plugin may be slow
	reviewTimeout = 10 * time.Second // for the API server's answer
)

// authenticate finds out who uses the laptop (api.Challenge). An *api.Error ends the session for good.
//
//	laptop                              API server                          manager
//	  │◀──────────────────────────────────────────────────── Challenge: nonce ─│
//	  │─ create CertificateSigningRequest ─▶│ writes user and groups           │
//	  │─ Identity: its name ──────────────────────────────────────────────────▶│
//	  │                                     │◀── get CertificateSigningRequest ─│
//
// A session without an identity (ClientHello.Client) learns the state and reaches nothing, so it has no user.
func (s *session) authenticate(ctx context.Context, laptop *transport.Stream, hello *api.ClientHello) (who *access.User,
	err error) {
	if !s.server.cfg.Authorize || hello.Client == "" {
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
	ctx, cancel := context.WithTimeout(ctx, reviewTimeout)
	defer cancel()
	csr, err := s.server.cfg.Kube.CertificatesV1().CertificateSigningRequests().Get(ctx, identity.Request,
		metav1.GetOptions{})
	switch {
	case apierrors.IsNotFound(err), apierrors.IsForbidden(err):
		return nil, api.Errorf(api.ExitPermission, "the traffic manager cannot find out who you are: %w", err)
	case err != nil:
		return nil, fmt.Errorf("reading who uses the laptop: %w", err)
	}
	if err := identifies(csr, nonce, s.server.cfg.Watch.Self.Namespace); err != nil {
		return nil, api.Errorf(api.ExitPermission, "the CertificateSigningRequest %s does not identify you: %w",
			csr.Name, err)
	}
	return access.NewUser(csr.Spec.Username, s.server.mayForward(&csr.Spec), s.log), laptop.SetReadDeadline(time.Time{})
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

// mayForward returns a function that asks whether the user whom the API server wrote into a CertificateSigningRequest
// may forward ports of a pod.
func (s *Server) mayForward(csr *certificatesv1.CertificateSigningRequestSpec) func(context.Context,
	access.PodRef) (bool, error) {
	extra := make(map[string]authorizationv1.ExtraValue, len(csr.Extra))
	for key, values := range csr.Extra {
		extra[key] = authorizationv1.ExtraValue(values)
	}
	return func(ctx context.Context, pod access.PodRef) (bool, error) {
		spec := authorizationv1.SubjectAccessReviewSpec{
			User: csr.Username, UID: csr.UID, Groups: csr.Groups, Extra: extra,
			ResourceAttributes: &authorizationv1.ResourceAttributes{Namespace: pod.Namespace, Verb: "create",
				Version: "v1", Resource: "pods", Subresource: "portforward", Name: pod.Name},
		}
		review, err := s.cfg.Kube.AuthorizationV1().SubjectAccessReviews().Create(ctx,
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
}
