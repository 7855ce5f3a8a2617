package dev

import (
	"context"
	"fmt"
	"net"
	"os"
	"slices"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"

	"kubevpn/internal/api"
	"kubevpn/internal/kube/podenv"
	"kubevpn/internal/kube/podfiles"
	"kubevpn/pkg/host/sandbox"
	"kubevpn/pkg/wakeup"
	"kubevpn/pkg/wire/fusefs"
	"kubevpn/pkg/wire/remotefs"
)

// redialPause is the pause between two attempts to reach the files of a pod again.
const redialPause = time.Second

// remoteVolumes are the mounts whose files stay in a pod, by path.
//
//	program ─ /dev/fuse ─▶ fusefs ─▶ remotefs.Client ═ pods/exec ═▶ remotefs.Server in the pod
//	                                       └── the pod goes: the next one that runs, for what is opened then
type remoteVolumes struct {
	cfg  *Config
	all  map[string]*remoteVolume
	work sync.WaitGroup
}

type remoteVolume struct {
	podenv.Mount
	files *remotefs.Client
	conn  net.Conn // of openRemote; serve owns it
}

// openRemote connects to the files of the remote ones of the mounts that are shown, before anything is started. Errors
// are *api.Error.
func openRemote(ctx context.Context, cfg *Config, mounts []podenv.Mount,
	shown []sandbox.Mount) (*remoteVolumes, error) {
	r := &remoteVolumes{cfg: cfg, all: map[string]*remoteVolume{}}
	for _, m := range mounts {
		if !m.Remote || !slices.ContainsFunc(shown, func(s sandbox.Mount) bool { return s.Path == m.Path }) {
			continue
		}
		v := &remoteVolume{Mount: m, files: remotefs.NewClient()}
		conn, how, err := r.open(ctx, v, cfg.Pod)
		if err != nil {
			r.close()
			return nil, fmt.Errorf("volume %s at %s: %w", m.Volume, m.Path, err)
		}
		v.conn, r.all[m.Path] = conn, v
		cfg.Show(api.Event{Step: fmt.Sprintf("Mounting volume %s at %s", m.Volume, m.Path), Detail: how, Done: true})
	}
	return r, nil
}

// open connects to the files of a mount in a pod.
func (r *remoteVolumes) open(ctx context.Context, v *remoteVolume, pod *corev1.Pod) (net.Conn, string, error) {
	if pod == nil || !podenv.Runs(pod) {
		return nil, "", api.Errorf(api.ExitWorkload, "no pod runs, and its files are only there").
			WithHint("Scale the workload up, or use a directory: --volume %s=DIRECTORY", v.Volume)
	}
	f, err := podfiles.Open(ctx, podfiles.Source{Cluster: r.cfg.Cluster, Pod: pod, Container: r.cfg.Container,
		Image: r.cfg.Image}, v.Path, !v.ReadOnly)
	if err != nil {
		return nil, "", err
	}
	if f.Name != "." {
		f.Conn.Close()
		return nil, "", api.Errorf(api.ExitUsage, "it is a file, and only directories can be mounted").
			WithHint("`kubevpn cp` copies it.")
	}
	return f.Conn, f.How, nil
}

// start serves the volumes until ctx ends. stop waits for that, and for the end of their file systems.
func (r *remoteVolumes) start(ctx context.Context) (stop func()) {
	ctx, cancel := context.WithCancel(ctx)
	for _, v := range r.all {
		r.work.Go(func() { r.serve(ctx, v) })
	}
	return func() {
		cancel()
		r.work.Wait()
	}
}

func (r *remoteVolumes) serve(ctx context.Context, v *remoteVolume) {
	for conn := v.conn; ; {
		err := v.files.Serve(ctx, conn)
		if ctx.Err() != nil {
			return
		}
		r.cfg.Warn(fmt.Sprintf("volume %s: %v; connecting to it again", v.Volume, err))
		for last := ""; ; {
			var pod *corev1.Pod
			if pod, err = r.cfg.Running(ctx); err == nil {
				conn, _, err = r.open(ctx, v, pod)
			}
			if err == nil {
				break
			}
			if !wakeup.Pause(ctx, redialPause) {
				return
			}
			if text := err.Error(); text != last {
				last = text
				r.cfg.Warn(fmt.Sprintf("volume %s: %v", v.Volume, err))
			}
		}
	}
}

// mounted serves the file system of a mount. It is sandbox.Config.Serve.
func (r *remoteVolumes) mounted(path string, device *os.File) {
	v := r.all[path]
	if v == nil {
		device.Close()
		return
	}
	r.work.Go(func() {
		if err := fusefs.Serve(device, v.files); err != nil {
			r.cfg.Warn(fmt.Sprintf("volume %s: %v", v.Volume, err))
		}
	})
}

// close closes what start has not taken.
func (r *remoteVolumes) close() {
	for _, v := range r.all {
		v.conn.Close()
	}
}
