package daemon

import (
	"context"
	"errors"
	"fmt"
	"hash/fnv"
	"maps"
	"os"
	"path/filepath"
	"sync"

	"kubevpn/internal/api"
	"kubevpn/internal/laptop/project"
)

// projects keeps what `kubevpn up` has started, by the file that lists it.
type projects struct {
	program string // kubevpn; empty: its path is unknown
	logs    string // directory for the output
	changed func()

	mu  sync.Mutex
	all map[string]*keptProject
}

// keptProject is one project.
type keptProject struct {
	set  *project.Set
	over chan struct{} // closed when it is down

	mu    sync.Mutex
	log   *os.File
	emits map[*int]func(api.Event) // of the requests that follow the output
}

// up makes a project as the request says. Without an error it returns when everything is ready or, if the request is
// attached and has started the project, when ctx, another request or the last program has ended it.
func (ps *projects) up(ctx context.Context, req project.Request, emit func(api.Event)) error {
	k, started, err := ps.keep(req.Project.File, !req.DryRun)
	if err != nil {
		return err
	}
	if req.DryRun {
		for _, d := range k.set.Differences(&req.Project) {
			emit(api.Event{Entry: d.Name, Detail: d.String(), Done: !d.Changes()})
		}
		return nil
	}
	defer k.follow(emit)()
	err = k.set.Apply(ctx, req.Project)
	if err == nil && started && req.Attached {
		emit(api.Event{Held: true})
		err = k.stay(ctx)
	}
	if started && (err != nil || req.Attached) {
		err = errors.Join(err, ps.end(k, req.Project.File))
	}
	return err
}

// stay returns when ctx has ended, or all programs, or the project is down.
func (k *keptProject) stay(ctx context.Context) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	go func() {
		select {
		case <-k.over:
			cancel()
		case <-ctx.Done():
		}
	}()
	return k.set.Ended(ctx)
}

// down ends the project of a file.
func (ps *projects) down(_ context.Context, file string, emit func(api.Event)) error {
	ps.mu.Lock()
	k := ps.all[file]
	ps.mu.Unlock()
	if k == nil {
		return api.Errorf(api.ExitNotConnected, "%s is not up", file)
	}
	defer k.follow(emit)()
	return ps.end(k, file)
}

// keep returns the project of a file. If there is none, started says so, and it has no entries.
func (ps *projects) keep(file string, create bool) (k *keptProject, started bool, err error) {
	ps.mu.Lock()
	defer ps.mu.Unlock()
	if k := ps.all[file]; k != nil {
		return k, false, nil
	}
	if ps.program == "" {
		return nil, false, api.Errorf(api.ExitDaemon, "the path of this program is unknown")
	}
	k = &keptProject{over: make(chan struct{}), emits: map[*int]func(api.Event){}}
	k.set = project.NewSet(ps.program, k.tell)
	if !create {
		return k, true, nil
	}
	h := fnv.New32a()
	h.Write([]byte(file)) // never fails (hash.Hash)
	name := filepath.Join(ps.logs, fmt.Sprintf("up-%08x.log", h.Sum32()))
	if k.log, err = os.OpenFile(name, os.O_WRONLY|os.O_CREATE|os.O_TRUNC, 0o600); err != nil {
		return nil, false, err
	}
	ps.all[file] = k
	return k, true, nil
}

// end ends a project. It may be called again.
func (ps *projects) end(k *keptProject, file string) error {
	err := k.set.Down(context.Background())
	ps.mu.Lock()
	defer ps.mu.Unlock()
	if ps.all[file] == k {
		delete(ps.all, file)
		close(k.over)
		err = errors.Join(err, k.log.Close())
		ps.changed()
	}
	return err
}

// tell gives a line of output to the log and to the requests that follow it.
func (k *keptProject) tell(name, text string) {
	k.mu.Lock()
	defer k.mu.Unlock()
	fmt.Fprintf(k.log, "%s | %s\n", name, text)
	for _, emit := range k.emits {
		emit(api.Event{Entry: name, Detail: text})
	}
}

// follow also gives the output to emit, until stop is called.
func (k *keptProject) follow(emit func(api.Event)) (stop func()) {
	k.mu.Lock()
	defer k.mu.Unlock()
	key := new(int)
	k.emits[key] = emit
	return func() {
		k.mu.Lock()
		defer k.mu.Unlock()
		delete(k.emits, key)
	}
}

func (ps *projects) status() (all []api.Project) {
	ps.mu.Lock()
	defer ps.mu.Unlock()
	for _, k := range ps.all {
		p := k.set.Status()
		p.Log = k.log.Name()
		all = append(all, p)
	}
	return all
}

func (ps *projects) inUse() bool {
	ps.mu.Lock()
	defer ps.mu.Unlock()
	return len(ps.all) > 0
}

// shutDown ends all projects.
func (ps *projects) shutDown() error {
	ps.mu.Lock()
	all := maps.Clone(ps.all)
	ps.mu.Unlock()
	var errs []error
	for file, k := range all {
		errs = append(errs, ps.end(k, file))
	}
	return errors.Join(errs...)
}
