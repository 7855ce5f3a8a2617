package sandbox

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"runtime"
	"sync/atomic"
	"syscall"

	"golang.org/x/sys/unix"

	"kubevpn/pkg/pid1"
)

// errNotInit is what a user reads who runs the hidden command by hand.
var errNotInit = errors.New("this is started in a new sandbox, and there is no use in running it by hand")

// Init is a sandbox's first process. The command that Config.Init names calls it, and it does not return: it ends the
// process when the program ends. It returns an error if this process was not started by [Sandbox.Start].
func Init() error {
	if os.Getpid() != 1 {
		return errNotInit
	}
	unix.CloseOnExec(controlFD)
	unix.CloseOnExec(planFD)
	control, err := openWire(os.NewFile(controlFD, "control"))
	if err != nil {
		return fmt.Errorf("%w (%w)", errNotInit, err)
	}
	var pl plan
	planFile := os.NewFile(planFD, "plan")
	err = json.NewDecoder(io.NewSectionReader(planFile, 0, 1<<40)).Decode(&pl)
	planFile.Close()
	if err != nil {
		return fmt.Errorf("%w (reading the plan: %w)", errNotInit, err)
	}
	i := &initProcess{far: newFar(control, Interface), plan: pl, runs: make(chan uint64, 1)}
	id, err := i.run()
	if id != 0 {
		i.done(id, err)
	} else {
		i.say(report{Error: pid1.NewFailure(err)}, nil)
	}
	os.Exit(1)
	return nil
}

type initProcess struct {
	*far
	plan plan
	runs chan uint64 // the order to start the program

	family  pid1.Family
	program atomic.Pointer[pid1.Process] // nil: it does not run yet
	heard   *heard
	view    *view
}

// run returns only if the program was not started: why, and the order that said to start it, if there was one.
func (i *initProcess) run() (order uint64, err error) {
	i.heard = listen()
	v := &view{log: i.log}
	i.view = v
	i.nameSpace = v.setNames
	var device *os.File
	if i.plan.Network {
		if device, err = i.makeNetwork(); err != nil {
			return 0, fmt.Errorf("making the sandbox's network: %w", err)
		}
	}
	go i.watch()
	if err := v.build(i.plan.Mounts, i.plan.Volumes, i.plan.Network); err != nil {
		return 0, err
	}
	if err := os.Chdir(i.plan.Dir); err != nil {
		return 0, fmt.Errorf("entering the working directory: %w", err)
	}
	i.hand(device)
	go v.follow()
	order = <-i.runs
	p, err := i.start()
	if err != nil {
		return order, err
	}
	i.program.Store(p)
	// What is left open here keeps a pipe's reader waiting after the program has closed it.
	if err := pid1.CloseStandardFiles(); err != nil {
		i.log(slog.LevelWarn, "standard files stay open", "err", err.Error())
	}
	i.done(order, nil)
	go i.family.Reap(context.Background()) // as long as this process is
	<-p.Done()
	var ended ExitStatus
	ended.Code, ended.Signal = p.Exit()
	i.say(report{Ended: &ended}, nil)
	os.Exit(0)
	return order, nil
}

// watch does what the parent says, and ends everything when the parent is gone.
func (i *initProcess) watch() {
	for {
		var o order
		file, err := i.wire.receive(&o)
		if err != nil {
			os.Exit(128 + int(unix.SIGKILL))
		}
		switch {
		case o.Run:
			i.runs <- o.ID // there is one
		case o.Update:
			i.done(o.ID, i.view.store.update(file)) // what the parent knows to be ready has volumes
		case o.Signal > 0:
			if p := i.program.Load(); p != nil {
				go i.pass(p, syscall.Signal(o.Signal))
			}
		default:
			i.obey(o)
		}
		if file != nil {
			file.Close()
		}
	}
}

// pass sends the program a signal that the parent got, unless that was for the process group that the program is in, too.
func (i *initProcess) pass(p *pid1.Process, s syscall.Signal) {
	if !p.SharesGroup() || !i.heard.take(s) {
		p.Signal(s)
	}
}

// start starts the program from a thread that has given up what the program must not have.
func (i *initProcess) start() (p *pid1.Process, err error) {
	done := make(chan struct{})
	go func() {
		defer close(done)
		runtime.LockOSThread() // and never unlocked: the thread ends with the goroutine
		if err = dropPrivileges(); err != nil {
			err = fmt.Errorf("giving up capabilities: %w", err)
			return
		}
		p, err = i.family.Start(pid1.Program{Args: i.plan.Args, Env: i.plan.Env})
	}()
	<-done
	return p, err
}

// dropPrivileges makes that a program that this thread starts has no capabilities and gets none, as root or not. The bounding
// set keeps CAP_NET_RAW, which nobody gets (no_new_privs): the kernel does not execute a file that wants one out of the set, as
// most ping do, which works without.
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
