package access

import (
	"context"
	"fmt"
	"log/slog"
	"sync"
	"time"

	"golang.org/x/sync/singleflight"
)

const (
	yesTime    = time.Minute      // until the API server is asked again
	noTime     = 10 * time.Second // the same, after a no, or if it did not answer
	yesKept    = 5 * time.Minute  // how long a yes counts while the API server does not answer
	askTimeout = 5 * time.Second
	maxAnswers = 1 << 14
)

// answers keeps what the API server says about keys. A yes is asked for again after a minute, and counts for longer
// while the API server does not answer. Methods are safe for concurrent use.
type answers[K comparable] struct {
	ask    func(context.Context, K) (bool, error)
	log    *slog.Logger
	asking singleflight.Group // about the same key

	mu   sync.Mutex
	kept map[K]answer
}

type answer struct {
	yes   bool
	at    time.Time // of the last answer of the API server
	until time.Time // then asked for again
}

func newAnswers[K comparable](ask func(context.Context, K) (bool, error), log *slog.Logger) *answers[K] {
	return &answers[K]{ask: ask, log: log, kept: make(map[K]answer)}
}

// known returns the answer. It is not known if the API server is to be asked.
func (a *answers[K]) known(key K) (yes, known bool) {
	a.mu.Lock()
	defer a.mu.Unlock()
	kept := a.kept[key]
	known = !time.Now().After(kept.until)
	return kept.yes && known, known
}

// get returns the answer. It may wait for the API server. Flows that need the same answer share a request, so it does
// not end with the flow.
func (a *answers[K]) get(key K) bool {
	if yes, known := a.known(key); known {
		return yes
	}
	yes, _, _ := a.asking.Do(fmt.Sprint(key), func() (any, error) {
		ctx, cancel := context.WithTimeout(context.Background(), askTimeout)
		defer cancel()
		yes, err := a.ask(ctx, key)
		if err != nil {
			a.log.Warn("cannot check what a laptop may reach", "what", key, "err", err)
		}
		return a.record(key, yes, err, time.Now()), nil
	})
	return yes == true
}

// record stores an answer, and returns what counts.
func (a *answers[K]) record(key K, yes bool, err error, now time.Time) bool {
	a.mu.Lock()
	defer a.mu.Unlock()
	kept := a.kept[key]
	switch {
	case err == nil:
		kept = answer{yes: yes, at: now}
	case now.Sub(kept.at) > yesKept:
		kept.yes = false
	}
	kept.until = now.Add(noTime)
	if kept.yes && err == nil {
		kept.until = now.Add(yesTime)
	}
	if len(a.kept) >= maxAnswers { // those in use are soon asked for again
		clear(a.kept)
	}
	a.kept[key] = kept
	return kept.yes
}

// User is a laptop's user, as the API server knows it. Methods are safe for concurrent use.
type User struct {
	Name    string
	forward *answers[PodRef] // whether the user may forward ports of the pod
}

// NewUser returns a User. ask asks the API server whether the user may forward ports of a pod, of which it receives the
// namespace and the name.
func NewUser(name string, ask func(context.Context, PodRef) (bool, error), log *slog.Logger) *User {
	return &User{name, newAnswers(ask, log)}
}

// mayForward reports whether the user may forward ports of the pod. It may wait for the API server.
func (u *User) mayForward(pod PodRef) bool {
	return u != nil && u.forward.get(PodRef{Namespace: pod.Namespace, Name: pod.Name})
}
