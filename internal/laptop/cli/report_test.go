//go:build unix

package cli

import (
	"archive/tar"
	"compress/gzip"
	"encoding/base64"
	"encoding/json"
	"encoding/pem"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log"
	"maps"
	"net"
	"net/http"
	"net/http/httptest"
	"net/url"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"kubevpn/internal/api"
	"kubevpn/internal/laptop/cli/command"
	"kubevpn/internal/laptop/cli/term"
	"kubevpn/internal/process/version"
	"kubevpn/internal/testenv"
)

// planted are secrets by the place where kubevpn meets them. Nothing tells the redactor the values of the second half:
// it recognizes the text around them.
var planted = map[string]string{
	"kubeconfig token":      "tok-3n-of-ann",
	"other user's token":    "tok_of/the+other=user",
	"kubeconfig password":   `pa"ss <w&rd>\n`,
	"token file":            "file-token-%41-é",
	"plugin's variable":     "plugin variable value",
	"flag --token":          "flagtokenflag",
	"proxy URL":             "pr0xypass",
	"HTTPS_PROXY":           "0therpr0xy",
	"short variable":        "s3cr",
	"long variable":         "a sentence that only ann knows",
	"SOCKS password":        "socks-password",
	"kubeconfig client key": "QUFBQUFBQUFBQUFBQUFBQUFBQUFBQUFBQUFBQUFBQUFBQUFB",
	"client.key":            "QkJCQkJCQkJCQkJCQkJCQkJCQkJCQkJCQkJCQkJCQkJCQkJC",

	"Authorization":   "YW5uOmh1bnRlcjI",
	"Cookie":          "c00kie-of-ann",
	"Set-Cookie":      "sid-of-the-shop",
	"JWT":             "eyJhbGciOiJFUzI1NiJ9.eyJzdWIiOiJhbm4ifQ.c2lnbmF0dXJl",
	"Secret":          "db-s3cret",
	"session ticket":  "m2Zk8vQ1xYp0Lr7TtW4uNs6hJf3dGb9cVa5eKi8oPqR",
	"session key":     "9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08",
	"application key": "Q0NDQ0NDQ0NDQ0NDQ0NDQ0NDQ0NDQ0NDQ0NDQ0NDQ0NDQ0ND",
}

// inContext returns the lines in which programs write the secrets.
func inContext() []string {
	block := func(body string) string {
		return "-----BEGIN PRIVATE KEY-----\n" + body + "\n-----END PRIVATE KEY-----\n"
	}
	lines := []string{
		"Authorization: Basic " + planted["Authorization"], "Cookie: theme=dark; sid=" + planted["Cookie"],
		"Set-Cookie: sid=" + planted["Set-Cookie"] + "; HttpOnly", "GET /?access=" + planted["JWT"],
		"DB_PASSWORD=" + planted["Secret"], "attached with " + planted["session ticket"], "key " + planted["session key"],
		block(planted["application key"]), block(planted["kubeconfig client key"]), block(planted["client.key"]),
		"got " + planted["kubeconfig client key"] + " there", "got " + planted["client.key"] + " there",
	}
	for _, name := range slices.Sorted(maps.Keys(planted)) {
		if !slices.ContainsFunc(lines, func(line string) bool { return strings.Contains(line, planted[name]) }) {
			lines = append(lines, "got "+planted[name]+" there")
		}
	}
	return lines
}

// encode returns a text in the encodings in which logs contain it.
func encode(text string) []string {
	quoted, _ := json.Marshal(text)
	inner := strings.Trim(string(quoted), `"`)
	all := []string{text, inner, url.QueryEscape(text), url.PathEscape(text), fmt.Sprintf("%q", string(quoted))}
	for n := range 3 {
		padded := []byte("xyz"[:n] + text)
		all = append(all, base64.StdEncoding.EncodeToString(padded), base64.URLEncoding.EncodeToString(padded))
	}
	return all
}

// noise is a log with all secrets in all encodings.
func noise() string {
	var b strings.Builder
	for _, line := range inContext() {
		for _, text := range encode(line) {
			fmt.Fprintf(&b, "time=2026-11-23T18:00:00Z level=INFO msg=seen %s\n", text)
		}
	}
	return b.String() + "the last line\n"
}

// hasSecret returns the name of a secret that the text contains in any of the encodings, or "".
func hasSecret(text string) string {
	for name, secret := range planted {
		for n, e := range encode(secret) {
			if n >= 5 { // base64: without the characters that also encode neighbors
				e = strings.TrimRight(e, "=")
				e = e[min(4, len(e)) : len(e)-1]
			}
			if len(e) > 3 && strings.Contains(text, e) {
				return fmt.Sprintf("%s as %q", name, e)
			}
		}
	}
	return ""
}

// tellingAPIServer is an API server with a traffic manager and an agent whose logs contain secrets.
func tellingAPIServer(w http.ResponseWriter, r *http.Request) {
	container := func(name string, restarts int32) corev1.ContainerStatus {
		return corev1.ContainerStatus{Name: name, Image: "registry.example/kubevpn:1", RestartCount: restarts,
			State: corev1.ContainerState{Running: &corev1.ContainerStateRunning{}}}
	}
	pod := func(name string, statuses ...corev1.ContainerStatus) corev1.Pod {
		return corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "kubevpn", Name: name},
			Status: corev1.PodStatus{ContainerStatuses: statuses}}
	}
	object := any(nil)
	switch path := r.URL.Path; {
	case strings.HasSuffix(path, "/selfsubjectaccessreviews"):
		w.Header().Set("Content-Type", "application/json")
		w.WriteHeader(http.StatusCreated)
		fmt.Fprint(w, `{"kind":"SelfSubjectAccessReview","apiVersion":"authorization.k8s.io/v1","status":{"allowed":true}}`)
		return
	case path == "/version":
		object = map[string]string{"gitVersion": "v1.37.2", "platform": "linux/amd64"}
	case strings.HasSuffix(path, "/log") && r.URL.Query().Get("previous") == "true":
		w.Header().Set("Content-Type", "application/json")
		w.WriteHeader(http.StatusForbidden)
		object = metav1.Status{TypeMeta: metav1.TypeMeta{Kind: "Status", APIVersion: "v1"}, Status: "Failure", Code: http.StatusForbidden,
			Reason: metav1.StatusReasonForbidden, Message: "forbidden to " + planted["kubeconfig token"] + " password=" + planted["Secret"]}
	case strings.HasSuffix(path, "/log"):
		io.WriteString(w, noise())
		return
	case path == "/api/v1/namespaces/kubevpn/pods":
		manager := pod("manager-1", container("manager", 1), container("kubevpn-gateway-1", 0))
		object = corev1.PodList{TypeMeta: metav1.TypeMeta{Kind: "PodList", APIVersion: "v1"}, Items: []corev1.Pod{manager}}
	case path == "/api/v1/namespaces/default/pods":
		web := pod("web-1", container("app", 0), container(api.AgentPrefix+"1", 0))
		web.Namespace = "default"
		object = corev1.PodList{TypeMeta: metav1.TypeMeta{Kind: "PodList", APIVersion: "v1"}, Items: []corev1.Pod{web}}
	case strings.HasSuffix(path, "/deployments/kubevpn-traffic-manager"):
		object = appsv1.Deployment{TypeMeta: metav1.TypeMeta{Kind: "Deployment", APIVersion: "apps/v1"}, ObjectMeta: metav1.ObjectMeta{
			Name: "kubevpn-traffic-manager", Labels: map[string]string{"secret": planted["long variable"]}}}
	default:
		http.NotFound(w, r)
		return
	}
	w.Header().Set("Content-Type", "application/json")
	json.NewEncoder(w).Encode(object)
}

// telling returns a Factory whose files, environment and daemon contain the secrets, and the path of its kubeconfig.
func telling(t *testing.T) (f *command.Factory, kubeconfig string) {
	dir, err := os.MkdirTemp("", "kubevpn-report-") // short enough for a socket
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	variables := map[string]string{
		"XDG_STATE_HOME": dir, "XDG_RUNTIME_DIR": dir, "XDG_CONFIG_HOME": dir, "HOME": dir,
		"HTTPS_PROXY": "http://ann:" + planted["HTTPS_PROXY"] + "@192.0.2.1:3128", "NO_PROXY": "127.0.0.1",
		"MY_TOKEN": planted["short variable"], "GREETING": planted["long variable"],
	}
	f = &command.Factory{Streams: term.Streams{Out: &testenv.Buffer{}, Errout: &testenv.Buffer{}},
		Lookup: func(name string) (string, bool) { v, ok := variables[name]; return v, ok }}
	for name, value := range variables {
		f.Environ = append(f.Environ, name+"="+value)
	}
	paths, err := f.Paths()
	if err := errors.Join(err, paths.MakeRuntimeDir(), paths.MakeStateDir()); err != nil {
		t.Fatal(err)
	}
	block := func(name string) []byte {
		return []byte("-----BEGIN PRIVATE KEY-----\n" + planted[name] + "\n-----END PRIVATE KEY-----\n")
	}
	s := httptest.NewTLSServer(http.HandlerFunc(tellingAPIServer))
	s.Config.ErrorLog = log.New(io.Discard, "", 0) // doctor ends conns early
	t.Cleanup(s.Close)
	ca := pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: s.Certificate().Raw})
	quote := func(name string) string { text, _ := json.Marshal(planted[name]); return string(text) }
	kubeconfig = filepath.Join(dir, "kubeconfig")
	for name, text := range map[string]string{
		paths.LogFile(): noise(), filepath.Join(paths.StateDir, "client.key"): string(block("client.key")),
		filepath.Join(dir, "token"): planted["token file"],
		kubeconfig: `apiVersion: v1
kind: Config
current-context: main
clusters:
- {name: main, cluster: {server: "` + s.URL + `", certificate-authority-data: ` + base64.StdEncoding.EncodeToString(ca) + `}}
- {name: other, cluster: {server: "https://192.0.2.1", proxy-url: "http://bob:` + planted["proxy URL"] + `@192.0.2.2:3128"}}
users:
- {name: ann, user: {token: ` + quote("kubeconfig token") + `}}
- {name: a, user: {token: ` + quote("other user's token") + `}}
- {name: b, user: {username: b, password: ` + quote("kubeconfig password") + `}}
- {name: c, user: {client-key-data: ` + base64.StdEncoding.EncodeToString(block("kubeconfig client key")) + `}}
- {name: d, user: {tokenFile: token}}
- {name: e, user: {exec: {command: x, env: [{name: A, value: ` + quote("plugin's variable") + `}]}}}
contexts:
- {name: main, context: {cluster: main, user: ann}}
`,
	} {
		if err := os.WriteFile(name, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	serveStatus(t, paths.Socket())
	return f, kubeconfig
}

// serveStatus is a daemon whose status contains secrets.
func serveStatus(t *testing.T, socket string) {
	l, err := net.Listen("unix", socket)
	if err != nil {
		t.Fatal(err)
	}
	server := &http.Server{Handler: http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		json.NewEncoder(w).Encode(api.Status{Version: version.Full(), Connections: []api.Connection{{
			ID: "one", SOCKS: &api.SOCKS{User: "kubevpn", Password: planted["SOCKS password"]}, Warnings: inContext()}}})
	})}
	go server.Serve(l)
	t.Cleanup(func() { server.Close() })
}

// unpack returns the files of an archive, which must be readable only by its owner.
func unpack(t *testing.T, name string) map[string]string {
	t.Helper()
	f, err := os.Open(name)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if info, err := f.Stat(); err != nil || info.Mode() != 0o600 {
		t.Errorf("%v, mode %v", err, info.Mode())
	}
	zip, err := gzip.NewReader(f)
	if err != nil {
		t.Fatal(err)
	}
	files := map[string]string{}
	for r := tar.NewReader(zip); ; {
		h, err := r.Next()
		if errors.Is(err, io.EOF) {
			return files
		}
		text, reading := io.ReadAll(r)
		if err := errors.Join(err, reading); err != nil {
			t.Fatal(err)
		}
		name, _ := strings.CutPrefix(h.Name, "kubevpn-report/")
		files[name] = string(text)
	}
}

func TestReportContainsNoSecret(t *testing.T) {
	if len(planted) < 20 {
		t.Fatal(len(planted))
	}
	f, kubeconfig := telling(t)
	file := filepath.Join(t.TempDir(), "report.tar.gz")
	code := run(t.Context(), f, false, []string{"report", "--file", file, "--kubeconfig", kubeconfig, "--token", planted["flag --token"]})
	printed := f.Out.(*testenv.Buffer).String() + f.Errout.(*testenv.Buffer).String()
	if code != 0 {
		t.Fatalf("exit code %d: %s", code, printed)
	}
	files := unpack(t, file)
	logs := []string{"daemon.log", "logs/kubevpn-manager-1-manager.log", "logs/kubevpn-manager-1-kubevpn-gateway-1.log",
		"logs/default-web-1-kubevpn-agent-1.log"}
	for _, name := range logs {
		if !strings.HasSuffix(files[name], "the last line\n") || !strings.Contains(files[name], "level=INFO msg=seen") {
			t.Errorf("%s: %q", name, files[name])
		}
	}
	if !strings.Contains(files["cluster.txt"], "API server v1.37.2") || !strings.Contains(files["status.json"], `"id": "one"`) {
		t.Errorf("%q", files)
	}
	if text := files["doctor.txt"]; !strings.Contains(text, "  Kubernetes v1.37.2 knows you") {
		t.Errorf("doctor.txt: %q", text)
	}
	files["what the command printed"] = printed
	for name, text := range files {
		if name == "README.txt" || name == "what the command printed" {
			if !strings.Contains(text, "Not collected:") || !strings.Contains(text, "forbidden to "+redactedMark) {
				t.Errorf("%s does not say what is missing: %s", name, text)
			}
		}
		if secret := hasSecret(text); secret != "" {
			t.Errorf("%s contains the %s", name, secret)
		}
	}
	if before, _ := os.Stat(file); run(t.Context(), f, false, []string{"report", "--file", file}) != int(api.ExitUsage) {
		t.Error("the command overwrites a file")
	} else if after, err := os.Stat(file); err != nil || after.Size() != before.Size() {
		t.Error("the command changed a file of others", err)
	}
}

const redactedMark = "[redacted]"

func TestReportOfABrokenMachine(t *testing.T) {
	dir := t.TempDir()
	f := &command.Factory{Streams: term.Streams{Out: &testenv.Buffer{}, Errout: &testenv.Buffer{}}, Lookup: func(name string) (string, bool) {
		return dir, strings.HasPrefix(name, "XDG_") || name == "HOME"
	}}
	kubeconfig := filepath.Join(dir, "kubeconfig")
	text := "apiVersion: v1\nkind: Config\ncurrent-context: a\nclusters: [{name: a, cluster: {server: 'https://127.0.0.1:1'}}]\n" +
		"contexts: [{name: a, context: {cluster: a}}]\n"
	if err := os.WriteFile(kubeconfig, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	for name, config := range map[string]string{"no kubeconfig": filepath.Join(dir, "none"), "no API server": kubeconfig} {
		file := filepath.Join(dir, name)
		if code := run(t.Context(), f, false, []string{"report", "--file", file, "--kubeconfig", config, "-o", "json"}); code != 0 {
			t.Fatalf("%s: exit code %d: %v", name, code, f.Errout)
		}
		var r api.Report
		if err := json.Unmarshal([]byte(f.Out.(*testenv.Buffer).Take()), &r); err != nil {
			t.Fatal(err)
		}
		for _, part := range []string{"cluster.txt", "daemon.log", "doctor.txt"} {
			n := slices.IndexFunc(r.Parts, func(p api.ReportPart) bool { return p.Name == part })
			if n < 0 || r.Parts[n].Missing == "" {
				t.Errorf("%s: %s is not listed as missing: %+v", name, part, r.Parts)
			}
		}
		if files := unpack(t, file); files["version.json"] == "" || !strings.Contains(files["README.txt"], "Not collected:") {
			t.Errorf("%s: %q", name, files)
		}
	}
	if err := os.Remove(filepath.Join(dir, "no kubeconfig")); errors.Is(err, fs.ErrNotExist) {
		t.Error("there is no archive")
	}
}
