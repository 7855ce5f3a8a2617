//go:build e2e && linux

package e2e

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/tools/clientcmd"
	clientcmdapi "k8s.io/client-go/tools/clientcmd/api"
	"sigs.k8s.io/yaml"

	"kubevpn/internal/testenv"
	"kubevpn/test/lab"
)

const (
	ciNamespace = "kubevpn-example"
	ciUser      = 1000
	// ciEnd follows examples/ci/test.sh: it asks again while the other jobs intercept too, and exits with a code.
	ciEnd = `
touch begun
until [ -e go ]; do sleep 0.1; done
expect new -H "x-job: $CI_JOB"
expect old
exit `
)

// pipeline is a file of examples/ci, as its CI system understands it.
type pipeline struct {
	env     map[string]string
	script  string
	account bool // the pod has the ServiceAccount, and no kubeconfig
}

// ciJob is a pod that runs a pipeline in a directory, the checkout of its repository.
type ciJob struct {
	*world
	pipeline
	name, dir string
	code      int // its exit code
}

// ciSuite runs the pipelines of examples/ci at the same time, in pods without a device, root and capabilities.
func ciSuite(t *testing.T, w *world) {
	w.loadApp(t)
	root := moduleRoot(t)
	manifest := readFile(t, filepath.Join(root, "examples/web.yaml"))
	w.apply(t, regexp.MustCompile(`image: .*`).ReplaceAllString(manifest, "image: "+appRef)+"\n---\n"+
		readFile(t, filepath.Join(root, "examples/ci/rights.yaml")))
	s := &shop{world: w, namespace: ciNamespace, workload: "deployment/web"}
	s.rolledOut(t)
	admin, before, kubeconfig := w.newLaptop(t, lab.Admin), s.objects(t), w.ciKubeconfig(t)
	github := githubWorkflow(t, root, map[string]string{"github.run_id": "4711", "github.job": "test",
		"secrets.KUBECONFIG": kubeconfig})
	jobs := []*ciJob{
		w.startJob(t, root, "github", github, 0),
		w.startJob(t, root, "gitlab", gitlabJob(t, root, "4712", kubeconfig), 0),
		w.startJob(t, root, "tekton", tektonTask(t, root, "failing"), 3),
		w.startJob(t, root, "canceled", tektonTask(t, root, "canceled"), 128+int(syscall.SIGTERM)),
	}
	for _, j := range jobs {
		j.begins(t)
	}
	list := admin.must(t, "kubevpn", "list", "-n", ciNamespace, "-o", "json")
	for _, j := range jobs {
		if !strings.Contains(list, fmt.Sprintf("%d@%s", ciUser, j.name)) {
			t.Errorf("no intercept of %s:\n%s", j.name, list)
		}
		if j.name == "canceled" {
			w.kubectl(t, "-n", ciNamespace, "exec", j.name, "--", "/bin/sh", "-c", "kill -TERM 1")
		} else if err := os.WriteFile(filepath.Join(j.dir, "go"), nil, 0o644); err != nil {
			t.Fatal(err)
		}
	}
	for _, j := range jobs {
		j.check(t)
	}
	if now := s.objects(t); now != before {
		t.Errorf("before\n%s\nafter\n%s", before, now)
	}
	v, service := w.visitor(t), "http://"+s.clusterIP(t, ciNamespace, "web")+"/"
	for _, j := range jobs {
		if err := v.of(service, "web-", "x-job", j.env["CI_JOB"]); err != nil {
			t.Errorf("%s still intercepts: %v", j.name, err)
		}
	}
}

// objects returns the pod template of the workload, and the Services and Jobs of its namespace but for the manager's.
func (s *shop) objects(t *testing.T) string {
	t.Helper()
	names := strings.Fields(s.kubectl(t, "-n", s.namespace, "get", "services,jobs", "-o", "name"))
	names = slices.DeleteFunc(names, func(n string) bool { return strings.Contains(n, "/kubevpn-traffic-manager") })
	return strings.Join(append(names, s.kubectl(t, "-n", s.namespace, "get", s.workload, "-o",
		"jsonpath={.spec.template}")), "\n")
}

func readFile(t *testing.T, name string) string {
	t.Helper()
	text, err := os.ReadFile(name)
	if err != nil {
		t.Fatal(err)
	}
	return string(text)
}

// parse reads a file of examples/ci, which may contain only what into has.
func parse(t *testing.T, root, name string, into any) {
	t.Helper()
	if err := yaml.UnmarshalStrict([]byte(readFile(t, filepath.Join(root, "examples/ci", name))), into); err != nil {
		t.Fatalf("%s: %v", name, err)
	}
}

// download is how the pipelines install kubevpn, which the lab cannot download.
var download = regexp.MustCompile(`(?m)^curl -fsSLO https://github\.com/OWNER/NAME/releases/download/v(\S+)/install\.sh\n` +
	`sh install\.sh --version (\S+) --prefix "\$HOME/\.local"$`)

// installed replaces the download in a script.
func installed(t *testing.T, script string) string {
	t.Helper()
	if found := download.FindAllStringSubmatch(script, -1); len(found) != 1 || found[0][1] != found[0][2] {
		t.Fatalf("the script does not install one version:\n%s", script)
	}
	return download.ReplaceAllLiteralString(script,
		`mkdir -p "$HOME/.local/bin" && ln -s /product/kubevpn "$HOME/.local/bin"`)
}

// githubWorkflow reads the workflow. expressions are the values of ${{ }}. A linter knows the keys of workflows.
func githubWorkflow(t *testing.T, root string, expressions map[string]string) pipeline {
	t.Helper()
	type step struct {
		Name, Uses, If, Run string
		Env, With           map[string]string
	}
	var file struct {
		Name        string
		On          string `json:"true"` // as YAML 1.1 reads on
		Permissions map[string]string
		Jobs        map[string]struct {
			RunsOn  string `json:"runs-on"`
			Minutes int    `json:"timeout-minutes"`
			Env     map[string]string
			Steps   []step
		}
	}
	parse(t, root, "github-actions.yaml", &file)
	p := pipeline{env: map[string]string{"GITHUB_PATH": "/tmp/path", "RUNNER_TEMP": "/tmp"}, script: "touch /tmp/path\n"}
	value := func(text string) string {
		return regexp.MustCompile(`\$\{\{ (.*?) \}\}`).ReplaceAllStringFunc(text, func(e string) string {
			v, known := expressions[strings.Trim(e, "${} ")]
			if !known {
				t.Fatalf("the test knows no value of %s", e)
			}
			return v
		})
	}
	job := file.Jobs["test"]
	for name, v := range job.Env {
		p.env[name] = value(v)
	}
	for _, s := range job.Steps {
		for name, v := range s.Env {
			p.env[name] = value(v)
		}
		if strings.Contains(s.Name, "Install") {
			s.Run = installed(t, s.Run)
		}
		if s.Run != "" {
			p.script += fmt.Sprintf("PATH=\"$(cat /tmp/path):$PATH\" bash -e -c '%s' || exit\n",
				strings.ReplaceAll(value(s.Run), "'", `'\''`))
		}
	}
	return p
}

// gitlabJob reads the job. id is its ID, and kubeconfig the content of its variable KUBECONFIG.
func gitlabJob(t *testing.T, root, id, kubeconfig string) pipeline {
	t.Helper()
	var file struct {
		Test struct {
			Image, Timeout string
			Variables      map[string]string
			Before         []string `json:"before_script"`
			Script         []string
			Artifacts      struct {
				When  string
				Paths []string
			}
		}
	}
	parse(t, root, "gitlab-ci.yml", &file)
	p := pipeline{env: map[string]string{"KUBECONFIG": "/tmp/kubeconfig", "KUBECONFIG_TEXT": kubeconfig}}
	for name, v := range file.Test.Variables {
		p.env[name] = strings.ReplaceAll(v, "$CI_JOB_ID", id)
	}
	p.script = "set -eu\nprintf %s \"$KUBECONFIG_TEXT\" >$KUBECONFIG\n" +
		installed(t, strings.Join(append(file.Test.Before, file.Test.Script...), "\n"))
	return p
}

// tektonTask reads the task, for a TaskRun of this name.
func tektonTask(t *testing.T, root, name string) pipeline {
	t.Helper()
	var file struct {
		metav1.TypeMeta   `json:",inline"`
		metav1.ObjectMeta `json:"metadata"`
		Spec              struct {
			Workspaces []struct{ Name string }
			Steps      []struct {
				Name, Image, WorkingDir, Timeout, Script string
				Env                                      []corev1.EnvVar
			}
		}
	}
	parse(t, root, "tekton-task.yaml", &file)
	step := file.Spec.Steps[0]
	p := pipeline{env: map[string]string{}, script: installed(t, step.Script), account: true}
	for _, e := range step.Env {
		p.env[e.Name] = strings.ReplaceAll(e.Value, "$(context.taskRun.name)", name)
	}
	return p
}

// ciKubeconfig returns a kubeconfig with a token of the ServiceAccount.
func (w *world) ciKubeconfig(t *testing.T) string {
	t.Helper()
	admin, err := w.Kubeconfig(lab.Admin)
	if err != nil {
		t.Fatal(err)
	}
	config, err := clientcmd.LoadFromFile(admin)
	if err != nil {
		t.Fatal(err)
	}
	token := w.kubectl(t, "-n", ciNamespace, "create", "token", "ci")
	config.AuthInfos = map[string]*clientcmdapi.AuthInfo{config.Contexts[config.CurrentContext].AuthInfo: {Token: token}}
	text, err := clientcmd.Write(*config)
	if err != nil {
		t.Fatal(err)
	}
	return string(text)
}

// startJob creates the pod of a job, whose test exits with code unless somebody ends it before.
func (w *world) startJob(t *testing.T, root, name string, p pipeline, code int) *ciJob {
	t.Helper()
	dir, err := os.MkdirTemp("", "kubevpn-e2e-ci-") // others cannot enter t.TempDir
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	err = os.CopyFS(filepath.Join(dir, "examples"), os.DirFS(filepath.Join(root, "examples")))
	test := filepath.Join(dir, "examples/ci/test.sh")
	text := readFile(t, test) + ciEnd + strconv.Itoa(code) + "\n"
	page := "hello from this machine: " + name + "\n"
	if err := errors.Join(err, os.WriteFile(test, []byte(text), 0o644),
		os.WriteFile(filepath.Join(dir, "examples/site/index.html"), []byte(page), 0o644),
		filepath.WalkDir(dir, func(path string, _ fs.DirEntry, err error) error {
			return errors.Join(err, os.Chown(path, ciUser, ciUser))
		})); err != nil {
		t.Fatal(err)
	}
	j := &ciJob{w, p, name, dir, code}
	pod, err := json.Marshal(j.pod())
	if err != nil {
		t.Fatal(err)
	}
	file := filepath.Join(t.TempDir(), "pod.json")
	if err := os.WriteFile(file, pod, 0o644); err != nil {
		t.Fatal(err)
	}
	w.kubectl(t, "create", "-f", file)
	return j
}

// pod returns the pod of the job. Its programs are those of this machine.
func (j *ciJob) pod() *corev1.Pod {
	user, yes, no, grace := int64(ciUser), true, false, int64(1)
	c := corev1.Container{Name: "job", Image: appRef, ImagePullPolicy: corev1.PullNever, WorkingDir: "/work",
		Command: []string{"/bin/sh", "-c", j.script},
		Env: []corev1.EnvVar{{Name: "HOME", Value: "/tmp"}, {Name: "PATH", Value: "/usr/bin:/bin"},
			{Name: "KUBEVPN_IMAGE", Value: imageRef}},
		SecurityContext: &corev1.SecurityContext{AllowPrivilegeEscalation: &no,
			Capabilities: &corev1.Capabilities{Drop: []corev1.Capability{"ALL"}}}}
	for name, v := range j.env {
		c.Env = append(c.Env, corev1.EnvVar{Name: name, Value: strings.ReplaceAll(v, "$(", "$$(")})
	}
	var volumes []corev1.Volume
	mount := func(name, from, to string, readOnly bool) {
		v := corev1.Volume{Name: name}
		if v.EmptyDir = new(corev1.EmptyDirVolumeSource); from != "" {
			v.VolumeSource = corev1.VolumeSource{HostPath: &corev1.HostPathVolumeSource{Path: from}}
		}
		volumes = append(volumes, v)
		c.VolumeMounts = append(c.VolumeMounts, corev1.VolumeMount{Name: name, MountPath: to, ReadOnly: readOnly})
	}
	for _, dir := range []string{"usr", "bin", "lib", "lib64"} {
		mount(dir, "/"+dir, "/"+dir, true)
	}
	mount("product", bin, "/product", true)
	mount("work", j.dir, "/work", false)
	mount("tmp", "", "/tmp", false)
	return &corev1.Pod{TypeMeta: metav1.TypeMeta{APIVersion: "v1", Kind: "Pod"},
		ObjectMeta: metav1.ObjectMeta{Name: j.name, Namespace: ciNamespace},
		Spec: corev1.PodSpec{ServiceAccountName: "ci", AutomountServiceAccountToken: &j.account,
			RestartPolicy: corev1.RestartPolicyNever, TerminationGracePeriodSeconds: &grace, Volumes: volumes,
			Containers: []corev1.Container{c}, SecurityContext: &corev1.PodSecurityContext{RunAsNonRoot: &yes,
				RunAsUser: &user, RunAsGroup: &user,
				SeccompProfile: &corev1.SeccompProfile{Type: corev1.SeccompProfileTypeRuntimeDefault}}}}
}

// begins waits until the test of the job has asked the cluster.
func (j *ciJob) begins(t *testing.T) {
	t.Helper()
	testenv.Eventually(t, 90*time.Second, func() error {
		_, err := os.Stat(filepath.Join(j.dir, "begun"))
		if err != nil && j.ended(t) {
			t.Fatalf("%s ended:\n%s", j.name, j.output(t))
		}
		return err
	})
}

// check waits until the job has ended, and checks what it did.
func (j *ciJob) check(t *testing.T) {
	t.Helper()
	if err := testenv.Poll(90*time.Second, func() error {
		if !j.ended(t) {
			return errors.New("it runs")
		}
		return nil
	}); err != nil {
		t.Fatalf("%s: %v\n%s", j.name, err, j.output(t))
	}
	code, out := j.kubectl(t, "-n", ciNamespace, "get", "pod", j.name, "-o", ciExit), j.output(t)
	reports, err := filepath.Glob(filepath.Join(j.dir, "examples/ci/kubevpn-report-*.tar.gz"))
	asked, canceled := strings.Count(out, "hello from this machine: "+j.name), j.name == "canceled"
	if code != strconv.Itoa(j.code) || err != nil || len(reports) > 0 != (j.name == "tekton") ||
		asked != 2 && !canceled || !strings.Contains(out, "programs that ignore HTTP_PROXY") ||
		!strings.Contains(out, "✓ Leaving deployment/web") {
		t.Errorf("%s: exit %s, want %d; its program answered %d requests; reports %q, %v\n%s", j.name, code, j.code,
			asked, reports, err, out)
	}
}

// ciExit is the exit code of a job's pod.
const ciExit = "jsonpath={.status.containerStatuses[0].state.terminated.exitCode}"

func (j *ciJob) ended(t *testing.T) bool {
	t.Helper()
	return j.kubectl(t, "-n", ciNamespace, "get", "pod", j.name, "-o", ciExit) != ""
}

func (j *ciJob) output(t *testing.T) string {
	t.Helper()
	return j.kubectl(t, "-n", ciNamespace, "logs", j.name)
}
