//go:build linux || darwin

package platform

import (
	"bufio"
	"encoding/json"
	"encoding/pem"
	"fmt"
	"io"
	"log"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"testing"

	authorizationv1 "k8s.io/api/authorization/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/version"
	"k8s.io/client-go/kubernetes/scheme"
	clienttesting "k8s.io/client-go/testing"
	"k8s.io/streaming/pkg/httpstream"
	"k8s.io/streaming/pkg/httpstream/spdy"
)

// kinds maps the resources that kubevpn reads to their kinds.
var kinds = map[string]string{
	"configmaps": "ConfigMap", "daemonsets": "DaemonSet", "deployments": "Deployment", "endpointslices": "EndpointSlice", "namespaces": "Namespace",
	"nodes": "Node", "pods": "Pod", "replicasets": "ReplicaSet", "servicecidrs": "ServiceCIDR", "services": "Service",
	"ipaddresses": "IPAddress", "serviceaccounts": "ServiceAccount", "roles": "Role", "clusterroles": "ClusterRole",
	"clusterrolebindings": "ClusterRoleBinding",
}

// apiServer serves the objects of a fake clientset over HTTPS, to a laptop that may do everything. It port-forwards
// into one pod: to the traffic manager in this process.
type apiServer struct {
	*httptest.Server
	tracker clienttesting.ObjectTracker
	manager string // address of its sessions
	logf    func(format string, args ...any)
}

func newAPIServer(t *testing.T, tracker clienttesting.ObjectTracker, manager string) *apiServer {
	t.Helper()
	s := &apiServer{tracker: tracker, manager: manager, logf: t.Logf}
	s.Server = httptest.NewUnstartedServer(http.HandlerFunc(s.serve))
	s.Config.ErrorLog = log.New(io.Discard, "", 0) // clients close connections that they opened in advance
	s.StartTLS()
	t.Cleanup(func() {
		s.CloseClientConnections()
		s.Close()
	})
	return s
}

// kubeconfig writes a kubeconfig for the server and returns its path.
func (s *apiServer) kubeconfig(t *testing.T, dir string) string {
	t.Helper()
	text, err := json.Marshal(map[string]any{
		"apiVersion": "v1", "kind": "Config", "current-context": "c",
		"contexts": []any{map[string]any{"name": "c", "context": map[string]any{"cluster": "c", "user": "u"}}},
		"users":    []any{map[string]any{"name": "u", "user": map[string]any{"token": "laptop"}}},
		"clusters": []any{map[string]any{"name": "c", "cluster": map[string]any{
			"server":                     s.URL,
			"certificate-authority-data": pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: s.Certificate().Raw}),
		}}},
	})
	if err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(dir, "kubeconfig")
	if err := os.WriteFile(path, text, 0o600); err != nil {
		t.Fatal(err)
	}
	return path
}

// target contains what the path of a request names.
type target struct {
	schema.GroupVersionResource
	namespace, name, subresource string
}

// parse returns the target of /api/V/... or /apis/G/V/...
func parse(path string) (target, bool) {
	parts := strings.Split(strings.Trim(path, "/"), "/")
	var at target
	switch {
	case len(parts) >= 3 && parts[0] == "api":
		at.Version, parts = parts[1], parts[2:]
	case len(parts) >= 4 && parts[0] == "apis":
		at.Group, at.Version, parts = parts[1], parts[2], parts[3:]
	default:
		return target{}, false
	}
	if parts[0] == "namespaces" && len(parts) > 2 {
		at.namespace, parts = parts[1], parts[2:]
	}
	parts = append(parts, "", "")
	at.Resource, at.name, at.subresource = parts[0], parts[1], parts[2]
	return at, true
}

func (s *apiServer) serve(w http.ResponseWriter, r *http.Request) {
	if r.URL.Path == "/version" {
		answer(w, http.StatusOK, version.Info{Major: "1", Minor: "34", GitVersion: "v1.34.0"})
		return
	}
	at, ok := parse(r.URL.Path)
	switch {
	case ok && at.Resource == "selfsubjectaccessreviews":
		answer(w, http.StatusCreated, allowed())
	case ok && at.Resource == "pods" && at.subresource == "portforward":
		s.portForward(w, r)
	case ok && kinds[at.Resource] != "" && at.subresource == "" && r.Method == http.MethodGet:
		s.read(w, r, at)
	default:
		s.logf("API server: %s %s is not served", r.Method, r.URL.Path)
		refuse(w, http.StatusNotFound, metav1.StatusReasonNotFound)
	}
}

// allowed returns the answer to each question for a permission.
func allowed() *authorizationv1.SelfSubjectAccessReview {
	return &authorizationv1.SelfSubjectAccessReview{
		TypeMeta: metav1.TypeMeta{APIVersion: "authorization.k8s.io/v1", Kind: "SelfSubjectAccessReview"},
		Status:   authorizationv1.SubjectAccessReviewStatus{Allowed: true},
	}
}

func (s *apiServer) read(w http.ResponseWriter, r *http.Request, at target) {
	query := r.URL.Query()
	kind := schema.GroupVersionKind{Group: at.Group, Version: at.Version, Kind: kinds[at.Resource]}
	switch {
	case query.Get("sendInitialEvents") != "":
		refuse(w, http.StatusUnprocessableEntity, metav1.StatusReasonInvalid)
	case query.Get("watch") != "":
		s.watch(w, r, at, kind)
	case at.name != "":
		object, err := s.tracker.Get(at.GroupVersionResource, at.namespace, at.name)
		if err != nil {
			refuse(w, http.StatusNotFound, metav1.StatusReasonNotFound)
			return
		}
		answer(w, http.StatusOK, typed(object, kind))
	default:
		list, err := s.tracker.List(at.GroupVersionResource, kind, at.namespace)
		if err != nil {
			refuse(w, http.StatusInternalServerError, metav1.StatusReasonInternalError)
			return
		}
		items, err := meta.ExtractList(list)
		out := []runtime.Object{}
		for _, item := range items {
			if selected(item, query.Get("labelSelector"), query.Get("fieldSelector")) {
				out = append(out, typed(item, kind))
			}
		}
		if err != nil {
			refuse(w, http.StatusInternalServerError, metav1.StatusReasonInternalError)
			return
		}
		kind.Kind += "List"
		version, name := kind.ToAPIVersionAndKind()
		answer(w, http.StatusOK, map[string]any{"apiVersion": version, "kind": name, "metadata": map[string]any{"resourceVersion": "1"}, "items": out})
	}
}

// watch sends the changes until the client ends the request.
func (s *apiServer) watch(w http.ResponseWriter, r *http.Request, at target, kind schema.GroupVersionKind) {
	changes, err := s.tracker.Watch(at.GroupVersionResource, at.namespace)
	if err != nil {
		refuse(w, http.StatusInternalServerError, metav1.StatusReasonInternalError)
		return
	}
	defer changes.Stop()
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(http.StatusOK)
	flush := http.NewResponseController(w)
	_ = flush.Flush()
	for {
		select {
		case <-r.Context().Done():
			return
		case e := <-changes.ResultChan():
			_ = json.NewEncoder(w).Encode(map[string]any{"type": e.Type, "object": typed(e.Object, kind)})
			_ = flush.Flush()
		}
	}
}

// typed returns a copy of an object with its kind, which objects in Go lack.
func typed(object runtime.Object, kind schema.GroupVersionKind) runtime.Object {
	object = object.DeepCopyObject()
	object.GetObjectKind().SetGroupVersionKind(kind)
	return object
}

// selected reports whether selectors match an object. It knows the fields that kubevpn selects by.
func selected(object runtime.Object, byLabel, byField string) bool {
	o, err := meta.Accessor(object)
	if err != nil {
		return false
	}
	l, err := labels.Parse(byLabel)
	if err != nil || !l.Matches(labels.Set(o.GetLabels())) {
		return false
	}
	f, err := fields.ParseSelector(byField)
	return err == nil && f.Matches(fields.Set{"metadata.name": o.GetName(), "metadata.namespace": o.GetNamespace(), "status.phase": "Running"})
}

func answer(w http.ResponseWriter, code int, body any) {
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(code)
	_ = json.NewEncoder(w).Encode(body)
}

func refuse(w http.ResponseWriter, code int, reason metav1.StatusReason) {
	answer(w, code, metav1.Status{
		TypeMeta: metav1.TypeMeta{APIVersion: "v1", Kind: "Status"},
		Status:   metav1.StatusFailure, Reason: reason, Code: int32(code), Message: string(reason),
	})
}

// portForward connects each pair of streams to the manager, over SPDY: WebSocket is refused, and clients fall back.
func (s *apiServer) portForward(w http.ResponseWriter, r *http.Request) {
	if !strings.HasPrefix(r.Header.Get(httpstream.HeaderUpgrade), "SPDY/") {
		refuse(w, http.StatusBadRequest, metav1.StatusReasonBadRequest)
		return
	}
	if _, err := httpstream.Handshake(r, w, []string{"portforward.k8s.io"}); err != nil {
		s.logf("API server: port-forward: %v", err)
		return
	}
	streams := make(chan httpstream.Stream)
	ended := make(chan struct{})
	defer close(ended)
	conn := spdy.NewResponseUpgrader().UpgradeResponse(w, r, func(stream httpstream.Stream, _ <-chan struct{}) error {
		select {
		case streams <- stream:
			return nil
		case <-ended:
			return io.ErrClosedPipe
		}
	})
	if conn == nil {
		return
	}
	defer conn.Close()
	for {
		select {
		case stream := <-streams:
			if stream.Headers().Get("streamType") == "data" {
				go s.forward(stream)
			} else {
				stream.Close()
			}
		case <-conn.CloseChan():
			return
		}
	}
}

func (s *apiServer) forward(stream httpstream.Stream) {
	defer stream.Reset()
	conn, err := net.Dial("tcp", s.manager)
	if err != nil {
		s.logf("API server: %v", err)
		return
	}
	defer conn.Close()
	go func() {
		_, _ = io.Copy(conn, stream)
		conn.Close()
	}()
	_, _ = io.Copy(stream, bufio.NewReader(conn))
}

// decode returns the objects in a manifest.
func decode(manifest []byte) (out []runtime.Object, err error) {
	for text := range strings.SplitSeq(string(manifest), "\n---\n") {
		if strings.TrimSpace(text) == "" {
			continue
		}
		object, _, err := scheme.Codecs.UniversalDeserializer().Decode([]byte(text), nil, nil)
		if err != nil {
			return nil, fmt.Errorf("%w:\n%s", err, text)
		}
		out = append(out, object)
	}
	return out, nil
}
