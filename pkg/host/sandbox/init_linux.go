package sandbox

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"os/signal"
	"runtime"
	"sync/atomic"
	"syscall"

	"golang.org/x/sys/unix"

	"kubevpn/pkg/host/subreaper"
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
	unix.CloseOnExec(planFD)
	control, err := openControl(os.NewFile(controlFD, "control"))
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
	i := &initProcess{server: newServer(control, Interface), plan: pl, runs: make(chan uint64, 1)}
	id, err := i.run()
	if id != 0 {
		i.reply(id, err)
	} else {
		i.send(report{Error: subreaper.NewFailure(err)}, nil)
	}
	os.Exit(1)
	return nil
}

type initProcess struct {
	*server
	plan plan
	runs chan uint64 // the order to start the program

	family  subreaper.Family
	program atomic.Pointer[subreaper.Process] // nil before it runs
}

// run returns only if it cannot start the program. order is the ID of the order to start it, or 0.
func (i *initProcess) run() (order uint64, err error) {
	// The terminal signals the whole process group, for the program. Without a handler the signal would end init.
	signal.Notify(make(chan os.Signal, 1), Signals()...)
	v := &view{log: i.log}
	i.setNames = v.setNames
	var device *os.File
	if i.plan.Network {
		if device, err = i.makeNetwork(); err != nil {
			return 0, fmt.Errorf("creating the sandbox's network: %w", err)
		}
	}
	var trees map[Mount]int
	if i.store, trees, err = newStore(i.plan.Volumes, i.plan.Mounts); err != nil {
		return 0, err
	}
	go i.watch()
	if err := v.build(i.plan.Mounts, trees, i.plan.Network); err != nil {
		return 0, err
	}
	if err := os.Chdir(i.plan.Dir); err != nil {
		return 0, fmt.Errorf("entering the working directory: %w", err)
	}
	i.sendReady(device)
	go v.follow()
	order = <-i.runs
	p, err := i.start()
	if err != nil {
		return order, err
	}
	i.program.Store(p)
	// If init kept a pipe open, its reader would see no EOF when the program closes it.
	if err := subreaper.CloseStandardFiles(); err != nil {
		i.log(slog.LevelWarn, "cannot close the standard files of the sandbox's init", "err", err.Error())
	}
	i.reply(order, nil)
	go i.family.Reap(context.Background())
	<-p.Done()
	var ended ExitStatus
	ended.Code, ended.Signal = p.Exit()
	i.send(report{Ended: &ended}, nil)
	os.Exit(0)
	return order, nil
}

// watch executes the parent's orders, and exits when the parent is gone.
func (i *initProcess) watch() {
	for {
		var o order
		file, err := i.control.receive(&o)
		if err != nil {
			os.Exit(128 + int(unix.SIGKILL))
		}
		switch {
		case o.Run:
			i.runs <- o.ID // the parent sends it once
		case o.Signal > 0:
			if p := i.program.Load(); p != nil {
				forward(p, syscall.Signal(o.Signal), o.OfTerminal)
			}
		default:
			i.handle(o, file)
		}
	}
}

// forward sends the program a signal that the parent received. A signal of the terminal has already reached the
// program, unless the program has its own process group.
func forward(p *subreaper.Process, s syscall.Signal, ofTerminal bool) {
	if !ofTerminal || !p.SharesGroup() {
		p.Signal(s)
	}
}

// start starts the program from a thread without privileges.
func (i *initProcess) start() (p *subreaper.Process, err error) {
	done := make(chan struct{})
	go func() {
		defer close(done)
		runtime.LockOSThread() // never unlocked, so the thread ends with the goroutine
		if err = dropPrivileges(); err != nil {
			err = fmt.Errorf("dropping capabilities: %w", err)
			return
		}
		p, err = i.family.Start(subreaper.Program{Args: i.plan.Args, Env: i.plan.Env})
	}()
	<-done
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
