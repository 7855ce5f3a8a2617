package lab

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"time"

	"golang.org/x/sys/unix"
)

// hidden lists the machine's directories that each node replaces with its own.
func hidden() []string { return []string{"/run", "/var/lib", "/var/log"} }

// kernelSettings returns the settings that kubelet wants to write. They belong to the whole machine, so the node gets
// files in their place.
func kernelSettings() map[string]string {
	return map[string]string{
		"vm/overcommit_memory":      "1",
		"vm/panic_on_oom":           "0",
		"kernel/panic":              "10",
		"kernel/panic_on_oops":      "1",
		"kernel/keys/root_maxkeys":  "1000000",
		"kernel/keys/root_maxbytes": "25000000",
	}
}

// startNode creates a node and starts containerd on it.
func (l *Lab) startNode(ctx context.Context, n int) error {
	place := fmt.Sprintf("node%d", n)
	if err := l.writeNode(n); err != nil {
		return err
	}
	if l.config.guest(n) {
		if err := l.startGuest(ctx, n); err != nil {
			return err
		}
	} else {
		// A process that only waits keeps the mount namespace alive.
		holder := Process{Name: "node-" + place, Place: place, Args: []string{l.programs.Pause}}
		if err := l.start(holder, func(*exec.Cmd) error { return l.mountNode(n) }); err != nil {
			return err
		}
	}
	containerd, err := systemProgram("containerd")
	if err != nil {
		return err
	}
	return l.startOnNode("containerd", n, containerd, "--config", filepath.Join(l.nodeDir(n), "containerd.toml"))
}

// startOnNode starts one of a node's own programs.
func (l *Lab) startOnNode(name string, n int, argv ...string) error {
	place := fmt.Sprintf("node%d", n)
	return l.start(Process{Name: name + "-" + place, Place: place, Args: l.inPlace(place, name, argv...)}, nil)
}

// cniFile is the path of a node's pod network configuration.
const cniFile = "/var/lib/lab-cni/10-lab.conflist"

// writeNode writes the files that the programs of a node read.
func (l *Lab) writeNode(n int) error {
	dir := l.nodeDir(n)
	proxy, err := l.config.proxyConfig(n, l.dir())
	if err != nil {
		return err
	}
	registries := filepath.Join(dir, "registries")
	files := map[string]string{
		"containerd.toml": containerdConfig(l.cniDir, l.snapshotterOf(n), registries),
		"root" + cniFile:  l.config.cniConfig(n),
		"kubelet.yaml":    l.config.kubeletConfig(n, l.dir()),
		"kube-proxy.yaml": proxy,
		"resolv.conf":     l.config.nodeResolv(),

		"registries/" + l.config.Registry().String() + "/hosts.toml": l.config.registryConfig(),
	}
	for name, content := range kernelSettings() {
		files["proc/"+name] = content + "\n"
	}
	for name, content := range files {
		file := filepath.Join(dir, name)
		if err := os.MkdirAll(filepath.Dir(file), 0o755); err != nil {
			return err
		}
		if err := os.WriteFile(file, []byte(content), 0o644); err != nil {
			return err
		}
	}
	for _, h := range hidden() {
		if err := os.MkdirAll(filepath.Join(dir, "root", h), 0o755); err != nil {
			return err
		}
	}
	// containerd.io stores named namespaces here.
	return os.MkdirAll(filepath.Join(dir, "root/run/netns"), 0o755)
}

// mountNode gives the current thread a mount namespace and a host name for a node.
func (l *Lab) mountNode(n int) error {
	if err := unix.Unshare(unix.CLONE_NEWNS | unix.CLONE_NEWUTS); err != nil {
		return fmt.Errorf("making a mount namespace: %w", err)
	}
	if err := unix.Sethostname([]byte(l.config.NodeName(n))); err != nil {
		return fmt.Errorf("setting the host name: %w", err)
	}
	if err := unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""); err != nil {
		return fmt.Errorf("making mounts private: %w", err)
	}
	if err := forgetNamespaces(); err != nil {
		return err
	}
	root := filepath.Join(l.nodeDir(n), "root")
	if err := keepVisible(root, l.dir(), filepath.Dir(l.programs.Kube)); err != nil {
		return err
	}
	resolv, err := filepath.EvalSymlinks("/etc/resolv.conf") // with systemd-resolved it is in /run
	if err == nil {
		for _, h := range hidden() {
			if !below(resolv, h) {
				continue
			}
			if err := os.MkdirAll(filepath.Join(root, filepath.Dir(resolv)), 0o755); err != nil {
				return err
			}
			if err := os.WriteFile(filepath.Join(root, resolv), nil, 0o644); err != nil {
				return err
			}
		}
	} else if !errors.Is(err, os.ErrNotExist) {
		return err
	}
	for _, dir := range hidden() {
		if err := bind(filepath.Join(root, dir), dir); err != nil {
			return err
		}
		// kubelet and containerd pass mounts on to containers (mountPropagation).
		if err := unix.Mount("", dir, "", unix.MS_REC|unix.MS_SHARED, ""); err != nil {
			return fmt.Errorf("sharing %s: %w", dir, err)
		}
	}
	for name := range kernelSettings() {
		if err := bind(filepath.Join(l.nodeDir(n), "proc", name), "/proc/sys/"+name); err != nil {
			return err
		}
	}
	if resolv == "" {
		return nil
	}
	return bind(filepath.Join(l.nodeDir(n), "resolv.conf"), resolv)
}

// keepVisible mounts directories at the same path into a node's own /run, /var/lib and /var/log, which would otherwise
// hide them.
func keepVisible(root string, dirs ...string) error {
	for _, dir := range dirs {
		for _, h := range hidden() {
			if !below(dir, h) {
				continue
			}
			if err := os.MkdirAll(filepath.Join(root, dir), 0o755); err != nil {
				return err
			}
			if err := bind(dir, filepath.Join(root, dir)); err != nil {
				return err
			}
		}
	}
	return nil
}

func bind(source, target string) error {
	if err := unix.Mount(source, target, "", unix.MS_BIND|unix.MS_REC, ""); err != nil {
		return fmt.Errorf("mounting %s on %s: %w", source, target, err)
	}
	return nil
}

// loadImages imports image archives into a node's containerd when that responds.
func (l *Lab) loadImages(ctx context.Context, n int, files ...string) error {
	place := fmt.Sprintf("node%d", n)
	err := l.poll(ctx, 30*time.Second, []string{"containerd-" + place}, func(context.Context) error {
		_, err := l.run(place, nil, "ctr", "--connect-timeout", "2s", "version")
		return err
	})
	if err != nil {
		return err
	}
	for _, file := range files {
		if err := ctx.Err(); err != nil {
			return err
		}
		archive, err := os.Open(file)
		if err != nil {
			return err
		}
		// Use standard input, because the file may be invisible on the node.
		_, err = l.run(place, archive, "ctr", "--namespace", "k8s.io", "images", "import", "--snapshotter",
			l.snapshotterOf(n), "-")
		archive.Close()
		if err != nil {
			return fmt.Errorf("loading %s: %w", file, err)
		}
	}
	return nil
}

// startKubelet starts kubelet and kube-proxy on a node. Its containerd must respond and its Node object must exist.
func (l *Lab) startKubelet(n int) error {
	err := l.startOnNode("kubelet", n, l.programs.Kube, "kubelet",
		"--config="+filepath.Join(l.nodeDir(n), "kubelet.yaml"),
		"--kubeconfig="+l.pki(fmt.Sprintf("node%d.kubeconfig", n)),
		"--hostname-override="+l.config.NodeName(n),
		"--node-ip="+joined(l.config.Families(), func(f Family) netip.Addr { return f.Node(n) }),
		"--v=2",
	)
	if err != nil || l.config.ProxyMode == ProxyNone {
		return err
	}
	return l.startOnNode("kube-proxy", n, l.programs.Kube, "kube-proxy",
		"--config="+filepath.Join(l.nodeDir(n), "kube-proxy.yaml"))
}
