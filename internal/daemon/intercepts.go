package daemon

import (
	"bytes"
	"cmp"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"log/slog"
	"net"
	"slices"
	"strings"
	"sync"
	"time"

	"golang.org/x/sync/errgroup"

	"kubevpn/internal/api"
)

// leaveTimeout is how long the end of intercepts may take before what is behind it goes on. The agents miss the laptop by
// themselves a few seconds later.
const leaveTimeout = 5 * time.Second

var (
	errReplaced        = errors.New("replaced") // the cause of an intercept's end that another one takes the place of
	errConnectionEnded = api.Errorf(api.ExitLost, "the connection to the cluster ended").
				WithHint("`kubevpn status` tells why, if it was not asked to; `kubevpn proxy` connects again")
)

// intercepts are those of this daemon, each on a connection of its set:
//
//	            POST /v1/intercept               Run returns an error
//	(absent) ──────────────────────▶ starting ──────────────────────────────▶ (absent), the error is the answer
//	                                     │ Begun()
//	                                     ▼        Run returns an error, or the connection ended
//	                            active, waiting ────────────────────────────▶ failed ── proxy, leave, disconnect ─▶ (absent)
//	                                     │ leave, disconnect, quit, another specification
//	                                     ▼
//	                                  leaving ── Run has returned ─▶ (absent)
type intercepts struct {
	maker   Interceptor
	owner   Owner
	dial    func(ctx context.Context, network, address string) (net.Conn, error) // to where the requests go; nil: this machine
	logger  *slog.Logger
	timeout time.Duration // leaveTimeout; tests have less patience

	mu    sync.Mutex
	byKey map[interceptKey]*intercepted
	tasks sync.WaitGroup
}

func newIntercepts(maker Interceptor, owner Owner, logger *slog.Logger) *intercepts {
	return &intercepts{maker: maker, owner: owner, logger: logger, timeout: leaveTimeout, byKey: map[interceptKey]*intercepted{}}
}

// interceptKey is what there is one intercept of.
type interceptKey struct {
	connection, namespace, workload string
	clone                           bool // requests go to a clone
}

// id is 12 hex digits, the same for the same key.
func (k interceptKey) id() string {
	text := k.connection + "\n" + k.namespace + "\n" + k.workload
	if k.clone {
		text += "\nclone"
	}
	sum := sha256.Sum256([]byte(text))
	return hex.EncodeToString(sum[:])[:12]
}

// intercepted is an Intercept, from the request on until it is gone.
type intercepted struct {
	task
	key       interceptKey
	spec      api.InterceptSpec
	intercept Intercept
	begun     time.Time
	last      api.Intercept // its status when it failed; guarded by intercepts.mu
}

// intercept makes the intercepts that req asks for, on the connection that it asks for, which is made where it is not there.
// All of them, or none: what the request began ends when another one of it fails, or ctx ends. It calls begin with the
// connection's ID, and emit with what happens, at last with each Intercept. If req is attached, it returns when ctx or an
// intercept has ended, and nothing that it began is left then.
func (s *set) intercept(ctx context.Context, req api.InterceptRequest, begin func(id string), emit func(api.Event)) error {
	switch {
	case s.intercepts.maker == nil:
		return api.Errorf(api.ExitUnexpected, "this daemon makes no intercepts")
	case len(req.Workloads) == 0 && !req.Attached:
		return api.Errorf(api.ExitUsage, "no workload is named").WithHint("name it as TYPE/NAME: deployment/web")
	}
	req.Connect.Use = true
	l, err := s.hold(ctx, req.Connect, begin, emit)
	if err != nil {
		return err
	}
	defer s.release(l, emit)
	c := l.status()
	emit(api.Event{Time: time.Now(), Connection: &c})
	err = s.intercepts.begin(ctx, l, req, emit)
	if !req.Attached && ctx.Err() == nil {
		s.retain(l) // also when it failed: the user is about to try something else
	}
	return err
}

// begin is what is left of set.intercept when there is a connection.
func (is *intercepts) begin(ctx context.Context, l *live, req api.InterceptRequest, emit func(api.Event)) error {
	keys, err := is.resolve(ctx, l.id, req)
	if err != nil {
		return err
	}
	held := make([]*intercepted, len(keys))
	defer func() { is.release(held, emit) }()
	group, gctx := errgroup.WithContext(ctx)
	for n, key := range keys {
		group.Go(func() error {
			var err error
			held[n], err = is.hold(gctx, l, key, req, emit)
			return err
		})
	}
	if err := group.Wait(); err != nil {
		return err
	}
	for _, i := range held {
		status := is.statusOf(i)
		emit(api.Event{Time: time.Now(), Intercept: &status})
	}
	if req.Attached {
		emit(api.Event{Time: time.Now(), Held: true})
		return stay(ctx, held, l.done)
	}
	is.retain(held)
	return nil
}

// resolve gives the workloads their names, each once, in the order of the request.
func (is *intercepts) resolve(ctx context.Context, connection string, req api.InterceptRequest) ([]interceptKey, error) {
	var keys []interceptKey
	for _, asked := range req.Workloads {
		name, err := is.maker.Resolve(ctx, req.Connect, asked)
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

// hold returns the intercept with a waiter added, when it is ready; it is made if need be.
func (is *intercepts) hold(ctx context.Context, l *live, key interceptKey, req api.InterceptRequest, emit func(api.Event)) (*intercepted, error) {
	i, joined, err := is.obtain(ctx, l, key, req)
	if err != nil {
		return nil, err
	}
	if joined && i.wasReady() {
		emit(api.Event{Time: time.Now(), Step: "Intercepting " + key.workload, Detail: "is there already, as asked for", Done: true})
		return i, nil
	}
	err = i.follow(ctx, emit)
	if errors.Is(err, errReplaced) {
		err = api.Errorf(api.ExitLost, "another command intercepts %s otherwise", key.workload)
	}
	return i, err
}

// obtain returns the intercept with a waiter added, starting it if need be.
func (is *intercepts) obtain(ctx context.Context, l *live, key interceptKey, req api.InterceptRequest) (i *intercepted, joined bool, err error) {
	for {
		i, joined, busy, err := is.tryObtain(l, key, req)
		if busy == nil {
			return i, joined, err
		}
		select {
		case <-busy:
		case <-ctx.Done():
			return nil, false, context.Cause(ctx)
		}
	}
}

// tryObtain is obtain without waiting: what is in the way is busy, a channel that says when.
func (is *intercepts) tryObtain(l *live, key interceptKey, req api.InterceptRequest) (i *intercepted, joined bool, busy <-chan struct{}, err error) {
	feed := newFeed()
	made, err := is.maker.Intercept(InterceptConfig{
		Account: req.Connect, Connection: l.conn, Workload: key.workload, Spec: req.Spec,
		Owner: is.owner, Dial: is.dial, Progress: feed.add, Logger: is.logger,
	})
	if err != nil {
		return nil, false, nil, err
	}
	is.mu.Lock()
	defer is.mu.Unlock()
	old := is.byKey[key]
	switch {
	case isClosed(l.done):
		return nil, false, nil, errConnectionEnded
	case old == nil, old.failed != nil:
	case old.ending:
		return nil, false, old.done, nil
	case sameSpec(old.spec, req.Spec):
		old.waiters++
		return old, true, nil, nil
	default:
		is.logger.Info("intercept is replaced", "workload", key.workload)
		old.end(errReplaced)
		return nil, false, old.done, nil
	}
	ctx, cancel := context.WithCancelCause(context.Background()) // it outlives the request
	i = &intercepted{task: newTask("intercept", made.Begun(), feed, cancel), key: key, spec: req.Spec, intercept: made, begun: time.Now()}
	is.byKey[key] = i
	is.tasks.Go(func() { is.run(ctx, i, l.done) })
	return i, false, nil, nil
}

// sameSpec reports whether two specifications ask for the same.
func sameSpec(a, b api.InterceptSpec) bool {
	a.Mode, b.Mode = cmp.Or(a.Mode, api.ModeAuto), cmp.Or(b.Mode, api.ModeAuto)
	left, errLeft := json.Marshal(a)
	right, errRight := json.Marshal(b)
	return errLeft == nil && errRight == nil && bytes.Equal(left, right)
}

// run is the life of an intercept on a connection, which has ended when connection is closed.
func (is *intercepts) run(ctx context.Context, i *intercepted, connection <-chan struct{}) {
	is.logger.Info("intercept begins", "intercept", i.key.id(), "workload", i.key.workload, "namespace", i.key.namespace)
	is.tasks.Go(func() {
		select {
		case <-connection:
			is.mu.Lock()
			defer is.mu.Unlock()
			i.end(errConnectionEnded)
		case <-ctx.Done():
		}
	})
	is.tasks.Go(func() { // nobody waits for what is said later
		select {
		case <-i.ready:
			i.feed.close()
		case <-ctx.Done():
		}
	})
	err := i.intercept.Run(ctx)
	i.err = is.verdict(ctx, i, err)
	is.ended(i)
}

// verdict is why an intercept ended: errDisconnected or errReplaced if it was asked to, else an *api.Error.
func (is *intercepts) verdict(ctx context.Context, i *intercepted, err error) error {
	switch {
	case ctx.Err() != nil:
		if err != nil && !errors.Is(err, context.Canceled) {
			is.logger.Warn("intercept ended with an error", "workload", i.key.workload, "err", err)
		}
		return context.Cause(ctx)
	case err == nil:
		return api.Errorf(api.ExitLost, "the intercept of %s ended", i.key.workload).WithHint("`kubevpn logs` has the details")
	}
	return api.AsError(err)
}

// ended takes the intercept out, or keeps it as failed, so that `status` can tell.
func (is *intercepts) ended(i *intercepted) {
	is.mu.Lock()
	defer is.mu.Unlock()
	asked := errors.Is(i.err, errDisconnected) || errors.Is(i.err, errReplaced)
	if asked || !i.wasReady() {
		delete(is.byKey, i.key)
	} else {
		i.failed, i.last = api.AsError(i.err), i.intercept.Status()
	}
	is.logger.Info("intercept ended", "workload", i.key.workload, "reason", i.err)
	i.feed.close()
	i.cancel(nil)
	close(i.done)
}

// stay returns when ctx has ended, which is no error, or one of the intercepts, with why, or the connection.
func stay(ctx context.Context, held []*intercepted, connection <-chan struct{}) error {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	var watchers sync.WaitGroup
	defer watchers.Wait()
	defer cancel(nil)
	ended := make(chan *intercepted, len(held))
	for _, i := range held {
		watchers.Go(func() {
			select {
			case <-i.done:
				ended <- i
			case <-ctx.Done():
			}
		})
	}
	select {
	case <-ctx.Done():
		return nil
	case i := <-ended:
		return i.cause()
	case <-connection:
		if len(held) > 0 {
			return (<-ended).cause() // which says why
		}
		return errConnectionEnded
	}
}

// retain has the intercepts stay when nobody waits for them.
func (is *intercepts) retain(held []*intercepted) {
	is.mu.Lock()
	defer is.mu.Unlock()
	for _, i := range held {
		i.kept = true
	}
}

// release takes a waiter away from each. Those that nobody waits for any more, and that nobody has retained, end; release
// then waits for that.
func (is *intercepts) release(held []*intercepted, emit func(api.Event)) {
	is.mu.Lock()
	var abandoned []*intercepted
	for _, i := range held {
		if i != nil && !isClosed(i.done) && i.unwait() {
			abandoned = append(abandoned, i)
		}
	}
	is.mu.Unlock()
	_ = is.awaitAll(abandoned, emit) // which is logged; whoever waited has gone, or is told of something worse
}

// await waits until the intercepts have ended, all of them together no longer than the timeout, and returns those that have not.
func (is *intercepts) await(ending []*intercepted) (late []*intercepted) {
	deadline := time.Now().Add(is.timeout)
	for _, i := range ending {
		if !i.await(time.Until(deadline)) {
			is.logger.Error("the intercept did not end in time", "workload", i.key.workload, "timeout", is.timeout)
			late = append(late, i)
		}
	}
	return late
}

// leave ends the intercepts that req names, and says so. It knows failed ones too.
func (is *intercepts) leave(req api.LeaveRequest, emit func(api.Event)) error {
	ending, err := is.named(req)
	if err != nil {
		return err
	}
	return is.endAll(ending, emit)
}

// leaveConnections ends the intercepts on connections.
func (is *intercepts) leaveConnections(ids []string, emit func(api.Event)) error {
	return is.endAll(is.filter(func(i *intercepted) bool { return slices.Contains(ids, i.key.connection) }), emit)
}

// endAll ends the intercepts, at the same time, and returns an error for those that do not end in time.
func (is *intercepts) endAll(ending []*intercepted, emit func(api.Event)) error {
	is.mu.Lock()
	for _, i := range ending {
		switch {
		case i.failed == nil:
			i.end(errDisconnected)
		case is.byKey[i.key] == i:
			delete(is.byKey, i.key)
		}
	}
	is.mu.Unlock()
	return is.awaitAll(ending, emit)
}

// awaitAll waits for the end of intercepts that has begun, and says so; the error is of those that take too long.
func (is *intercepts) awaitAll(ending []*intercepted, emit func(api.Event)) error {
	step := func(i *intercepted) string { return "Leaving " + i.key.workload }
	for _, i := range ending {
		emit(api.Event{Time: time.Now(), Step: step(i)})
	}
	late := is.await(ending)
	var errs []error
	for _, i := range ending {
		if slices.Contains(late, i) {
			errs = append(errs, api.Errorf(api.ExitUnexpected, "leaving %s took longer than %v", i.key.workload, is.timeout).
				WithHint("requests reach the application all the same as soon as the agents miss this laptop, in a few seconds;\n`kubevpn logs` may tell why"))
			continue
		}
		status := is.statusOf(i)
		emit(api.Event{Time: time.Now(), Step: step(i), Done: true, Intercept: &status})
	}
	return errors.Join(errs...)
}

// named returns the intercepts that req means.
func (is *intercepts) named(req api.LeaveRequest) ([]*intercepted, error) {
	if req.All {
		return is.filter(func(*intercepted) bool { return true }), nil
	}
	var out []*intercepted
	for _, name := range req.Workloads {
		found := is.filter(func(i *intercepted) bool {
			return name == i.key.id() || sameWorkload(name, i.key.workload) && (req.Namespace == "" || req.Namespace == i.key.namespace)
		})
		switch {
		case len(found) == 0:
			return nil, api.Errorf(api.ExitWorkload, "%s is not intercepted from here", name).
				WithHint("`kubevpn status` shows what is; `kubevpn reset` removes what others have")
		case slices.ContainsFunc(found, func(i *intercepted) bool {
			return i.key.connection != found[0].key.connection || i.key.namespace != found[0].key.namespace
		}):
			var ids []string
			for _, i := range found {
				ids = append(ids, i.key.id()+" (namespace "+i.key.namespace+")")
			}
			return nil, api.Errorf(api.ExitUsage, "%s is intercepted %d times", name, len(found)).
				WithHint("name its namespace with -n, or one of %s", strings.Join(ids, ", "))
		}
		for _, i := range found { // an intercept and a clone, perhaps
			if !slices.Contains(out, i) {
				out = append(out, i)
			}
		}
	}
	return out, nil
}

// filter returns the intercepts that want takes, the oldest first.
func (is *intercepts) filter(want func(*intercepted) bool) []*intercepted {
	is.mu.Lock()
	defer is.mu.Unlock()
	var out []*intercepted
	for _, i := range is.byKey {
		if want(i) {
			out = append(out, i)
		}
	}
	slices.SortFunc(out, func(a, b *intercepted) int {
		return cmp.Or(a.begun.Compare(b.begun), cmp.Compare(a.key.workload, b.key.workload), cmp.Compare(a.key.id(), b.key.id()))
	})
	return out
}

// status lists the intercepts, the oldest first.
func (is *intercepts) status() []api.Intercept {
	out := []api.Intercept{}
	for _, i := range is.filter(func(*intercepted) bool { return true }) {
		out = append(out, is.statusOf(i))
	}
	return out
}

// statusOf is an intercept's own status, with what only the daemon knows.
func (is *intercepts) statusOf(i *intercepted) api.Intercept {
	is.mu.Lock()
	defer is.mu.Unlock()
	s := i.last
	if i.failed == nil {
		s = i.intercept.Status()
	}
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
	s.Owner = cmp.Or(s.Owner, is.owner.Name)
	if s.Since.IsZero() {
		s.Since = i.begun
	}
	return s
}
