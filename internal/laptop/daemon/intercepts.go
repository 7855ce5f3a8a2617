package daemon

import (
	"cmp"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"log/slog"
	"maps"
	"net"
	"reflect"
	"slices"
	"strings"
	"time"

	"golang.org/x/sync/errgroup"

	"kubevpn/internal/api"
	"kubevpn/internal/config"
	"kubevpn/internal/laptop/intercept"
)

// leaveTimeout limits the end of intercepts. If one takes longer, the daemon continues: the agents notice a few seconds
// later that the laptop has gone.
const leaveTimeout = 5 * time.Second

// intercepts owns the intercepts of this daemon, each on a connection.
type intercepts struct {
	registry[interceptKey, *interceptTask]
	factory Factory
	owner   Owner
	dial    func(ctx context.Context, network, address string) (net.Conn, error) // see intercept.Config
	logger  *slog.Logger
	timeout time.Duration // leaveTimeout; shorter in tests
}

func newIntercepts(factory Factory, owner Owner, logger *slog.Logger) *intercepts {
	is := &intercepts{factory: factory, owner: owner, logger: logger, timeout: leaveTimeout}
	is.tasks = map[interceptKey]*interceptTask{}
	return is
}

// interceptKey identifies an intercept. A second request with the same key joins or replaces it.
type interceptKey struct {
	connection, namespace, workload string
	clone                           bool // requests go to a clone
}

// id returns the ID of the intercept: 12 hex digits, the same for the same key.
func (k interceptKey) id() string {
	text := k.connection + "\n" + k.namespace + "\n" + k.workload
	if k.clone {
		text += "\nclone"
	}
	sum := sha256.Sum256([]byte(text))
	return hex.EncodeToString(sum[:])[:12]
}

// interceptTask runs one Intercept.
type interceptTask struct {
	task
	key             interceptKey
	spec            api.InterceptSpec
	intercept       Intercept
	begun           time.Time
	connection      *connectionTask
	onConnectionEnd func() // called when connection has ended
}

func (t *interceptTask) run(ctx context.Context) error {
	defer context.AfterFunc(t.connection.over, t.onConnectionEnd)()
	err := t.intercept.Run(ctx)
	if err == nil && ctx.Err() == nil {
		err = api.Errorf(api.ExitLost, "the intercept of %s ended", t.key.workload).
			WithHint("`kubevpn logs` has the details")
	}
	return err
}

// intercept makes the intercepts that req asks for, and their connection if it does not exist. It makes all of them or
// none: if one fails or ctx ends, it ends all that the request began. It calls emit with each event, at last with each
// Intercept. If req is attached, it returns when ctx or an intercept has ended, and ends all that it began before it
// returns.
func (cs *connections) intercept(ctx context.Context, req api.InterceptRequest, emit func(api.Event)) error {
	if len(req.Workloads) == 0 && !req.Attached {
		return api.Errorf(api.ExitUsage, "the request names no workload").
			WithHint("write a workload as TYPE/NAME: deployment/web")
	}
	req.Connect.Use = true
	t, err := cs.acquireConnection(ctx, req.Connect, emit)
	if err != nil {
		return err
	}
	c := t.status()
	emit(api.Event{Connection: &c})
	err = cs.intercepts.begin(ctx, t, req, emit)
	if !req.Attached && ctx.Err() == nil {
		cs.pin(t) // also after a failure: the user is about to try again
	}
	return errors.Join(err, cs.releaseAndReport(t, emit))
}

// begin is the part of connections.intercept that needs a connection.
func (is *intercepts) begin(ctx context.Context, c *connectionTask, req api.InterceptRequest,
	emit func(api.Event)) error {
	keys, err := is.resolve(ctx, c.id, req)
	if err != nil {
		return err
	}
	held := make([]*interceptTask, len(keys))
	defer func() { is.releaseAndReport(held, emit) }()
	group, gctx := errgroup.WithContext(ctx)
	for n, key := range keys {
		group.Go(func() error {
			var err error
			held[n], err = is.acquireIntercept(gctx, c, key, req, emit)
			return err
		})
	}
	if err := group.Wait(); err != nil {
		return err
	}
	for _, t := range held {
		status := is.statusOf(t)
		emit(api.Event{Intercept: &status})
	}
	if req.Attached {
		emit(api.Event{Held: true})
		return stay(ctx, held, c)
	}
	is.pin(held...)
	return nil
}

// resolve returns the keys of the workloads, each once, in the order of the request.
func (is *intercepts) resolve(ctx context.Context, connection string,
	req api.InterceptRequest) ([]interceptKey, error) {
	var keys []interceptKey
	if c := req.Spec.Clone; c != nil && c.Expose {
		return []interceptKey{{connection, req.Connect.Namespace, "service/" + c.Name, true}}, nil
	}
	for _, asked := range req.Workloads {
		name, err := is.factory.Workload(ctx, req.Connect, asked)
		if err != nil {
			return nil, err
		}
		key := interceptKey{connection, req.Connect.Namespace, name, req.Spec.Clone != nil}
		if !slices.Contains(keys, key) {
			keys = append(keys, key)
		}
	}
	return keys, nil
}

// acquireIntercept makes or joins an intercept, adds a waiter, and returns when the intercept is ready. The caller
// releases the intercept, also after an error.
func (is *intercepts) acquireIntercept(
	ctx context.Context, c *connectionTask, key interceptKey, req api.InterceptRequest, emit func(api.Event),
) (*interceptTask, error) {
	made, err := is.newTask(c, key, req)
	if err != nil {
		return nil, err
	}
	replaced := false
	t, joined, err := is.acquire(ctx, key, func(current *interceptTask) (*interceptTask, <-chan struct{}, error) {
		switch {
		case c.isOver():
			return nil, nil, c.cause()
		case current == nil:
			return made, nil, nil
		case sameSpec(current.spec, req.Spec):
			return current, nil, nil
		}
		current.logger.Info("intercept is replaced")
		current.endLocked(errReplaced)
		replaced = true
		return nil, current.over.Done(), nil
	})
	if err != nil {
		return nil, err
	}
	if joined && t.wasReady() {
		emit(api.Event{Step: "Intercepting " + key.workload,
			Detail: "already active with these settings", Done: true})
		return t, nil
	}
	err = t.follow(ctx, emit)
	if err != nil && replaced {
		emit(api.Event{Warning: "the intercept of " + key.workload + " with its former settings has ended"})
	}
	if errors.Is(err, errReplaced) {
		err = api.Errorf(api.ExitLost, "another command intercepts %s with other settings", key.workload).
			WithHint("`kubevpn leave %s` ends it. Then try again.", key.workload)
	}
	return t, err
}

// newTask returns a task that has not started.
func (is *intercepts) newTask(c *connectionTask, key interceptKey, req api.InterceptRequest) (*interceptTask, error) {
	events := new(eventLog)
	i, err := is.factory.NewIntercept(req.Connect, c.conn, intercept.Config{
		Namespace: key.namespace, Workload: key.workload, Spec: req.Spec, Owner: is.owner.Name, Key: is.owner.Key,
		Dial: is.dial, Progress: events.add, Logger: is.logger,
		ModeSource: req.Connect.Setting(string(config.KeyMode)).Source,
	})
	if err != nil {
		return nil, err
	}
	logger := is.logger.With("intercept", key.id(), "workload", key.workload, "namespace", key.namespace)
	t := &interceptTask{
		task: newTask("intercept", logger, i.Begun(), events), key: key, spec: req.Spec, intercept: i,
		begun: time.Now(), connection: c,
	}
	t.onConnectionEnd = func() {
		is.mu.Lock()
		defer is.mu.Unlock()
		t.endLocked(c.cause())
	}
	return t, nil
}

// sameSpec reports whether two specifications ask for the same.
func sameSpec(a, b api.InterceptSpec) bool {
	a.Mode, b.Mode = cmp.Or(a.Mode, api.ModeAuto), cmp.Or(b.Mode, api.ModeAuto)
	return reflect.DeepEqual(a, b)
}

// stay returns nil when ctx has ended, or the cause when an intercept or the connection has ended.
func stay(ctx context.Context, held []*interceptTask, connection *connectionTask) error {
	first, end := context.WithCancelCause(ctx)
	defer end(nil)
	defer context.AfterFunc(connection.over, func() { end(connection.cause()) })()
	for _, i := range held {
		defer context.AfterFunc(i.over, func() { end(i.cause()) })()
	}
	<-first.Done()
	if ctx.Err() != nil {
		return nil
	}
	return context.Cause(first)
}

// releaseAndReport removes a waiter from each intercept, and waits for the intercepts that this ends.
func (is *intercepts) releaseAndReport(held []*interceptTask, emit func(api.Event)) {
	// The registry has logged the error. The client has gone, or receives a more important error.
	_ = is.awaitAll(is.release(held...), emit)
}

// leave ends the intercepts that req names, also failed ones. It emits each end.
func (is *intercepts) leave(_ context.Context, req api.LeaveRequest, emit func(api.Event)) error {
	ending, err := is.named(req)
	if err != nil {
		return err
	}
	is.end(errStopped, ending...)
	return is.awaitAll(ending, emit)
}

// leaveConnections ends the intercepts on connections.
func (is *intercepts) leaveConnections(ids []string, emit func(api.Event)) error {
	ending := is.filter(func(t *interceptTask) bool { return slices.Contains(ids, t.key.connection) })
	is.end(errStopped, ending...)
	return is.awaitAll(ending, emit)
}

// awaitAll waits for intercepts that are ending, and emits each end. The error names those that take too long.
func (is *intercepts) awaitAll(ending []*interceptTask, emit func(api.Event)) error {
	step := func(t *interceptTask) string { return "Leaving " + t.key.workload }
	for _, t := range ending {
		emit(api.Event{Step: step(t)})
	}
	late := is.await(is.timeout, ending...)
	var errs []error
	for _, t := range ending {
		if slices.Contains(late, t) {
			errs = append(errs, api.Errorf(api.ExitUnexpected, "leaving %s took longer than %v", t.key.workload,
				is.timeout).
				WithHint("within seconds, the agents notice that this machine has gone, and requests reach the\n"+
					"application; `kubevpn logs` may show the cause"))
			continue
		}
		status := is.statusOf(t)
		emit(api.Event{Step: step(t), Done: true, Intercept: &status})
	}
	return errors.Join(errs...)
}

// named returns the intercepts that req names.
func (is *intercepts) named(req api.LeaveRequest) ([]*interceptTask, error) {
	meant := func(i *interceptTask) bool { return req.Connection == "" || req.Connection == i.key.connection }
	if req.All {
		return is.filter(meant), nil
	}
	var out []*interceptTask
	for _, name := range req.Workloads {
		found := is.filter(func(i *interceptTask) bool {
			return name == i.key.id() || meant(i) && sameWorkload(name, i.key.workload) &&
				(req.Namespace == "" || req.Namespace == i.key.namespace)
		})
		switch {
		case len(found) == 0:
			return nil, api.Errorf(api.ExitWorkload, "%s is not intercepted from this machine", name).
				WithHint("`kubevpn status` lists intercepts; `kubevpn reset` removes intercepts of all owners")
		case slices.ContainsFunc(found, func(i *interceptTask) bool {
			return i.key.connection != found[0].key.connection || i.key.namespace != found[0].key.namespace
		}):
			ids := api.Texts(found, func(i *interceptTask) string {
				return i.key.id() + " (namespace " + i.key.namespace + ")"
			})
			return nil, api.Errorf(api.ExitUsage, "%s is intercepted %d times", name, len(found)).
				WithHint("specify its namespace with -n, or one of %s", strings.Join(ids, ", "))
		}
		for _, i := range found { // two if both this machine and a clone are targets
			if !slices.Contains(out, i) {
				out = append(out, i)
			}
		}
	}
	return out, nil
}

// filter returns the intercepts that want accepts, the oldest first.
func (is *intercepts) filter(want func(*interceptTask) bool) []*interceptTask {
	is.mu.Lock()
	defer is.mu.Unlock()
	found := slices.SortedFunc(maps.Values(is.tasks), func(a, b *interceptTask) int {
		return cmp.Or(a.begun.Compare(b.begun), cmp.Compare(a.key.workload, b.key.workload),
			cmp.Compare(a.key.id(), b.key.id()))
	})
	return slices.DeleteFunc(found, func(t *interceptTask) bool { return !want(t) })
}

// status lists the intercepts, the oldest first.
func (is *intercepts) status() []api.Intercept {
	out := []api.Intercept{}
	for _, i := range is.filter(func(*interceptTask) bool { return true }) {
		out = append(out, is.statusOf(i))
	}
	return out
}

// statusOf returns the status of an intercept, with its ID, connection and owner.
func (is *intercepts) statusOf(i *interceptTask) api.Intercept {
	is.mu.Lock()
	defer is.mu.Unlock()
	s := i.intercept.Status()
	switch {
	case i.failed != nil:
		s.State, s.Error = api.InterceptFailed, i.failed
	case i.ending:
		s.State = api.InterceptLeaving
	}
	if s.Ports == nil {
		s.Ports = []api.PortMap{}
	}
	if s.Pods == nil {
		s.Pods = []api.InterceptedPod{}
	}
	s.ID, s.Connection, s.Namespace, s.Workload = i.key.id(), i.key.connection, i.key.namespace, i.key.workload
	s.Owner, s.Since = is.owner.Name, i.begun
	return s
}
