//go:build e2e && linux

package e2e

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"log"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-containerregistry/pkg/authn"
	"github.com/google/go-containerregistry/pkg/name"
	"github.com/google/go-containerregistry/pkg/registry"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/google/go-containerregistry/pkg/v1/remote"
	"github.com/google/go-containerregistry/pkg/v1/tarball"

	"kubevpn/internal/api"
	"kubevpn/internal/testenv"
	"kubevpn/test/lab"
)

// privateRegistry is a registry outside of the cluster that the nodes and the laptop reach, without TLS. Each request
// needs the name and the password of one of its users.
type privateRegistry struct {
	*world
	host      string            // HOST:PORT
	passwords map[string]string // by user

	mu     sync.Mutex
	pulled []string // "USER REPOSITORY", for each request for a manifest
}

// registry starts a registry for the users with these passwords. It serves until the test ends.
func (w *world) registry(t *testing.T, passwords map[string]string) *privateRegistry {
	t.Helper()
	address := w.Config().Registry().String()
	listener, err := w.Listen("router", "tcp", address)
	if err != nil {
		t.Fatal(err)
	}
	r := &privateRegistry{world: w, host: address, passwords: passwords}
	all := registryHandler()
	serveHTTP(t, listener, http.HandlerFunc(func(rw http.ResponseWriter, req *http.Request) {
		user, password, _ := req.BasicAuth()
		if want, ok := passwords[user]; !ok || password != want {
			rw.Header().Set("WWW-Authenticate", `Basic realm="lab"`)
			http.Error(rw, "unauthorized", http.StatusUnauthorized)
			return
		}
		r.note(user, req)
		all.ServeHTTP(rw, req)
	}))
	return r
}

func (r *privateRegistry) note(user string, req *http.Request) {
	repository, _, manifest := strings.Cut(strings.TrimPrefix(req.URL.Path, "/v2/"), "/manifests/")
	if manifest && (req.Method == http.MethodGet || req.Method == http.MethodHead) {
		r.mu.Lock()
		defer r.mu.Unlock()
		r.pulled = append(r.pulled, user+" "+repository)
	}
}

// wantPull fails the test unless a client has requested an image of the repository as the user.
func (r *privateRegistry) wantPull(t *testing.T, user, repository string) {
	t.Helper()
	r.mu.Lock()
	defer r.mu.Unlock()
	if !slices.Contains(r.pulled, user+" "+repository) {
		t.Errorf("no request for %s as %s: %q", repository, user, r.pulled)
	}
}

// push pushes the image of an archive from the laptop's network, and returns its name with the digest. It adds a random
// label, so that no node has the image, even of an earlier run.
func (r *privateRegistry) push(t *testing.T, user, file, repository string) string {
	t.Helper()
	img, err := tarball.ImageFromPath(file, nil)
	if err != nil {
		t.Fatal(err)
	}
	config, err := img.ConfigFile()
	if err != nil {
		t.Fatal(err)
	}
	config = config.DeepCopy()
	config.Config.Labels = map[string]string{"run": rand.Text()}
	if img, err = mutate.ConfigFile(img, config); err != nil {
		t.Fatal(err)
	}
	tag, err := name.NewTag(r.host+"/"+repository+":1", name.Insecure)
	if err != nil {
		t.Fatal(err)
	}
	transport := &http.Transport{DialContext: func(ctx context.Context, network, address string) (net.Conn, error) {
		return r.Dial(ctx, "laptop", network, address)
	}}
	defer transport.CloseIdleConnections()
	err = remote.Write(tag, img, remote.WithContext(t.Context()), remote.WithTransport(transport),
		remote.WithAuth(&authn.Basic{Username: user, Password: r.passwords[user]}))
	if err != nil {
		t.Fatal(err)
	}
	digest, err := img.Digest()
	if err != nil {
		t.Fatal(err)
	}
	return tag.Context().Digest(digest.String()).String()
}

// registryHandler returns a registry without content that logs nothing.
func registryHandler() http.Handler { return registry.New(registry.Logger(log.New(io.Discard, "", 0))) }

// serveHTTP serves until the test ends or the returned function is called.
func serveHTTP(t *testing.T, listener net.Listener, handler http.Handler) (end func()) {
	t.Helper()
	server := &http.Server{Handler: handler}
	served := make(chan struct{})
	go func() {
		defer close(served)
		_ = server.Serve(listener) // until it is closed
	}()
	end = sync.OnceFunc(func() { server.Close(); <-served })
	t.Cleanup(end)
	return end
}

// privateWorkloads are the Deployment of docs/how-to/private-registry.md, whose image the nodes have, and a workload
// with a pod on each node that pulls its own image.
const privateWorkloads = `
apiVersion: apps/v1
kind: Deployment
metadata: {name: web, namespace: shop}
spec:
  selector: {matchLabels: {app: web}}
  template:
    metadata: {labels: {app: web}}
    spec:
      terminationGracePeriodSeconds: 1` + container + `
---
apiVersion: apps/v1
kind: DaemonSet
metadata: {name: paid, namespace: shop}
spec:
  selector: {matchLabels: {app: paid}}
  template:
    metadata: {labels: {app: paid}}
    spec:
      imagePullSecrets: [{name: own}]
      terminationGracePeriodSeconds: 1
      containers:
      - name: app
        image: PAID_IMAGE
        ports: [{containerPort: 8080, name: web}]
        readinessProbe: {httpGet: {path: /, port: web}, periodSeconds: 1}
`

// registrySuite runs the commands of docs/how-to/private-registry.md: the traffic manager and its agents are pulled
// from a registry that requires credentials, each with the secrets of its own pods.
func registrySuite(t *testing.T, w *world) {
	admin := w.newUser(t, lab.Admin)
	if out := w.installed(t); out != "" {
		admin.must(t, "kubevpn", "uninstall", "--force")
	}
	r := w.registry(t, map[string]string{"ops": "for the manager", "ann": "for the namespace", "paid": "for the workload"})
	w.loadApp(t)
	image := r.push(t, "ops", filepath.Join(bin, "image.tar"), "kubevpn")
	app := r.push(t, "ops", filepath.Join(bin, "app.tar"), "team/app")
	w.apply(t, "apiVersion: v1\nkind: Namespace\nmetadata: {name: shop}\n")
	w.kubectl(t, "-n", "shop", "create", "secret", "docker-registry", "own", "--docker-server="+r.host,
		"--docker-username=paid", "--docker-password="+r.passwords["paid"])
	w.apply(t, strings.NewReplacer("APP_IMAGE", appRef, "PAID_IMAGE", app).Replace(privateWorkloads))
	other := r.push(t, "ops", filepath.Join(bin, "image.tar"), "agents") // which no node has pulled
	l := &privateUser{laptop: w.newUser(t, lab.Admin), registry: r, image: image}
	l.asks = true // the commands of the page lead to no question
	t.Cleanup(func() {
		if r := admin.runContext(context.WithoutCancel(t.Context()), t, "kubevpn", "uninstall", "--force"); r.code != 0 {
			t.Error(r)
		}
		out, err := w.tryKubectl(context.WithoutCancel(t.Context()), "delete", "namespace", "kubevpn", "--ignore-not-found")
		if err != nil {
			t.Error(out, err)
		}
	})

	l.follow(t, "Install the traffic manager", "ops")
	r.wantPull(t, "ops", "kubevpn")
	l.connect(t)
	l.startApp(t, "laptop")
	v := w.visitor(t)
	web := &shop{world: w, namespace: "shop", workload: "deployment/web"}
	web.rolledOut(t)
	paid := &shop{world: w, namespace: "shop", workload: "daemonset/paid"}
	paid.rolledOut(t)
	t.Run("workload_without_a_secret_is_rejected", func(t *testing.T) { privateRejected(t, l, web) })
	t.Run("agent_is_pulled_with_the_workload_s_secret", func(t *testing.T) {
		l.intercepts(t, paid, v)
		r.wantPull(t, "paid", "kubevpn")
	})
	t.Run("failed_pull_is_reported", func(t *testing.T) { // an image that the user names is not checked
		failure{code: api.ExitImagePull, message: "cannot pull the image " + other + ".*401 Unauthorized", hint: "--image", within: time.Minute}.
			check(t, l.kubevpn(t, "proxy", web.workload, "-n", web.namespace, "--image", other))
	})
	t.Run("agent_is_pulled_with_the_secret_of_the_service_account", func(t *testing.T) {
		l.follow(t, "Prepare a namespace", "ann")
		l.intercepts(t, web, v)
		l.intercepts(t, web, v, "--image", other)
		r.wantPull(t, "ann", "agents")
	})
}

// privateRejected checks that a proxy that cannot succeed changes nothing.
func privateRejected(t *testing.T, l *privateUser, s *shop) {
	state := func() string {
		return s.template(t) + s.kubectl(t, "-n", s.namespace, "get", "pods", "-l", "app=web", "-o",
			"jsonpath={range .items[*]}{.metadata.uid} {.metadata.generation} {.spec}{end}")
	}
	before := state()
	failure{
		code: api.ExitImagePull, message: "deployment/web cannot pull " + l.image + ".*have no pull secret",
		hint: "kubectl -n shop create secret docker-registry kubevpn --docker-server=" + l.registry.host, within: soon,
	}.check(t, l.kubevpn(t, "proxy", s.workload, "-n", s.namespace, "--headers", mine+"="+me))
	if after := state(); after != before {
		t.Errorf("before %s\nafter  %s", before, after)
	}
	if s := l.status(t); len(s.Intercepts) != 0 {
		t.Errorf("%+v", s.Intercepts)
	}
}

// privateUser is a laptop that does not name an image, because that skips the check of pull secrets.
type privateUser struct {
	*laptop
	registry *privateRegistry
	image    string // of the traffic manager
}

// kubevpn runs the program without the image of the other suites.
func (l *privateUser) kubevpn(t *testing.T, args ...string) result {
	t.Helper()
	return l.run(t, append([]string{"env", "-u", "KUBEVPN_IMAGE", filepath.Join(bin, "kubevpn")}, args...)...)
}

// connect connects, and disconnects after the test.
func (l *privateUser) connect(t *testing.T) {
	t.Helper()
	if r := l.kubevpn(t, "connect"); r.code != 0 {
		t.Fatal(r)
	}
	t.Cleanup(func() {
		r := l.runContext(context.WithoutCancel(t.Context()), t, "kubevpn", "disconnect", "--all")
		if r.code != 0 {
			t.Error(r)
		}
	})
}

// intercepts checks that the selected requests of each pod reach the laptop.
func (l *privateUser) intercepts(t *testing.T, s *shop, v *visitor, args ...string) {
	t.Helper()
	_, app, _ := strings.Cut(s.workload, "/")
	label := "app=" + app
	testenv.Eventually(t, soon, func() error { // a restart of the workload may still delete pods
		out, err := s.tryKubectl(t.Context(), "-n", s.namespace, "get", "pods", "-l", label, "-o", "jsonpath={.items[*].metadata.deletionTimestamp}")
		if err == nil && out != "" {
			err = errors.New("pods are being deleted since " + out)
		}
		return err
	})
	pods := s.pods(t, s.namespace, label)
	r := l.kubevpn(t, append([]string{"proxy", s.workload, "-n", s.namespace, "--headers", mine + "=" + me}, args...)...)
	if r.code != 0 {
		t.Fatal(r)
	}
	defer l.leave(t, s)
	for _, ip := range pods {
		if err := v.want("http://"+net.JoinHostPort(ip.String(), "8080")+"/", "laptop", mine, me); err != nil {
			t.Errorf("%s: %v", ip, err)
		}
	}
}

// follow runs the commands of a section of docs/how-to/private-registry.md with the registry's address and a user's
// name and password.
func (l *privateUser) follow(t *testing.T, heading, user string) {
	t.Helper()
	filled := strings.NewReplacer("registry.example/kubevpn@sha256:...", l.image, "registry.example", l.registry.host,
		"USER", user, "PASSWORD", "'"+l.registry.passwords[user]+"'")
	page := filepath.Join(moduleRoot(t), "docs", "how-to", "private-registry.md")
	for _, command := range sectionCommands(t, page, heading) {
		words := shellWords(t, filled.Replace(command))
		switch words[0] {
		case "kubectl":
			l.kubectl(t, words[1:]...)
		case "kubevpn":
			if r := l.kubevpn(t, words[1:]...); r.code != 0 {
				t.Fatal(r)
			}
		default:
			t.Fatalf("%s: the test cannot run %q", page, command)
		}
	}
}

// sectionCommands returns the commands of a page that follow a heading: the lines with a prompt, each with the lines
// that continue it.
func sectionCommands(t *testing.T, file, heading string) (commands []string) {
	t.Helper()
	text, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	_, section, _ := strings.Cut(string(text), "\n## "+heading+"\n")
	section, _, _ = strings.Cut(section, "\n## ")
	for line := range strings.Lines(strings.ReplaceAll(section, "\\\n", "")) {
		if command, ok := strings.CutPrefix(line, "$ "); ok {
			commands = append(commands, strings.TrimSpace(command))
		}
	}
	if len(commands) == 0 {
		t.Fatalf("%s has no commands under %q", file, heading)
	}
	return commands
}

// shellWords splits a command into words as a shell does.
func shellWords(t *testing.T, command string) []string {
	t.Helper()
	out, err := exec.CommandContext(t.Context(), "sh", "-c", `printf '%s\n' `+command).Output()
	if err != nil {
		t.Fatal(fmt.Errorf("%s: %w", command, err))
	}
	return strings.Split(strings.TrimSpace(string(out)), "\n")
}
