package sandbox

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/signal"
	"runtime"

	"golang.org/x/sys/unix"

	"kubevpn/pkg/host/subreaper"
	"kubevpn/pkg/host/unixsocket"
)

// errNotInit is the error for a user who runs the hidden command.
var errNotInit = errors.New("`kubevpn dev` runs this command in a new sandbox; it does nothing useful by hand")

// Init runs the first process of a sandbox. The command of Config.Init calls it. Init exits when the program has
// ended, and returns only if [Sandbox.Start] did not start this process.
func Init() error {
	if os.Getpid() != 1 {
		return errNotInit
	}
	unix.CloseOnExec(controlFD)
	unix.CloseOnExec(configFD)
	control, err := unixsocket.Open(os.NewFile(controlFD, "control"), maxMessage)
	if err != nil {
		return fmt.Errorf("%w (%w)", errNotInit, err)
	}
	var config initConfig
	configFile := os.NewFile(configFD, "config")
	err = fromMemory(configFile, &config)
	configFile.Close()
	if err != nil {
		return fmt.Errorf("%w (reading its configuration: %w)", errNotInit, err)
	}
	i := &initProcess{server: newServer(control, Interface), config: config}
	i.server.start = i.start
	// The terminal signals the whole process group, for the program. Without a handler the signal would end init.
	signal.Notify(make(chan os.Signal, 1), Signals()...)
	if err := i.prepare(); err != nil {
		i.send(report{Error: subreaper.NewFailure(err)}, nil)
		os.Exit(1)
	}
	i.wait()
	os.Exit(0)
	return nil
}

type initProcess struct {
	*server
	config initConfig
	family subreaper.Family
}

// prepare creates the network and mounts the files, and then executes orders.
func (i *initProcess) prepare() error {
	if name := i.config.Hostname; name != "" {
		if err := unix.Sethostname([]byte(name)); err != nil {
			return fmt.Errorf("setting the host name %s: %w", name, err)
		}
	}
	v := &view{log: i.log, files: func(at string, device *os.File) { i.send(report{Files: at}, device) }}
	i.setNames = v.setNames
	var device *os.File
	var err error
	if i.config.Network {
		if device, err = i.makeNetwork(); err != nil {
			return fmt.Errorf("creating the sandbox's network: %w", err)
		}
	}
	var trees map[Mount]int
	if i.store, trees, err = newStore(i.config.Volumes, i.config.Mounts); err != nil {
		return err
	}
	go func() { // it also ends this process if the parent dies meanwhile
		_ = i.serve()
		os.Exit(128 + int(unix.SIGKILL))
	}()
	if err := v.build(i.config.Mounts, trees, i.config.Network || i.config.Names); err != nil {
		return err
	}
	if err := os.Chdir(i.config.Dir); err != nil {
		return fmt.Errorf("entering the working directory: %w", err)
	}
	i.sendReady(device)
	go v.follow()
	return nil
}

// start starts the program from a thread without privileges.
func (i *initProcess) start(program subreaper.Program) (p *subreaper.Process, err error) {
	done := make(chan struct{})
	go func() {
		defer close(done)
		runtime.LockOSThread() // never unlocked, so the thread ends with the goroutine
		if err = dropPrivileges(); err != nil {
			err = fmt.Errorf("dropping capabilities: %w", err)
			return
		}
		p, err = i.family.Start(program)
	}()
	<-done
	go i.family.Reap(context.Background())
	return p, err
}

// dropPrivileges removes all capabilities from the programs that this thread starts, also for root. The bounding
// set keeps CAP_NET_RAW, which no_new_privs makes unattainable: the kernel does not execute a file whose
// capabilities are outside the set, such as most ping binaries, and ping works without it.
func dropPrivileges() error {
	for c := uintptr(0); ; c++ {
		if c == unix.CAP_NET_RAW {
			continue
		}
		err := unix.Prctl(unix.PR_CAPBSET_DROP, c, 0, 0, 0)
		if errors.Is(err, unix.EINVAL) && c > 0 {
			break // past the last
		}
		if err != nil {
			return err
		}
	}
	if err := unix.Prctl(unix.PR_CAP_AMBIENT, unix.PR_CAP_AMBIENT_CLEAR_ALL, 0, 0, 0); err != nil {
		return err
	}
	var none [2]unix.CapUserData
	header := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
	if err := unix.Capset(&header, &none[0]); err != nil {
		return err
	}
	return unix.Prctl(unix.PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
}
