//go:build linux

package daemon

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"errors"
	"net/http"
	"os"
	"runtime"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"golang.org/x/sys/unix"

	"kubevpn/internal/api"
	"kubevpn/internal/process/version"
	"kubevpn/internal/testenv"
	"kubevpn/pkg/wakeup"
)

func TestDisconnectEndsTheConnectionAndTheHelper(t *testing.T) {
	r := start(t)
	refused := r.mustPost(api.PathConnect, request("a"))
	if refused.status != api.StatusNeedsHelper || refused.err.Code != api.ExitPrivilege {
		t.Fatalf("without a helper: status %d, %+v; want %d", refused.status, refused.err, api.StatusNeedsHelper)
	}
	if err := r.handOver(); err != nil {
		t.Fatal(err)
	}
	answer := r.goPost(t.Context(), api.PathConnect, request("a"))
	c := wait(t, r.made, "the connection")
	if got := r.status(); len(got) != 1 || got[0].ID != "id-a" || got[0].Status != api.StatusConnecting {
		t.Errorf("status = %+v, want one that connects", got)
	}
	c.config.Progress(api.Event{Step: "Opening a session", Done: true})
	close(c.connected)
	got := wait(t, answer, "the answer")
	if len(got.events) != 3 || got.events[0].Step != "Opening a session" || !got.events[1].Done ||
		got.events[0].Time.IsZero() || got.last().Connection == nil || got.last().Connection.ID != "id-a" {
		t.Errorf("connect = %+v, want two steps and the connection", got)
	}

	if s := r.whole(); s.Version != version.Full() || len(s.Connections) != 1 || s.Helper != "sudo" {
		t.Errorf("daemon = %+v", s)
	}

	ended := r.mustPost(api.PathDisconnect, api.DisconnectRequest{IDs: []string{"id-a"}})
	if e := ended.last(); !e.Done || e.Step != "Disconnecting from cluster-id-a" || e.Error != nil {
		t.Errorf("disconnect = %+v, want that it is done", ended.events)
	}
	wait(t, c.ended, "Run's return")
	if got := r.status(); len(got) != 0 {
		t.Errorf("status = %+v, want nothing", got)
	}
	if !r.helper(0).isClosed() {
		t.Error("the last disconnect was answered before the helper had ended")
	}
}

func TestDisconnectFailsForAnUnknownID(t *testing.T) {
	r := start(t)
	got := r.mustPost(api.PathDisconnect, api.DisconnectRequest{IDs: []string{"nope"}}).err
	if got == nil || got.Code != api.ExitNotConnected || got.Message != "no connection has the ID nope" {
		t.Errorf("error = %+v", got)
	}
	if got := r.mustPost(api.PathDisconnect, api.DisconnectRequest{All: true}); len(got.events) != 0 {
		t.Errorf("disconnecting nothing = %+v, want no event", got.events)
	}
}

// The networks of two connections to one cluster would overlap, and each has the rights of its user.
func TestConnectAsAnotherUserIsRejected(t *testing.T) {
	r := start(t)
	first := r.connect("a/ann")
	got := r.mustPost(api.PathConnect, request("a/bob")).err
	if got == nil || got.Code != api.ExitOverlap || !strings.Contains(got.Message, "already connected as another user") ||
		!strings.Contains(got.Hint, "`kubevpn disconnect id-a/ann`") {
		t.Errorf("error = %+v", got)
	}
	if wakeup.IsClosed(first.ended) || len(r.made) != 0 || len(r.status()) != 1 {
		t.Errorf("the first connection ended, or there is a second one: %+v", r.status())
	}
	r.mustPost(api.PathDisconnect, api.DisconnectRequest{All: true})
	r.connect("a/bob")
	if s := r.status(); len(s) != 1 || s[0].ID != "id-a/bob" {
		t.Errorf("status = %+v", s)
	}
}

// proxy, clone and dev change the workload with the rights of their own user.
func TestInterceptUsesTheConnectionOfAnotherUser(t *testing.T) {
	r := start(t)
	r.connect("a/ann")
	answer := r.goPost(t.Context(), api.PathIntercept, interceptRequest("a/bob", "deployment/web"))
	r.begin()
	if e := wait(t, answer, "the answer").last(); e.Error != nil || e.Intercept == nil || e.Intercept.Connection != "id-a/ann" || len(r.made) != 0 {
		t.Errorf("last event = %+v", e)
	}
}

func TestSecondConnectJoinsTheConnection(t *testing.T) {
	r := start(t)
	first := r.connect("a")
	again := request("a")
	again.Namespace, again.Scheduler, again.Settings[0].Value = "shop", "lc", "lc"
	got := r.mustPost(api.PathConnect, again)
	if len(got.events) != 3 || got.events[0].Detail != "default → shop" ||
		!strings.Contains(got.events[1].Warning, "already connected with different settings (scheduler): `kubevpn connect --reconnect` changes them") {
		t.Errorf("events = %+v, want the namespace's change, and a warning", got.events)
	}
	if c := got.last().Connection; c == nil || c.Namespace != "shop" {
		t.Errorf("connection = %+v, want namespace shop", c)
	}
	if wakeup.IsClosed(first.ended) || len(r.made) != 0 {
		t.Error("a second connection was made")
	}
}

func TestSecondConnectRejectsAFlagThatTheConnectionDoesNotHonour(t *testing.T) {
	r := start(t)
	first := r.connect("a")
	again := request("a")
	again.Namespace = "shop"
	again.Settings = append(again.Settings, api.Setting{Key: "netstack", Value: api.NetstackSystem, Origin: api.OriginFlag, Source: "--netstack"})
	if got := r.mustPost(api.PathConnect, again); got.err != nil { // it has chosen that
		t.Errorf("error = %+v", got.err)
	}
	again.Namespace, again.Settings[1].Value = "other", api.NetstackGVisor
	got := r.mustPost(api.PathConnect, again).err
	if got == nil || got.Code != api.ExitUsage || !strings.Contains(got.Message, "--netstack gvisor, and it has system") ||
		!strings.Contains(got.Hint, "--reconnect") {
		t.Errorf("error = %+v", got)
	}
	if s := r.status(); wakeup.IsClosed(first.ended) || len(s) != 1 || s[0].Namespace != "shop" {
		t.Errorf("the connection has changed: %+v", s)
	}
}

// With --reconnect, another user's connection to the cluster ends, too. The helper stays: it would need sudo again.
func TestReconnectReplacesTheConnections(t *testing.T) {
	r := start(t)
	first, elsewhere := r.connect("a/ann"), r.connect("b")
	again := request("a/bob")
	again.Reconnect = true
	answer := r.goPost(t.Context(), api.PathConnect, again)
	second := wait(t, r.made, "the connection")
	if !wakeup.IsClosed(first.ended) || wakeup.IsClosed(elsewhere.ended) {
		t.Error("the first connection goes on, or that to another cluster does not")
	}
	close(second.connected)
	for _, e := range wait(t, answer, "the answer").events {
		if c := e.Connection; e.Error != nil || c != nil && c.ID != "id-a/bob" {
			t.Errorf("event %+v", e)
		}
	}
	r.mustPost(api.PathDisconnect, api.DisconnectRequest{IDs: []string{"id-b"}})
	again.Kubeconfig = []byte("a/ann") // the last connection, in the place of the last
	answer = r.goPost(t.Context(), api.PathConnect, again)
	close(wait(t, r.made, "the connection").connected)
	if e := wait(t, answer, "the answer").last(); e.Connection == nil || r.helper(0).isClosed() {
		t.Errorf("last event %+v, or the helper has ended", e)
	}
}

func TestReconnectThatFailsEndsTheHelper(t *testing.T) {
	r := start(t)
	r.connect("a")
	r.onRun = func(context.Context, *fakeConnection) error { return api.Errorf(api.ExitPermission, "not today") }
	again := request("a")
	again.Reconnect = true
	if got := r.mustPost(api.PathConnect, again).last().Error; got == nil || got.Code != api.ExitPermission {
		t.Errorf("error = %+v", got)
	}
	testenv.Until(t, "the helper to end", r.helper(0).isClosed)
}

func TestSecondConnectReplacesTheCredential(t *testing.T) {
	r := start(t)
	first := r.connect("a")
	again := request("a")
	again.Credential = &api.Credential{Token: "fresh"}
	again.Context += "-of-another-user"
	r.mustPost(api.PathConnect, again)
	if first.credential != nil {
		t.Error("the connection got another user's credential")
	}
	again.Context = request("a").Context
	r.mustPost(api.PathConnect, again)
	if first.credential == nil || first.credential.Token != "fresh" {
		t.Error("the connection did not get the credential")
	}
	if strings.Contains(r.logText(), "fresh") {
		t.Error("the credential is in the log")
	}
}

func TestSecondConnectUpgradesTheManager(t *testing.T) {
	r := start(t)
	first := r.connect("a")
	again := request("a")
	again.Upgrade, again.Image = true, "new"
	got := r.mustPost(api.PathConnect, again)
	if len(got.events) != 2 || got.events[0].Step != "Upgrading" || got.events[0].Detail != "new" || got.last().Connection == nil {
		t.Errorf("events = %+v, want the upgrade, and the connection", got.events)
	}
	again.Upgrade = false
	if got := r.mustPost(api.PathConnect, again); len(got.events) != 1 || got.last().Connection == nil {
		t.Errorf("with the image of the upgrade: events = %+v, want only the connection", got.events)
	}
	again.Upgrade, again.Image = true, "bad"
	if e := r.mustPost(api.PathConnect, again).err; e == nil || e.Code != api.ExitImagePull {
		t.Errorf("error = %+v, want %d", e, api.ExitImagePull)
	}
	if wakeup.IsClosed(first.ended) || len(r.made) != 0 {
		t.Error("the connection did not outlive it")
	}
}

func TestConcurrentConnectsMakeOneConnection(t *testing.T) {
	r := start(t)
	if err := r.handOver(); err != nil {
		t.Fatal(err)
	}
	var answers []<-chan call
	for range 8 {
		answers = append(answers, r.goPost(t.Context(), api.PathConnect, request("a")))
	}
	c := wait(t, r.made, "the connection")
	testenv.Until(t, "the connection says something", func() bool { return len(r.status()) == 1 })
	close(c.connected)
	for _, answer := range answers {
		if got := wait(t, answer, "an answer"); got.last().Connection == nil {
			t.Errorf("answer = %+v, want the connection", got)
		}
	}
	if len(r.made) != 0 {
		t.Error("a second connection was made")
	}
}

func TestTwoClustersShareTheHelper(t *testing.T) {
	r := start(t)
	a, b := r.connect("a"), r.connect("b")
	if got := r.status(); len(got) != 2 {
		t.Errorf("status = %+v, want two", got)
	}
	r.mustPost(api.PathDisconnect, api.DisconnectRequest{IDs: []string{"id-a"}})
	wait(t, a.ended, "the first one's end")
	if wakeup.IsClosed(b.ended) || r.helper(0).isClosed() {
		t.Error("the other connection or its helper has ended too")
	}
	if got := r.mustPost(api.PathDisconnect, api.DisconnectRequest{All: true}); len(got.events) != 2 {
		t.Errorf("disconnect --all = %+v", got.events)
	}
	wait(t, b.ended, "the other one's end")
	testenv.Until(t, "the helper is closed", r.helper(0).isClosed)
	if len(r.helpers) != 1 {
		t.Errorf("%d helpers were taken, want one for both", len(r.helpers))
	}
}

func TestInterruptedConnectLeavesNothing(t *testing.T) {
	r := start(t)
	if err := r.handOver(); err != nil {
		t.Fatal(err)
	}
	ctx, interrupt := context.WithCancel(t.Context())
	answer := r.goPost(ctx, api.PathConnect, request("a"))
	c := wait(t, r.made, "the connection")
	interrupt()
	wait(t, answer, "the request's end")
	wait(t, c.ended, "the attempt's end")
	testenv.Until(t, "nothing is left", func() bool { return len(r.status()) == 0 && r.helper(0).isClosed() })
}

// The answer of a connect whose client ends the body ends after the cleanup.
func TestReleasedConnectReceivesTheCleanup(t *testing.T) {
	r := start(t)
	if err := r.handOver(); err != nil {
		t.Fatal(err)
	}
	answer, release := r.goHold(api.PathConnect, request("a"))
	wait(t, r.made, "the connection")
	if err := release(); err != nil {
		t.Fatal(err)
	}
	got := wait(t, answer, "the answer").events
	if n := len(got); n < 3 || got[n-3].Step != "Cleaning up" || got[n-2].Step != "Cleaning up" || !got[n-2].Done ||
		got[n-2].Connection == nil || got[n-2].Connection.Status != api.StatusDisconnecting {
		t.Errorf("events = %+v, want the cleanup, at last with the connection", got)
	}
	if !r.helper(0).isClosed() || len(r.status()) != 0 {
		t.Errorf("left: %+v; the helper is closed: %v", r.status(), r.helper(0).isClosed())
	}
}

// The command reports the interrupt, so the error of the cleanup must be among the events.
func TestInterruptedConnectWarnsOfAConnectionThatDoesNotEnd(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := &rig{t: t, made: make(chan *fakeConnection, 1)}
		end := make(chan struct{})
		r.onRun = func(context.Context, *fakeConnection) error { <-end; return nil }
		d := newDaemon(Config{Factory: r}, nil, Owner{}, discard())
		if err := d.connections.adopt(newFakeHelper()); err != nil {
			t.Fatal(err)
		}
		ctx, interrupt := context.WithCancel(t.Context())
		var warnings []string
		failed := make(chan error, 1)
		go func() {
			failed <- d.connections.connect(ctx, request("a"), func(e api.Event) {
				if e.Warning != "" {
					warnings = append(warnings, e.Warning)
				}
			})
		}()
		synctest.Wait() // the connection runs
		interrupt()
		if err := <-failed; !errors.Is(err, context.Canceled) {
			t.Errorf("connect = %v, want the interrupt", err)
		}
		if len(warnings) != 1 || !strings.Contains(warnings[0], "did not end in 15s") {
			t.Errorf("warnings %q, want that the connection did not end", warnings)
		}
		close(end)
		if err := d.connections.shutDown(func(api.Event) {}); err != nil {
			t.Error(err)
		}
	})
}

func TestInterruptedConnectKeepsAConnectionThatAnotherRequestNeeds(t *testing.T) {
	r := start(t)
	if err := r.handOver(); err != nil {
		t.Fatal(err)
	}
	first, interrupt := r.goHold(api.PathConnect, request("a"))
	c := wait(t, r.made, "the connection")
	second := r.goPost(t.Context(), api.PathConnect, request("a"))
	testenv.Until(t, "both wait", func() bool {
		return strings.Count(r.logText(), "request joins") == 1
	})
	if err := interrupt(); err != nil {
		t.Fatal(err)
	}
	told := func(e api.Event) bool { return strings.Contains(e.Warning, "another command made it or uses it") }
	if got := wait(t, first, "the first request's end"); !slices.ContainsFunc(got.events, told) {
		t.Errorf("events = %+v, want that the connection continues", got.events)
	}
	close(c.connected)
	if got := wait(t, second, "the second answer"); got.last().Connection == nil {
		t.Errorf("answer = %+v, want the connection", got)
	}
}

func (r *rig) logText() string {
	text, err := os.ReadFile(r.paths.LogFile())
	if err != nil {
		r.t.Fatal(err)
	}
	return string(text)
}

func TestFailedConnectReportsTheErrorAndLeavesNothing(t *testing.T) {
	r := start(t)
	r.onRun = func(context.Context, *fakeConnection) error {
		return api.Errorf(api.ExitImagePull, "the image cannot be pulled").WithHint("use --image")
	}
	if got := r.mustPost(api.PathConnect, request("bad")); got.err == nil || got.err.Code != api.ExitKubeconfig {
		t.Errorf("a bad kubeconfig = %+v", got)
	}
	if err := r.handOver(); err != nil {
		t.Fatal(err)
	}
	answer := r.mustPost(api.PathConnect, request("a"))
	for _, e := range answer.events {
		if strings.HasPrefix(e.Step, "Disconnecting") {
			t.Errorf("%q, of what was never connected", e.Step)
		}
	}
	got := answer.last().Error
	if got == nil || got.Code != api.ExitImagePull || got.Message != "the image cannot be pulled" || got.Hint != "use --image" {
		t.Errorf("error = %+v", got)
	}
	testenv.Until(t, "nothing is left", func() bool { return len(r.status()) == 0 && r.helper(0).isClosed() })
}

func TestStatusShowsAFailedConnection(t *testing.T) {
	r := start(t)
	c := r.connect("a")
	c.end <- api.Errorf(api.ExitLost, "the manager is gone")
	testenv.Until(t, "the connection has failed", func() bool {
		s := r.status()
		return len(s) == 1 && s[0].Status == api.StatusFailed && s[0].Error.Message == "the manager is gone"
	})
	testenv.Until(t, "the helper is closed", r.helper(0).isClosed)

	r.connect("a") // takes its place
	if got := r.status(); len(got) != 1 || got[0].Status != api.StatusConnected {
		t.Errorf("status = %+v, want one, connected", got)
	}

	c = r.connect("b")
	c.end <- nil
	testenv.Until(t, "it has failed", func() bool {
		return slices.ContainsFunc(r.status(), func(c api.Connection) bool { return c.Status == api.StatusFailed })
	})
	if got := r.status()[1]; got.Error == nil || got.Error.Code != api.ExitLost || got.Error.Message != "the connection ended" {
		t.Errorf("error = %+v", got.Error)
	}
	if got := r.mustPost(api.PathDisconnect, api.DisconnectRequest{IDs: []string{"id-b"}}); got.last().Error != nil || len(r.status()) != 1 {
		t.Errorf("disconnecting a failed one = %+v, then %+v", got.events, r.status())
	}
}

// An admin may stop and start systemd-resolved during a connection. Meanwhile the helper uses another method.
func TestStatusFollowsTheResolverMode(t *testing.T) {
	r := start(t)
	r.onRun = func(ctx context.Context, c *fakeConnection) error {
		_, err := c.config.Network.SetLink(ctx, api.Link{Name: "kubevpn0", MTU: 1500})
		return err
	}
	r.connect("a")
	for _, mode := range []api.ResolverMode{api.ResolverNFTables, api.ResolverResolved} {
		r.helper(0).changes <- api.NetworkApplied{ResolverMode: mode}
		testenv.Until(t, "status has "+string(mode), func() bool { return r.status()[0].DNS.Mode == mode })
	}
}

func TestConnectionsFailWhenTheHelperEnds(t *testing.T) {
	r := start(t)
	a, b := r.connect("a"), r.connect("b")
	r.helper(0).die()
	wait(t, a.ended, "the first one's end")
	wait(t, b.ended, "the second one's end")
	testenv.Until(t, "both have failed", func() bool {
		s := r.status()
		for _, c := range s {
			if c.Status != api.StatusFailed || c.Error.Code != api.ExitLost || c.Error.Message != "the root helper ended" {
				return false
			}
		}
		return len(s) == 2
	})
	r.connect("a")
	if n := len(r.helpers); n != 2 {
		t.Errorf("%d helpers, want another one", n)
	}
}

func TestUnusedHelperIsClosed(t *testing.T) {
	r := start(t)
	if err := errors.Join(r.handOver(), r.handOver()); err != nil { // two commands at the same time
		t.Fatal(err)
	}
	if r.helper(0).isClosed() || !r.helper(1).isClosed() {
		t.Error("want the first helper kept and the second closed")
	}

	s := newConnections(nil, nil, Owner{}, discard())
	s.linger = time.Millisecond
	h := newFakeHelper()
	if err := s.adopt(h); err != nil {
		t.Fatal(err)
	}
	wait(t, h.done, "the helper's end")
	s.group.Wait()
}

func TestDisconnectReportsFailedCleanup(t *testing.T) {
	r := start(t)
	r.onRun = func(ctx context.Context, c *fakeConnection) error {
		_, err := c.config.Network.SetLink(ctx, api.Link{Name: "kubevpn0", MTU: 1500})
		return err
	}
	r.connect("a")
	h := r.helper(0)
	h.mu.Lock()
	h.err = errors.New("route is busy")
	h.mu.Unlock()
	got := r.mustPost(api.PathDisconnect, api.DisconnectRequest{All: true}).last().Error
	if got == nil || !strings.Contains(got.Message, "route is busy") {
		t.Errorf("error = %+v, want the helper's", got)
	}
}

func TestQuitEndsEverything(t *testing.T) {
	r := start(t)
	c := r.connect("a")
	got := r.mustPost(api.PathQuit, nil)
	if e := got.last(); !e.Done || e.Error != nil {
		t.Errorf("quit = %+v", got.events)
	}
	wait(t, c.ended, "the connection's end")
	if !r.helper(0).isClosed() {
		t.Error("quit was answered before the helper had ended")
	}
	err := wait(t, r.result, "the daemon's end")
	r.result <- err
}

func TestIdleDaemonEnds(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := &rig{t: t, made: make(chan *fakeConnection, 1)}
		d := newDaemon(Config{Factory: r}, nil, Owner{}, discard())
		ended := make(chan struct{})
		go func() {
			d.waitForEnd(t.Context())
			close(ended)
		}()
		staysFor := func(what string) {
			t.Helper()
			time.Sleep(2 * idleTimeout)
			synctest.Wait()
			if wakeup.IsClosed(ended) {
				t.Fatalf("the daemon ended with %s", what)
			}
		}
		if err := d.connections.adopt(newFakeHelper()); err != nil {
			t.Fatal(err)
		}
		go d.connections.connect(t.Context(), request("a"), func(api.Event) {})
		c := <-r.made
		staysFor("a connection that is being established")
		close(c.connected)
		staysFor("a connection")
		c.end <- errors.New("lost")
		staysFor("a failed connection")
		if err := d.connections.disconnect(t.Context(), api.DisconnectRequest{All: true}, func(api.Event) {}); err != nil {
			t.Error(err)
		}
		time.Sleep(idleTimeout - time.Nanosecond)
		synctest.Wait()
		if wakeup.IsClosed(ended) {
			t.Error("the daemon ended before it had been idle long enough")
		}
		<-ended
	})
}

func TestSecondDaemonFails(t *testing.T) {
	r := start(t)
	err := Run(t.Context(), Config{Paths: r.paths, NewHelper: r.newHelper})
	if !errors.Is(err, ErrRunning) {
		t.Errorf("a second daemon = %v, want ErrRunning", err)
	}
	r.status() // the first one still answers
}

func TestOtherUsersAreRejected(t *testing.T) {
	testenv.NeedRoot(t) // to become another user
	r := start(t)
	for _, path := range []string{r.paths.RuntimeDir, r.paths.RuntimeDir + "/..", r.paths.Socket(), r.paths.HelperSocket()} {
		if err := os.Chmod(path, 0o777); err != nil { // as if the directory did not protect it
			t.Fatal(err)
		}
	}
	for _, path := range []string{r.paths.Socket(), r.paths.HelperSocket()} {
		got := make(chan error, 1)
		go func() {
			runtime.LockOSThread() // never unlocked: the thread, which is another user now, ends with the goroutine
			got <- asNobody(path)
		}()
		if err := wait(t, got, "the other user"); err != nil {
			t.Error(err)
		}
	}
	if text := r.logText(); strings.Count(text, "connection rejected") != 2 || !strings.Contains(text, "uid=65534") {
		t.Errorf("log = %s\nwant two refusals of 65534", text)
	}
}

// asNobody connects to the socket as user 65534, and returns an error unless the daemon closes the connection.
func asNobody(path string) error {
	if _, _, errno := unix.RawSyscall(unix.SYS_SETRESUID, ^uintptr(0), 65534, ^uintptr(0)); errno != 0 {
		return errno
	}
	fd, err := unix.Socket(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	if err := unix.Connect(fd, &unix.SockaddrUnix{Name: path}); err != nil {
		return err
	}
	n, err := unix.Read(fd, make([]byte, 1))
	if n != 0 || err != nil {
		return errors.New("the daemon answered another user")
	}
	return nil
}

func TestHoldCleansUp(t *testing.T) {
	tests := []struct {
		name string
		run  func(t *testing.T, c *fakeConnection, interrupt func())
		want string
	}{
		{"interrupted-while-connected", func(t *testing.T, c *fakeConnection, interrupt func()) {
			close(c.connected)
			interrupt()
		}, ""},
		{"interrupted-before", func(t *testing.T, c *fakeConnection, interrupt func()) { interrupt() }, "context canceled"},
		{"lost", func(t *testing.T, c *fakeConnection, _ func()) {
			close(c.connected)
			c.end <- errors.New("the manager is gone")
		}, "the manager is gone"},
	}
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			r := &rig{t: t, made: make(chan *fakeConnection, 1)}
			h := newFakeHelper()
			ctx, interrupt := context.WithCancel(t.Context())
			defer interrupt()
			result := make(chan error, 1)
			connected := make(chan struct{})
			go func() {
				result <- Hold(ctx, HoldConfig{
					Request: api.InterceptRequest{Connect: request("a")}, Owner: Owner{Key: key}, Helper: h, Factory: r, Logger: discard(),
					Progress: func(e api.Event) {
						if e.Connection != nil && e.Connection.Status == api.StatusConnected {
							close(connected)
						}
					},
				})
			}()
			c := wait(t, r.made, "the connection")
			tt.run(t, c, func() {
				if wakeup.IsClosed(c.connected) {
					wait(t, connected, "the news of it")
				}
				interrupt()
			})
			err := wait(t, result, "Hold's end")
			if got := text(err); got != tt.want {
				t.Errorf("Hold = %q, want %q", got, tt.want)
			}
			if !wakeup.IsClosed(c.ended) || !h.isClosed() {
				t.Error("the connection or the helper is left")
			}
		})
	}
}

func text(err error) string {
	if err == nil {
		return ""
	}
	return err.Error()
}

func TestExpiredPreparationIsDropped(t *testing.T) {
	cs := newConnections(&rig{t: t}, nil, Owner{}, discard())
	defer cs.discarded.Wait()
	if _, err := cs.prepare(t.Context(), request("a")); err != nil {
		t.Fatal(err)
	}
	prepared := func() *preparation {
		cs.mu.Lock()
		defer cs.mu.Unlock()
		return cs.prepared
	}
	prepared().expiry.Reset(0)
	testenv.Until(t, "the daemon has dropped it", func() bool { return prepared() == nil })
}

func TestConnectUsesWhatWasPrepared(t *testing.T) {
	r := start(t)
	if err := r.handOver(); err != nil {
		t.Fatal(err)
	}
	prepare := func(name string) {
		t.Helper()
		if got := r.mustPost(api.PathPrepare, request(name)); got.status != http.StatusOK {
			t.Fatalf("status %d, %v", got.status, got.err)
		}
	}
	prepare("a")
	prepare("b") // in its place
	if a := r.connect("a"); a.config.Prepared != nil {
		t.Error("a uses what was prepared for b")
	}
	if b := r.connect("b"); b.config.Prepared == nil {
		t.Error("b does not use what was prepared for it")
	}
	prepare("b") // it is connected
	if c := r.connect("c"); c.config.Prepared != nil {
		t.Error("c uses what was prepared for b")
	}
}
