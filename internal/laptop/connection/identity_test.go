package connection

import (
	"crypto/x509"
	"encoding/pem"
	"errors"
	"fmt"
	"io"
	"strings"
	"testing"

	certificatesv1 "k8s.io/api/certificates/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/kubernetes/fake"
	k8stesting "k8s.io/client-go/testing"

	"kubevpn/internal/api"
)

func TestIdentifyAnswersTheChallengeForOneManager(t *testing.T) {
	kube := fake.NewClientset()
	var csr *certificatesv1.CertificateSigningRequest
	kube.PrependReactor("create", "certificatesigningrequests", func(a k8stesting.Action) (bool, runtime.Object, error) {
		csr = a.(k8stesting.CreateAction).GetObject().(*certificatesv1.CertificateSigningRequest).DeepCopy()
		csr.Name = csr.GenerateName + "x"
		return true, csr, nil
	})
	name, err := identify(t.Context(), kube, "tools", "N")
	if err != nil || name != "kubevpn-x" {
		t.Fatalf("got %q, %v", name, err)
	}
	block, _ := pem.Decode(csr.Spec.Request)
	request, err := x509.ParseCertificateRequest(block.Bytes)
	if err != nil {
		t.Fatal(err)
	}
	if err := request.CheckSignature(); err != nil {
		t.Error(err)
	}
	if request.Subject.String() != "CN=N,OU=tools" || csr.Spec.SignerName != api.IdentitySigner || len(csr.Spec.Usages) == 0 {
		t.Errorf("the subject is %v, the signer %s", request.Subject, csr.Spec.SignerName)
	}
}

// Without the right the connection fails for good; if the API server is away, the laptop tries again.
func TestIdentifySaysWhatIsMissing(t *testing.T) {
	for fails, refused := range map[error]bool{
		apierrors.NewForbidden(certificatesv1.Resource("certificatesigningrequests"), "", errors.New("no")): true,
		errors.New("connection refused"): false,
	} {
		kube := fake.NewClientset()
		kube.PrependReactor("create", "*", func(k8stesting.Action) (bool, runtime.Object, error) { return true, nil, fails })
		_, err := identify(t.Context(), kube, "tools", "N")
		var e *api.Error
		if is := errors.As(err, &e); is != refused || is && (e.Code != api.ExitPermission || !strings.Contains(e.Hint, "access.users")) {
			t.Errorf("got %#v", err)
		}
	}
}

// said keeps what the laptop writes.
type said struct {
	io.Reader
	strings.Builder
}

func TestControlAnswersAChallengeThatItExpects(t *testing.T) {
	hello := fmt.Sprintf("{\"hello\":{\"protocol\":%d}}\n", api.Protocol)
	challenge := `{"challenge":{"nonce":"N"}}` + "\n"
	once := func(nonce string) (string, error) { return "csr-" + nonce, nil }
	to := &said{Reader: strings.NewReader(challenge + hello)}
	if _, _, err := startControl(to, api.ClientHello{Protocol: api.Protocol}, once); err != nil {
		t.Fatal(err)
	}
	if got := to.String(); !strings.Contains(got, `"identifies":true`) || !strings.HasSuffix(got, `{"certificateSigningRequest":"csr-N"}`+"\n") {
		t.Errorf("said %s", got)
	}
	for manager, identify := range map[string]func(string) (string, error){
		challenge + hello:             nil,
		challenge + challenge + hello: once,
	} {
		if _, _, err := startControl(&said{Reader: strings.NewReader(manager)}, api.ClientHello{Protocol: api.Protocol}, identify); err == nil {
			t.Errorf("%s: no error", manager)
		}
	}
}
