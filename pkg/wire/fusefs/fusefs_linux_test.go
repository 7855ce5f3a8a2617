package fusefs

import (
	"bytes"
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"io/fs"
	"math/rand/v2"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"

	"golang.org/x/sync/errgroup"
	"golang.org/x/sys/unix"

	"kubevpn/internal/testenv"
	"kubevpn/pkg/wire/remotefs"
)

// serveDir names the directory that this process serves on descriptor 3. The program and the server are two processes,
// as they are for users: a Go program that waits for its own file system may stop its own garbage collector, for good.
const serveDir = "KUBEVPN_TEST_FUSE"

func TestMain(m *testing.M) {
	if dir := os.Getenv(serveDir); dir != "" {
		if err := serve(dir); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		return
	}
	if what := os.Getenv(program); what != "" {
		fmt.Print(outcome(run(strings.Fields(what))))
		return
	}
	os.Exit(m.Run())
}

func serve(dir string) error {
	near, far := net.Pipe()
	mode, dir, _ := strings.Cut(dir, ":")
	root, err := os.OpenRoot(dir)
	if err != nil {
		return err
	}
	server, err := remotefs.NewServer(root, mode == "ro")
	if err != nil {
		return err
	}
	syscall.Umask(0)
	c := remotefs.NewClient()
	ctx, cancel := context.WithCancel(context.Background())
	var g errgroup.Group
	if mode != "stuck" {
		g.Go(func() error { return server.Serve(ctx, far) })
	}
	g.Go(func() error { return c.Serve(ctx, near) })
	g.Go(func() error {
		defer cancel()
		return Serve(os.NewFile(3, "/dev/fuse"), c)
	})
	return g.Wait()
}

// mounted shows dir by FUSE, and returns where. "ro:" before dir means read-only, "stuck:" that nothing is answered. It
// ends with the test.
func mounted(t *testing.T, dir string) string {
	t.Helper()
	at, _ := mountedBy(t, dir)
	return at
}

// mountedBy is mounted, and returns the process that serves, too. It may be killed.
func mountedBy(t *testing.T, dir string) (string, *os.Process) {
	t.Helper()
	testenv.NeedRoot(t)
	if !strings.Contains(dir, ":") {
		dir = ":" + dir
	}
	at := t.TempDir()
	device, err := os.OpenFile("/dev/fuse", os.O_RDWR|unix.O_CLOEXEC, 0)
	if err != nil {
		t.Skip(err)
	}
	defer device.Close()
	options := fmt.Sprintf("fd=%d,rootmode=40000,user_id=%d,group_id=%d", device.Fd(), os.Geteuid(), os.Getegid())
	if err := unix.Mount("kubevpn", at, "fuse", unix.MS_NOSUID|unix.MS_NODEV, options); err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command(os.Args[0])
	cmd.Env, cmd.ExtraFiles, cmd.Stderr = append(os.Environ(), serveDir+"="+dir), []*os.File{device}, os.Stderr
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := unix.Unmount(at, unix.MNT_DETACH); err != nil {
			t.Error(err)
		}
		if err := cmd.Wait(); err != nil && cmd.ProcessState.Sys().(syscall.WaitStatus).Signal() != syscall.SIGKILL {
			t.Error(err) // it ends with its mount
		}
	})
	return at, cmd.Process
}

// outcome is what an operation returns, without paths.
func outcome(err error) string {
	var errno syscall.Errno
	if errors.As(err, &errno) {
		return errno.Error()
	}
	return fmt.Sprint(err)
}

// tree describes all files below a directory.
func tree(t *testing.T, dir string) string {
	t.Helper()
	var all []string
	err := filepath.WalkDir(dir, func(path string, _ fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		info, err := os.Lstat(path)
		if err != nil {
			return err
		}
		name := strings.TrimPrefix(path, dir)
		line := fmt.Sprint(name, " ", info.Mode())
		switch {
		case info.Mode().IsRegular():
			text, err := os.ReadFile(path)
			if err != nil {
				return err
			}
			links := info.Sys().(*syscall.Stat_t).Nlink
			line += fmt.Sprintf(" %d %x links %d", len(text), sha256.Sum256(text), links)
		case info.Mode()&fs.ModeSymlink != 0:
			to, err := os.Readlink(path)
			if err != nil {
				return err
			}
			line += " " + to
		}
		all = append(all, line)
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	return strings.Join(all, "\n")
}

// Random operations have the same outcome as in a local directory.
func TestOperationsAreThoseOfALocalDirectory(t *testing.T) {
	for seed := range uint64(20) {
		t.Run(fmt.Sprint(seed), func(t *testing.T) {
			t.Parallel()
			far, local := t.TempDir(), t.TempDir()
			near := mounted(t, far)
			random := rand.New(rand.NewPCG(seed, 1))
			open := map[string][2]*os.File{}
			defer func() {
				for _, f := range open {
					f[0].Close()
					f[1].Close()
				}
			}()
			for n := range 400 {
				what, do := operation(random, open)
				a, b := do(near, 0), do(local, 1)
				if a != b {
					t.Fatalf("operation %d, %s: %s, and in a local directory %s", n, what, a, b)
				}
			}
			for _, f := range open {
				if err := errors.Join(f[0].Sync(), f[1].Sync()); err != nil {
					t.Error(err)
				}
			}
			if a, b, c := tree(t, near), tree(t, local), tree(t, far); a != b || a != c {
				t.Errorf("the files are\n%s\nlocally\n%s\nand at the other end\n%s", a, b, c)
			}
		})
	}
}

// operation returns a random one, which returns its outcome in one of the two directories.
func operation(random *rand.Rand, open map[string][2]*os.File) (what string, do func(dir string, which int) string) {
	names := []string{"a", "b", "c", "d/a", "d/b", "d/e/a", "d", "d/e", "l"}
	name, other := names[random.IntN(len(names))], names[random.IntN(len(names))]
	data := bytes.Repeat([]byte{byte('a' + random.IntN(26))}, 1+random.IntN(300_000))
	off := int64(random.IntN(400_000))
	var opened []string
	for key := range open {
		opened = append(opened, key)
	}
	slices.Sort(opened)
	kinds := []func() (string, func(string, int) string){
		func() (string, func(string, int) string) {
			return "mkdir " + name, func(d string, _ int) string { return outcome(os.Mkdir(d+"/"+name, 0o755)) }
		},
		func() (string, func(string, int) string) {
			return "remove " + name, func(d string, _ int) string { return outcome(os.Remove(d + "/" + name)) }
		},
		func() (string, func(string, int) string) {
			return "rename " + name + " " + other, func(d string, _ int) string {
				return outcome(os.Rename(d+"/"+name, d+"/"+other))
			}
		},
		func() (string, func(string, int) string) {
			return "symlink " + name, func(d string, _ int) string { return outcome(os.Symlink(other, d+"/"+name)) }
		},
		func() (string, func(string, int) string) {
			return "link " + name + " " + other, func(d string, _ int) string {
				return outcome(os.Link(d+"/"+name, d+"/"+other))
			}
		},
		func() (string, func(string, int) string) {
			return "write " + name, func(d string, _ int) string {
				return outcome(os.WriteFile(d+"/"+name, data, 0o644))
			}
		},
		func() (string, func(string, int) string) {
			return "read " + name, func(d string, _ int) string {
				text, err := os.ReadFile(d + "/" + name)
				return fmt.Sprint(len(text), bytes.Count(text, []byte("a")), outcome(err))
			}
		},
		func() (string, func(string, int) string) {
			return "truncate " + name, func(d string, _ int) string { return outcome(os.Truncate(d+"/"+name, off)) }
		},
		func() (string, func(string, int) string) {
			return "chmod " + name, func(d string, _ int) string { return outcome(os.Chmod(d+"/"+name, 0o750)) }
		},
		func() (string, func(string, int) string) {
			flags := os.O_RDWR | os.O_CREATE
			if off%2 == 0 {
				flags |= os.O_APPEND
			}
			key := fmt.Sprint(name, len(open))
			return "open " + name, func(d string, which int) string {
				f, err := os.OpenFile(d+"/"+name, flags, 0o600)
				if err == nil {
					both := open[key]
					both[which] = f
					open[key] = both
				}
				return outcome(err)
			}
		},
	}
	if len(opened) > 0 {
		key := opened[random.IntN(len(opened))]
		kinds = append(kinds,
			func() (string, func(string, int) string) {
				return "write to open " + key, func(_ string, which int) string {
					_, err := open[key][which].Write(data)
					return outcome(err)
				}
			},
			func() (string, func(string, int) string) {
				return "read from open " + key, func(_ string, which int) string {
					buf := make([]byte, 200_000)
					n, err := open[key][which].ReadAt(buf, off)
					return fmt.Sprint(n, bytes.Count(buf[:n], []byte("b")), outcome(err))
				}
			},
			func() (string, func(string, int) string) {
				return "size of open " + key, func(_ string, which int) string {
					info, err := open[key][which].Stat()
					if err != nil {
						return outcome(err)
					}
					return fmt.Sprint(info.Size())
				}
			})
	}
	return kinds[random.IntN(len(kinds))]()
}
