package manager

import (
	"crypto/ed25519"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/json"
	"encoding/pem"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"

	authorizationv1 "k8s.io/api/authorization/v1"
	certificatesv1 "k8s.io/api/certificates/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	clienttesting "k8s.io/client-go/testing"

	"kubevpn/internal/api"
	"kubevpn/internal/incluster/manager/managertest"
)

// reviews answers SubjectAccessReviews: developers may forward ports of pods in shop.
type reviews struct {
	mu    sync.Mutex
	asked []authorizationv1.SubjectAccessReviewSpec
	fails string // evaluation error
}

func (r *reviews) answer(action clienttesting.Action) (bool, runtime.Object, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	review := action.(clienttesting.CreateAction).GetObject().(*authorizationv1.SubjectAccessReview).DeepCopy()
	r.asked = append(r.asked, review.Spec)
	a := review.Spec.ResourceAttributes
	review.Status.Allowed = r.fails == "" && slices.Contains(review.Spec.Groups, "developers") && a.Namespace == "shop" &&
		a.Verb == "create" && a.Resource == "pods" && a.Subresource == "portforward" && a.Group == ""
	review.Status.EvaluationError = r.fails
	return true, review, nil
}

// requestOf returns what the API server stores of a request that ann created.
func requestOf(t *testing.T, name, nonce, namespace string) *certificatesv1.CertificateSigningRequest {
	t.Helper()
	_, key, err := ed25519.GenerateKey(nil)
	if err != nil {
		t.Fatal(err)
	}
	der, err := x509.CreateCertificateRequest(nil, &x509.CertificateRequest{Subject: pkix.Name{CommonName: nonce,
		OrganizationalUnit: []string{namespace}}}, key)
	if err != nil {
		t.Fatal(err)
	}
	return &certificatesv1.CertificateSigningRequest{ObjectMeta: metav1.ObjectMeta{Name: name},
		Spec: certificatesv1.CertificateSigningRequestSpec{SignerName: api.IdentitySigner,
			Request:  pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE REQUEST", Bytes: der}),
			Username: "ann", UID: "u-1", Groups: []string{"developers"},
			Extra: map[string]certificatesv1.ExtraValue{"scopes": {"a"}}}}
}

func authorizing(t *testing.T, r *reviews, cfg Config, objects ...runtime.Object) (*running, *managertest.FakeAPI) {
	kube := managertest.NewFakeAPI(nil, objects...)
	kube.PrependReactor("create", "subjectaccessreviews", r.answer)
	cfg.Kube, cfg.Authorize, cfg.Namespace = kube, true, "kubevpn"
	m := start(t, cfg)
	<-m.watch.Ready
	return m, kube
}

// identifying is a hello of a laptop that can tell who uses it.
var identifying = api.ClientHello{Protocol: api.Protocol, Client: "laptop", Identifies: true}

func TestUsersReachPodsWhosePortsTheyMayForward(t *testing.T) {
	web, db := managertest.ServeAt(t, "127.0.0.2"), managertest.ServeAt(t, "127.0.0.3")
	var r reviews
	m, kube := authorizing(t, &r, Config{}, slices.Concat(
		[]runtime.Object{managertest.PodAt("shop", "web", "127.0.0.2", false), managertest.PodAt("pay", "db", "127.0.0.3", false)},
		managertest.ServiceOf("shop", "web", "10.96.0.20", web, "web=127.0.0.2"),
		managertest.ServiceOf("pay", "db", "10.96.0.30", db, "db=127.0.0.3"),
		managertest.ServiceOf("shop", "stolen", "10.96.0.32", db, "web=127.0.0.3"),
		managertest.ServiceOf("shop", "bare", "10.96.0.33", db, "=127.0.0.3"))...)
	c := managertest.Hello(t, m.laptop, identifying)
	challenge := c.Next().Challenge
	if challenge == nil || len(challenge.Nonce) < 20 {
		t.Fatalf("the challenge is %+v", challenge)
	}
	csr := requestOf(t, "kubevpn-1", challenge.Nonce, "kubevpn")
	if _, err := kube.CertificatesV1().CertificateSigningRequests().Create(t.Context(), csr, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	json.NewEncoder(c.Stream).Encode(api.Identity{Request: csr.Name})
	if state := c.Next().Hello.State; !state.Limited || !state.Authorized || !state.GVisorOnly || len(state.Namespaces) > 0 {
		t.Errorf("the state is %+v", state)
	}
	for dst, want := range map[string]bool{
		"10.96.0.20:80": true, fmt.Sprintf("127.0.0.2:%d", web): true,
		"10.96.0.30:80": false, fmt.Sprintf("127.0.0.3:%d", db): false, "10.96.0.32:80": false, "10.96.0.33:80": false,
		fmt.Sprintf("127.0.0.9:%d", web): false,
	} {
		for range 3 {
			st, err := m.open(t, dst)
			if want != (err == nil) || err != nil && !errors.Is(err, syscall.EACCES) {
				t.Fatalf("%s: got %v", dst, err)
			}
			if err == nil && managertest.ReadAll(t, st) != "127.0.0.2" {
				t.Errorf("%s: another pod has answered", dst)
			}
		}
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	if len(r.asked) != 2 {
		t.Errorf("asked %d times about two pods", len(r.asked))
	}
	for _, a := range r.asked {
		if a.User != "ann" || a.UID != "u-1" || !slices.Equal(a.Extra["scopes"], []string{"a"}) || a.ResourceAttributes.Name == "" {
			t.Errorf("asked %+v", a)
		}
	}
}

func TestIdentityOfALaptopIsVerified(t *testing.T) {
	for _, tt := range []struct {
		about  string
		change func(csr *certificatesv1.CertificateSigningRequest, nonce string)
		says   string // instead of the name
		want   string
	}{
		{about: "good"},
		{"of another session", func(csr *certificatesv1.CertificateSigningRequest, _ string) {
			*csr = *requestOf(t, csr.Name, "another", "kubevpn")
		}, "", "does not identify you: its subject"},
		{"for another manager", func(csr *certificatesv1.CertificateSigningRequest, nonce string) {
			*csr = *requestOf(t, csr.Name, nonce, "evil")
		}, "", "its subject"},
		{"for another signer", func(csr *certificatesv1.CertificateSigningRequest, _ string) {
			csr.Spec.SignerName = certificatesv1.KubeAPIServerClientSignerName
		}, "", "for the signer"},
		{"not PEM", func(csr *certificatesv1.CertificateSigningRequest, _ string) { csr.Spec.Request = []byte("x") }, "", "not in PEM"},
		{"not DER", func(csr *certificatesv1.CertificateSigningRequest, _ string) {
			csr.Spec.Request = pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE REQUEST", Bytes: []byte("x")})
		}, "", "asn1"},
		{"missing", nil, "kubevpn-2", "not found"},
		{"a path", nil, "../nodes", "not the name of a CertificateSigningRequest"},
	} {
		t.Run(tt.about, func(t *testing.T) {
			m, kube := authorizing(t, new(reviews), Config{})
			c := managertest.Hello(t, m.laptop, identifying)
			nonce := c.Next().Challenge.Nonce
			csr := requestOf(t, "kubevpn-1", nonce, "kubevpn")
			if tt.change != nil {
				tt.change(csr, nonce)
			}
			if _, err := kube.CertificatesV1().CertificateSigningRequests().Create(t.Context(), csr, metav1.CreateOptions{}); err != nil {
				t.Fatal(err)
			}
			if tt.says == "" {
				tt.says = csr.Name
			}
			json.NewEncoder(c.Stream).Encode(api.Identity{Request: tt.says})
			answer := c.Next()
			switch {
			case tt.want == "" && answer.Hello == nil:
				t.Errorf("rejected: %v", answer.Error)
			case tt.want != "" && (answer.Error == nil || !strings.Contains(answer.Error.Message, tt.want)):
				t.Errorf("got %+v, want an error with %q", answer, tt.want)
			}
		})
	}
}

// Sessions without a user reach nothing but cluster DNS: those of a kubevpn that cannot tell, and those that only look.
func TestUnknownUsersReachNothing(t *testing.T) {
	web := managertest.ServeAt(t, "127.0.0.2")
	objects := append(managertest.ServiceOf("shop", "web", "10.96.0.20", web, "web=127.0.0.2"), managertest.PodAt("shop", "web", "127.0.0.2", false))
	m, _ := authorizing(t, new(reviews), Config{}, objects...)
	if answer := managertest.Hello(t, m.laptop, api.ClientHello{Protocol: api.Protocol, Client: "old", Version: "0.1.0"}).Next(); answer.Error == nil ||
		answer.Error.Code != api.ExitIncompatible || !strings.Contains(answer.Error.Hint, "newer kubevpn") {
		t.Errorf("got %+v", answer)
	}
	m, _ = authorizing(t, new(reviews), Config{}, objects...)
	if answer := managertest.Hello(t, m.laptop, api.ClientHello{Protocol: api.Protocol}).Next(); answer.Hello == nil {
		t.Fatalf("got %+v", answer)
	}
	if _, err := m.open(t, "10.96.0.20:80"); !errors.Is(err, syscall.EACCES) {
		t.Errorf("got %v", err)
	}
}
