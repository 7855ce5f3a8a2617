package dev

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/client-go/kubernetes/fake"

	"kubevpn/internal/kube/podenv"
)

// hostile is podOf with variables and mounts that an attacker chose, of a ConfigMap that the attacker wrote.
func hostile(t *testing.T, env []corev1.EnvVar, paths ...string) *corev1.Pod {
	t.Helper()
	pod := podOf(t)
	c := &pod.Spec.Containers[0]
	c.Env = env
	c.VolumeMounts = nil
	for _, path := range paths {
		c.VolumeMounts = append(c.VolumeMounts, corev1.VolumeMount{Name: "settings", MountPath: path, SubPath: "color"})
	}
	return pod
}

// A pod's variables do not decide what a program of this machine executes.
func TestProgramKeepsVariablesThatRunCode(t *testing.T) {
	env := []corev1.EnvVar{
		{Name: "BASH_ENV", Value: "/srv/evil"}, {Name: "BASH_FUNC_ls%%", Value: "() { evil; }"}, {Name: "HOME", Value: "/srv/evil"},
		{Name: "LD_PRELOAD", Value: "/srv/evil.so"}, {Name: "NODE_OPTIONS", Value: "--require=/srv/evil"}, {Name: "COLOR", Value: "blue"},
		{Name: "TOOL", Value: "/srv/evil"}, {Name: "HOSTNAME", Value: "web-1"},
	}
	r := prepared(t, fake.NewClientset(settings("blue"), kubernetesService), "exec env", func(c *Config) {
		c.Pod, c.Environ = hostile(t, env), []string{"PATH=" + os.Getenv("PATH"), "HOME=/home/ann", "TOOL=mine", "HOSTNAME=laptop"}
	})
	if status, err := r.Run(t.Context()); err != nil || status.Code != 0 {
		t.Fatalf("%+v, %v", status, err)
	}
	said := r.said(t)
	if strings.Contains(said, "evil") || !strings.Contains(said, "HOME=/home/ann\n") || !strings.Contains(said, "COLOR=blue\n") ||
		!strings.Contains(said, "TOOL=mine\n") || !strings.Contains(said, "HOSTNAME=web-1\n") {
		t.Errorf("the program's environment:\n%s", said)
	}
}

// A pod's volumes hide neither what this machine executes nor what a user keeps at home.
func TestProgramKeepsFilesOfTheMachine(t *testing.T) {
	home := t.TempDir()
	key := filepath.Join(home, ".ssh", "id")
	if err := os.Mkdir(filepath.Dir(key), 0o700); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(key, []byte("mine\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	paths := []string{"/usr/bin/kubevpn-test-evil", "/etc/ld.so.preload", "/etc/hosts", key}
	r := prepared(t, fake.NewClientset(settings("evil"), kubernetesService), "cat "+strings.Join(paths, " ")+" 2>/dev/null; cat /srv/kubevpn-test/x", func(c *Config) {
		c.Pod, c.Environ = hostile(t, nil, append(paths, "/srv/kubevpn-test/x")...), []string{"PATH=" + os.Getenv("PATH"), "HOME=" + home}
	})
	if status, err := r.Run(t.Context()); err != nil || status.Code != 0 {
		t.Fatalf("%+v, %v: %s", status, err, r.said(t))
	}
	if said := r.said(t); strings.Count(said, "evil") != 1 || !strings.HasSuffix(said, "mine\nevil") {
		t.Errorf("the program reads:\n%s", said)
	}
	close(r.warned)
	var warned []string
	for text := range r.warned {
		warned = append(warned, text)
	}
	for _, path := range paths {
		if !strings.Contains(strings.Join(warned, "\n")+"\n", "; --mount-over "+path+" mounts it\n") {
			t.Errorf("no word of --mount-over %s in %q", path, warned)
		}
	}
}

func TestGuardRefusesDirectoriesOfTheMachine(t *testing.T) {
	dir := t.TempDir()
	home, app, links, here := filepath.Join(dir, "home"), filepath.Join(dir, "app", "bin"), filepath.Join(dir, "links"), filepath.Join(dir, "here", "src")
	for _, made := range []string{home, app, links, here} {
		if err := os.MkdirAll(made, 0o755); err != nil {
			t.Fatal(err)
		}
	}
	for name, to := range map[string]string{filepath.Join(links, "home"): home, filepath.Join(links, "etc"): "/etc", filepath.Join(home, "link"): "/etc"} {
		if err := os.Symlink(to, name); err != nil {
			t.Fatal(err)
		}
	}
	t.Chdir(here)
	g, err := newGuard([]string{"PATH=relative:/usr/bin:" + app + "::" + filepath.Join(dir, "not-there", "bin"), "HOME=" + filepath.Join(links, "home")}, []string{"/usr/share/web", "/etc/asked-for"})
	if err != nil {
		t.Fatal(err)
	}
	volumes := []podenv.Volume{{Name: "v", Files: []podenv.File{{Path: "file"}, {Path: "dir/file"}}}, {Name: "empty", Empty: true}}
	for _, tt := range []struct {
		path, sub string
		shown     bool
	}{
		{"/var/run/secrets/kubernetes.io/serviceaccount", "", true}, {"/etc/asked-for/app.yaml", "file", true},
		{"/app", "", true}, {"/config/app.yaml", "file", true}, {"/data", "", true}, {"/opt/kubevpn-test", "", true},
		{"/var/tmp", "", true}, {"/var/log", "", true}, {"/run", "", true}, {"/dev/shm", "", true}, {"/usr/share/web/html", "", true},

		{"/usr", "", false}, {"/usr/bin", "", false}, {"/usr/bin/kubevpn-test", "file", false}, {"/bin/kubevpn-test", "file", false}, {"/lib/kubevpn-test", "", false},
		{"/usr/share/website", "", false}, {"/usr/local/lib/python3.11/sitecustomize.py", "file", false}, {"/dev/kubevpn-test", "file", false}, {"/sys/x", "", false},
		{"/etc/kubevpn-test", "", false}, {"/etc/kubevpn-test/conf/app.yaml", "file", false}, {"/etc/ipython", "", false}, {"/etc/php/8.4/cli/conf.d", "", false},
		{"/gnu/store", "", false}, {"/run/current-system/sw/lib", "", false}, {"/run/opengl-driver/lib", "", false}, {"/nix/store/x", "", false},
		{"/etc", "", false}, {"/etc/ld.so.preload", "file", false}, {"/etc/gitconfig", "file", false}, {"/etc/passwd", "file", false}, {"/etc/profile.d/x.sh", "file", false},
		{"/etc/ssl/certs/kubevpn-test.pem", "file", false}, {"/etc/fish", "", false}, {"/opt", "", false}, {"/opt/kubevpn-test", "file", false},
		{home, "", false}, {home + "/.ssh", "", false}, {home + "/.config/x/y", "", false}, {links + "/home/.ssh/config", "file", false}, {dir, "", false},
		{links + "/etc/kubevpn-test.conf", "file", false},
		{app, "", false}, {app + "/tool", "file", false}, {filepath.Dir(app), "", false}, {filepath.Join(dir, "not-there"), "", false},
		{here + "/Makefile", "file", false}, {filepath.Dir(here), "", false},
	} {
		t.Run(tt.path+" "+tt.sub, func(t *testing.T) {
			warned := ""
			got := g.shown([]podenv.Mount{{Path: tt.path, Volume: "v", SubPath: tt.sub}}, volumes, func(s string) { warned = s })
			if shown := len(got) == 1; shown != tt.shown || shown != (warned == "") {
				t.Errorf("%+v, warned %q", got, warned)
			}
		})
	}
	t.Run("a link in a directory of this machine", func(t *testing.T) {
		var warned []string
		got := g.shown([]podenv.Mount{{Path: "/data", Volume: "disk", Source: links}, {Path: "/data/etc/kubevpn-test.conf", Volume: "v", SubPath: "file"},
			{Path: "/data/in", Volume: "v"}, {Path: "/more", Volume: "home", Source: home}, {Path: "/more/in", Volume: "v"}}, volumes, func(s string) { warned = append(warned, s) })
		if len(got) != 4 || len(warned) != 1 || !strings.Contains(warned[0], "/data/etc/kubevpn-test.conf") {
			t.Errorf("%+v, warned %q", got, warned)
		}
	})
}

// On a system with a read-only /usr, links lead elsewhere. The path of the pod counts, and so does the target.
func TestGuardFollowsLinksOfTheSystem(t *testing.T) {
	if why := refusesSystem("/usr/local/lib/python3.13/site-packages", 1, false); why == "" {
		t.Error("a volume is mounted at a path in /usr/local")
	}
	root, err := filepath.EvalSymlinks(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	target := filepath.Join(root, "var", "usrlocal")
	if err := errors.Join(os.MkdirAll(target, 0o755), os.Mkdir(filepath.Join(root, "usr"), 0o755), os.Symlink("../var/usrlocal", filepath.Join(root, "usr", "local"))); err != nil {
		t.Fatal(err)
	}
	places, err := elsewhere([]string{filepath.Join(root, "usr"), filepath.Join(root, "usr", "local")})
	if err != nil || len(places) != 1 || places[0].dir != target {
		t.Fatal(places, err)
	}
	g := &guard{own: places}
	for _, path := range []string{target + "/lib/python3.13/site-packages", filepath.Join(root, "usr", "local", "lib")} {
		if why := g.refuses(podenv.Mount{Path: path}, false, nil); why != whySystem {
			t.Errorf("%s: %q", path, why)
		}
	}
}

// A machine need not have /opt.
func TestGuardRefusesMissingSystemDirectories(t *testing.T) {
	if why := refusesSystem("/opt", 1, false); why == "" {
		t.Error("a volume is mounted at /opt")
	}
	if why := refusesSystem("/opt/kubevpn-test", 2, false); why != "" {
		t.Errorf("a new directory in it is refused: %s", why)
	}
}
