package clone

import (
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"testing"

	"kubevpn/internal/api"
)

// seen are the requests that reached a server.
type seen struct {
	mu     sync.Mutex
	paths  []string
	secret []string // those that had credentials
}

func (s *seen) add(r *http.Request) {
	s.mu.Lock()
	defer s.mu.Unlock()
	at := r.Method + " " + r.URL.Path
	s.paths = append(s.paths, at)
	if body := r.FormValue("refresh_token"); r.Header.Get("Authorization") != "" || body != "" {
		s.secret = append(s.secret, at)
	}
}

// plain is a server without TLS, which a neighbour on the network can read.
func plain(t *testing.T, h http.Handler) (*seen, string) {
	t.Helper()
	s := new(seen)
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		s.add(r)
		h.ServeHTTP(w, r)
	}))
	t.Cleanup(server.Close)
	return s, strings.TrimPrefix(server.URL, "http://")
}

func wantsPassword(w http.ResponseWriter, _ *http.Request) {
	w.Header().Set("WWW-Authenticate", `Basic realm="here"`)
	w.WriteHeader(http.StatusUnauthorized)
}

// askRegistry asks what an image runs, with a pull secret for the host of the image.
func askRegistry(t *testing.T, image string, client *http.Client, insecure ...string) ([]string, error) {
	t.Helper()
	t.Setenv("DOCKER_CONFIG", t.TempDir())
	host, _, _ := strings.Cut(image, "/")
	w := newWorld(pullSecret("pull", host, "secret"))
	if client != nil {
		w.registry = client.Transport
	}
	spec := &w.workload.Template.Spec
	spec.ImagePullSecrets = append(spec.ImagePullSecrets, localRef("pull"))
	spec.Containers[0].Image, spec.Containers[0].Command = image, nil
	pod, err := w.supervised(t, api.CloneSpec{Restart: true, InsecureRegistries: insecure})
	if err != nil {
		return nil, err
	}
	return pod.Containers[0].Args, nil
}

func TestRegistryIsNotAskedByHTTP(t *testing.T) {
	s, host := plain(t, http.HandlerFunc(wantsPassword))
	_, err := askRegistry(t, host+"/team/web:1", nil)
	if e := api.AsError(err); e == nil || e.Code != api.ExitImagePull || !strings.Contains(e.Hint, "--insecure-registry "+host) {
		t.Errorf("%+v, want an error that names --insecure-registry %s", api.AsError(err), host)
	}
	if len(s.paths) > 0 {
		t.Errorf("it was asked %q, with credentials %q", s.paths, s.secret)
	}
}

func TestInsecureRegistryGetsNoCredentials(t *testing.T) {
	t.Run("and is asked without", func(t *testing.T) {
		s, host := plain(t, http.HandlerFunc(wantsPassword))
		if _, err := askRegistry(t, host+"/team/web:1", nil, host); err == nil || !strings.Contains(err.Error(), "401") {
			t.Errorf("%v, want 401", err)
		}
		if len(s.paths) == 0 || len(s.secret) > 0 {
			t.Errorf("it was asked %q, with credentials %q", s.paths, s.secret)
		}
	})
	t.Run("and answers", func(t *testing.T) {
		images, _ := registryOf(t, false)
		s, host := plain(t, images)
		push(t, host+"/team/web:1", nil)
		args, err := askRegistry(t, host+"/team/web:1", nil, host)
		if err != nil || !strings.Contains(strings.Join(args, " "), "/entry") {
			t.Errorf("%q, %v", args, err)
		}
		if len(s.secret) > 0 {
			t.Errorf("it got credentials: %q", s.secret)
		}
	})
	t.Run("nor does its realm", func(t *testing.T) {
		realm, at := plain(t, http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { http.Error(w, `{"token":"x"}`, http.StatusOK) }))
		_, host := plain(t, http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
			w.Header().Set("WWW-Authenticate", `Bearer realm="http://`+at+`/token",service="here"`)
			w.WriteHeader(http.StatusUnauthorized)
		}))
		if _, err := askRegistry(t, host+"/team/web:1", nil, host, at); err == nil {
			t.Error("there is no error")
		}
		if len(realm.secret) > 0 {
			t.Errorf("the realm got credentials: %q", realm.secret)
		}
	})
}

func TestRegistryCannotRedirectToHTTP(t *testing.T) {
	for _, tt := range []struct {
		name   string
		answer func(w http.ResponseWriter, r *http.Request, elsewhere string)
	}{
		{"by a redirect", func(w http.ResponseWriter, r *http.Request, elsewhere string) {
			http.Redirect(w, r, "http://"+elsewhere+r.URL.Path, http.StatusTemporaryRedirect)
		}},
		{"by a redirect of the manifest", func(w http.ResponseWriter, r *http.Request, elsewhere string) {
			if _, password, _ := r.BasicAuth(); password == "" {
				wantsPassword(w, r)
				return
			}
			http.Redirect(w, r, "http://"+elsewhere+r.URL.Path, http.StatusTemporaryRedirect)
		}},
		{"by the realm", func(w http.ResponseWriter, _ *http.Request, elsewhere string) {
			w.Header().Set("WWW-Authenticate", `Bearer realm="http://`+elsewhere+`/token",service="here"`)
			w.WriteHeader(http.StatusUnauthorized)
		}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			s, elsewhere := plain(t, http.HandlerFunc(wantsPassword))
			server := httptest.NewTLSServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) { tt.answer(w, r, elsewhere) }))
			t.Cleanup(server.Close)
			if _, err := askRegistry(t, strings.TrimPrefix(server.URL, "https://")+"/team/web:1", server.Client()); err == nil {
				t.Error("there is no error")
			}
			if len(s.paths) > 0 {
				t.Errorf("what has no TLS was asked %q, with credentials %q", s.paths, s.secret)
			}
		})
	}
}
