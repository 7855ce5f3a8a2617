package docker

import (
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"os/signal"
	"path"

	"golang.org/x/sys/unix"

	"kubevpn/pkg/host/sandbox"
	"kubevpn/pkg/host/subreaper"
)

// runNetwork is the first process of the network container: it gives kubevpn a TUN and writes the volumes, until
// kubevpn has gone or the container is told to end.
func runNetwork() error {
	network, err := dialSocket("unixpacket", socketName)
	if err != nil {
		return err
	}
	conn, err := dialSocket("unix", filesName)
	if err != nil {
		return errors.Join(err, network.Close())
	}
	defer conn.Close()
	told := make(chan os.Signal, 1)
	signal.Notify(told, unix.SIGTERM, unix.SIGINT, unix.SIGHUP, unix.SIGQUIT)
	served := make(chan error, 1)
	go func() { served <- sandbox.Serve(network) }() // kubevpn hears of its errors
	kept := make(chan error, 1)
	go func() { kept <- keepFiles(conn, volumesAt) }()
	select {
	case err = <-kept:
	case <-told:
	}
	return err
}

// keepFiles writes the volumes that kubevpn sends over conn into dir.
func keepFiles(conn net.Conn, dir string) error {
	root, err := os.OpenRoot(dir)
	if err != nil {
		return err
	}
	defer root.Close()
	f := &keeper{root: root, volumes: map[string]*kept{}}
	w := newWire(conn)
	for {
		var o order
		if err := w.in.Decode(&o); err != nil {
			if closed(err) {
				return nil
			}
			return err
		}
		var r report
		var err error
		switch {
		case o.Volume != nil:
			err = f.write(*o.Volume)
		case o.Resolve != nil:
			r.Path, err = f.resolve(*o.Resolve)
		}
		r.Error = subreaper.NewFailure(err)
		if err := w.out.Encode(r); err != nil {
			return nil // it has gone
		}
	}
}

// keeper has the volumes of a run.
type keeper struct {
	root    *os.Root
	volumes map[string]*kept
}

type kept struct {
	*sandbox.Directory
	root   *os.Root
	volume volume
}

// write makes a volume, or has it show other files.
func (f *keeper) write(v volume) error {
	k := f.volumes[v.Name]
	if k == nil {
		var err error
		if k, err = f.create(v); err != nil {
			return fmt.Errorf("volume %s: %w", v.Name, err)
		}
		f.volumes[v.Name] = k
	}
	if err := k.show(v); err != nil {
		return fmt.Errorf("volume %s: %w", v.Name, err)
	}
	return nil
}

func (k *kept) show(v volume) error {
	k.volume = v
	if !v.Empty {
		shown := sandbox.Volume{Name: v.Name}
		for _, one := range v.Files {
			shown.Files = append(shown.Files, sandbox.File{Path: one.Path, Mode: one.Mode, Data: one.Data})
		}
		if err := k.Write(shown); err != nil {
			return err
		}
	}
	for _, point := range v.Points {
		if err := k.root.MkdirAll(point, 0o755); err != nil {
			return fmt.Errorf("making a place to mount at: %w", err)
		}
	}
	return nil
}

// create makes a volume's directory.
func (f *keeper) create(v volume) (*kept, error) {
	if v.Name != path.Base(v.Name) || !fs.ValidPath(v.Name) || v.Name == "." {
		return nil, errors.New("that is no name of a volume")
	}
	if err := f.root.Mkdir(v.Name, 0o755); err != nil {
		return nil, err
	}
	root, err := f.root.OpenRoot(v.Name)
	if err != nil {
		return nil, err
	}
	k := &kept{root: root, volume: v}
	k.Directory = sandbox.NewDirectory(root, k.settle)
	mode := fs.FileMode(0o755)
	if v.Empty {
		mode = 0o777
	}
	if v.Group != nil {
		mode |= fs.ModeSetgid
		if err := root.Chown(".", 0, int(*v.Group)); err != nil {
			return nil, err
		}
	}
	return k, root.Chmod(".", mode)
}

// settle gives files their owners, as pkg/volume/volume_linux.go of the kubelet does it, and with the group what it may
// read.
func (k *kept) settle(dir string) error {
	group, more := 0, fs.FileMode(0)
	if k.volume.Group != nil {
		group, more = int(*k.volume.Group), 0o440
	}
	for _, one := range k.volume.Files {
		name := path.Join(dir, one.Path)
		if err := k.root.Chown(name, int(one.Owner), group); err != nil {
			return err
		}
		if err := k.root.Chmod(name, one.Mode.Perm()|more); err != nil {
			return err
		}
	}
	return nil
}

// resolve is where in its volume a path is now. In an empty volume it is made.
func (f *keeper) resolve(p position) (string, error) {
	k := f.volumes[p.Volume]
	if k == nil {
		return "", fmt.Errorf("there is no volume %q", p.Volume)
	}
	at := path.Clean(p.Path)
	if !k.volume.Empty {
		var err error
		if at, err = k.Resolve(at); err != nil {
			return "", err
		}
		if _, err := k.root.Stat(at); err != nil {
			return "", fmt.Errorf("volume %s has nothing at %s: %w", p.Volume, p.Path, err)
		}
		return at, nil
	}
	if err := k.root.MkdirAll(at, 0o777); err != nil {
		return "", err
	}
	return at, k.root.Chmod(at, 0o777)
}
