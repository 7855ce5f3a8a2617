//go:build unix

package cli

import (
	"bytes"
	"context"
	"encoding/base64"
	"encoding/json"
	"encoding/pem"
	"errors"
	"fmt"
	"io"
	"log"
	"net"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/creack/pty"
	"github.com/rogpeppe/go-internal/testscript"
	"golang.org/x/sys/unix"

	"kubevpn/internal/api"
	"kubevpn/internal/config"
	"kubevpn/internal/kube/client"
	"kubevpn/internal/laptop/cli/command"
	"kubevpn/internal/laptop/cli/daemonclient"
	"kubevpn/internal/process/version"
	"kubevpn/internal/testenv"
	"kubevpn/pkg/host/sandbox"
)

// The scripts in testdata run the real command with fake Programs. The context of the kubeconfig selects the behavior
// of the fake daemon.
func TestMain(m *testing.M) {
	run := func() {
		os.Exit(Main(command.Programs{Machine: "WSL 2", RunDaemon: runFakeDaemon, StartHelper: startFakeHelper, RunHelper: runFakeHelper,
			Hold: fakeHold, Reset: fakeReset}))
	}
	testscript.Main(m, map[string]func(){"kubevpn": run, "kubectl-kubevpn": run})
}

// tasks are the scripts whose commands have goroutines of their own: they run beside a request until it ends.
var tasks = []string{"connect", "dev", "diff", "interrupt", "proxy", "run", "socks"}

// TestScripts runs the commands of those scripts.
func TestScripts(t *testing.T) {
	var files []string
	for _, name := range tasks {
		files = append(files, filepath.Join("testdata", name+".txtar"))
	}
	runScripts(t, files)
}

func TestScriptsOfPlainCommands(t *testing.T) {
	testenv.WithoutRace(t, "with the race detector, each of hundreds of processes starts half a second later")
	files, err := filepath.Glob(filepath.Join("testdata", "*.txtar"))
	if err != nil {
		t.Fatal(err)
	}
	runScripts(t, slices.DeleteFunc(files, func(file string) bool {
		return slices.Contains(tasks, strings.TrimSuffix(filepath.Base(file), ".txtar"))
	}))
}

func runScripts(t *testing.T, files []string) {
	testscript.Run(t, testscript.Params{
		Files:               files,
		RequireExplicitExec: true,
		RequireUniqueNames:  true,
		Setup: func(e *testscript.Env) error {
			e.Vars = append(e.Vars, testenv.EndAtOnce())
			e.Setenv("HOME", e.WorkDir)
			e.Setenv("XDG_RUNTIME_DIR", filepath.Join(e.WorkDir, "run"))
			e.Setenv("XDG_STATE_HOME", filepath.Join(e.WorkDir, "state"))
			e.Setenv("XDG_CONFIG_HOME", filepath.Join(e.WorkDir, "config"))
			e.Setenv("KUBECONFIG", filepath.Join(e.WorkDir, "kubeconfig"))
			e.Defer(func() { quitLeftover(filepath.Join(e.WorkDir, "run")) })
			s := httptest.NewTLSServer(http.HandlerFunc(fakeAPIServer))
			s.Config.ErrorLog = log.New(io.Discard, "", 0)
			e.Defer(func() {
				s.CloseClientConnections()
				s.Close()
			})
			ca := pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: s.Certificate().Raw})
			text := strings.NewReplacer("SERVER", s.URL, "AUTHORITY", base64.StdEncoding.EncodeToString(ca)).Replace(kubeconfig)
			c, err := client.Load([]byte(text), client.Options{})
			if err != nil {
				return err
			}
			e.Setenv("CLUSTER_ID", c.ID())
			e.Setenv("SERVER", s.URL)
			return os.WriteFile(filepath.Join(e.WorkDir, "kubeconfig"), []byte(text), 0o600)
		},
		Condition: func(name string) (bool, error) {
			if name != "sandbox" {
				return false, fmt.Errorf("there is no condition %q", name)
			}
			return sandbox.Allowed(false) == nil, nil
		},
		Cmds: map[string]func(ts *testscript.TestScript, neg bool, args []string){
			"exitcode":  cmdExitCode,
			"interrupt": cmdInterrupt,
			"terminal":  cmdTerminal,
			"pick":      cmdPick,
			"unread":    cmdUnread,
			"mode":      cmdMode,
			"await":     cmdAwait,
		},
	})
}

const kubeconfig = `apiVersion: v1
kind: Config
current-context: good
clusters:
- {name: lab, cluster: {server: SERVER, certificate-authority-data: AUTHORITY}}
- {name: silent, cluster: {server: SERVER/silent, certificate-authority-data: AUTHORITY}}
- {name: page, cluster: {server: SERVER/page, certificate-authority-data: AUTHORITY}}
- {name: defaults, cluster: {server: SERVER/defaults, certificate-authority-data: AUTHORITY}}
- {name: away, cluster: {server: https://192.0.2.1:6443}}
users:
- {name: ann, user: {token: t}}
- {name: eve, user: {token: expired}}
- name: plugin
  user: {exec: {apiVersion: client.authentication.k8s.io/v1, command: ./login, interactiveMode: IfAvailable}}
- name: terminal
  user: {exec: {apiVersion: client.authentication.k8s.io/v1, command: ./login, interactiveMode: Always}}
contexts:
- {name: good, context: {cluster: lab, user: ann}}
- {name: shop, context: {cluster: lab, user: ann, namespace: shop}}
- {name: bad-image, context: {cluster: lab, user: ann}}
- {name: hangs, context: {cluster: lab, user: ann}}
- {name: crashes, context: {cluster: lab, user: ann}}
- {name: foreign, context: {cluster: lab, user: ann}}
- {name: moving, context: {cluster: lab, user: ann}}
- {name: installs, context: {cluster: lab, user: ann}}
- {name: eve, context: {cluster: lab, user: eve}}
- {name: plugin, context: {cluster: lab, user: plugin}}
- {name: terminal, context: {cluster: lab, user: terminal}}
- {name: silent, context: {cluster: silent, user: ann}}
- {name: away, context: {cluster: away, user: ann}}
- {name: page, context: {cluster: page, user: ann}}
- {name: hostile, context: {cluster: lab, user: ann}}
- {name: defaults, context: {cluster: defaults, user: ann}}
- {name: prod, context: {cluster: defaults, user: ann, namespace: prod}}
`

// clientDefaults are those of the cluster "defaults".
const clientDefaults = `
extraDomains: [corp.test]
netstack: gvisor
extraCIDRs: [10.20.0.0/16]
mode: sidecar
requireMatch: [prod]
image: "evil\e[2J"
`

// fakeAPIServer accepts the tokens t and p, and answers the requests that every command sends first.
func fakeAPIServer(w http.ResponseWriter, r *http.Request) {
	_, _ = io.Copy(io.Discard, r.Body) // the server sees the client go only then
	switch path := r.URL.Path; {
	case strings.HasPrefix(path, "/silent/"):
		<-r.Context().Done()
		panic(http.ErrAbortHandler) // a return is an empty answer, which a client that is slow to give up still takes
	case strings.HasPrefix(path, "/page/"):
		w.Header().Set("Content-Type", "text/html")
		fmt.Fprint(w, "<html><title>Sign in to Corp</title>")
	case r.Header.Get("Authorization") != "Bearer t" && r.Header.Get("Authorization") != "Bearer p":
		w.Header().Set("Content-Type", "application/json")
		w.WriteHeader(http.StatusUnauthorized)
		fmt.Fprint(w, `{"kind":"Status","apiVersion":"v1","status":"Failure","reason":"Unauthorized","code":401,"message":"Unauthorized"}`)
	case path == "/defaults/api/v1/namespaces/kubevpn/configmaps/kubevpn-client-defaults":
		w.Header().Set("Content-Type", "application/json")
		json.NewEncoder(w).Encode(map[string]any{"kind": "ConfigMap", "apiVersion": "v1", "data": map[string]string{"config.yaml": clientDefaults}})
	case strings.HasSuffix(path, "/selfsubjectaccessreviews"):
		w.Header().Set("Content-Type", "application/json")
		w.WriteHeader(http.StatusCreated)
		fmt.Fprint(w, `{"kind":"SelfSubjectAccessReview","apiVersion":"authorization.k8s.io/v1","status":{"allowed":true}}`)
	case fakeList(w, r):
	default:
		http.NotFound(w, r)
	}
}

// cmdExitCode runs a command and checks its exit code: exitcode 21 kubevpn connect. A command with a trailing
// & is not supported.
func cmdExitCode(ts *testscript.TestScript, neg bool, args []string) {
	if neg || len(args) < 2 {
		ts.Fatalf("usage: exitcode CODE COMMAND [ARG...]")
	}
	err := ts.Exec(args[1], args[2:]...)
	code := 0
	var exit interface{ ExitCode() int }
	if errors.As(err, &exit) {
		code = exit.ExitCode()
	} else if err != nil {
		ts.Fatalf("%v", err)
	}
	if got := fmt.Sprint(code); got != args[0] {
		ts.Fatalf("exit code %s, want %s", got, args[0])
	}
}

// cmdInterrupt runs a command, waits for a file, sends the command Ctrl-C, and checks its exit code and a line of
// its stderr: interrupt 130 FILE LINE COMMAND [ARG...].
func cmdInterrupt(ts *testscript.TestScript, neg bool, args []string) {
	if neg || len(args) < 4 {
		ts.Fatalf("usage: interrupt CODE FILE LINE COMMAND [ARG...]")
	}
	var out strings.Builder
	cmd := program(ts, args[3:])
	cmd.Stdout, cmd.Stderr = &out, &out
	ts.Check(cmd.Start())
	cmdAwait(ts, false, args[1:2])
	ts.Check(cmd.Process.Signal(os.Interrupt))
	err := cmd.Wait()
	ts.Logf("[output]\n%s", out.String())
	if got := fmt.Sprint(cmd.ProcessState.ExitCode()); got != args[0] {
		ts.Fatalf("exit code %s, want %s (%v)", got, args[0], err)
	}
	if !strings.Contains("\n"+out.String(), "\n"+args[2]+"\n") {
		ts.Fatalf("no line %q", args[2])
	}
}

// cmdTerminal runs a command on a terminal, types the text of a file, checks the command's exit code, and keeps what
// the terminal showed in the file "terminal": terminal 16 FILE COMMAND [ARG...]. Unlike ttyin it reads all that was
// shown: until no process has the terminal any more.
func cmdTerminal(ts *testscript.TestScript, neg bool, args []string) {
	if neg || len(args) < 3 {
		ts.Fatalf("usage: terminal CODE FILE COMMAND [ARG...]")
	}
	person, terminal, err := pty.Open()
	ts.Check(err)
	defer person.Close()
	cmd := program(ts, args[2:])
	cmd.Stdin, cmd.Stdout, cmd.Stderr = terminal, ts.Stdout(), ts.Stderr()
	cmd.SysProcAttr = &unix.SysProcAttr{Setsid: true, Setctty: true}
	err = cmd.Start()
	terminal.Close()
	ts.Check(err)
	const endOfTransmission = "\x04"
	_, err = io.WriteString(person, ts.ReadFile(args[1])+endOfTransmission)
	ts.Check(err)
	shown, err := io.ReadAll(person)
	if !errors.Is(err, unix.EIO) { // the end of a terminal on Linux
		ts.Check(err)
	}
	ts.Logf("[terminal]\n%s", shown)
	ts.Check(os.WriteFile(ts.MkAbs("terminal"), shown, 0o600))
	err = cmd.Wait()
	if got := fmt.Sprint(cmd.ProcessState.ExitCode()); got != args[0] {
		ts.Fatalf("exit code %s, want %s (%v)", got, args[0], err)
	}
}

// cmdPick runs a command whose standard input and error are a terminal. If keys are not empty, it types them when the
// terminal shows a list. It checks the command's exit code, and keeps what the terminal showed in the file "terminal":
// pick 130 "\x1b" COMMAND [ARG...].
func cmdPick(ts *testscript.TestScript, neg bool, args []string) {
	if neg || len(args) < 3 {
		ts.Fatalf("usage: pick CODE KEYS COMMAND [ARG...]")
	}
	keys, err := strconv.Unquote(`"` + args[1] + `"`)
	ts.Check(err)
	person, terminal, err := pty.Open()
	ts.Check(err)
	defer person.Close()
	cmd := program(ts, args[2:])
	cmd.Env = append(cmd.Env, "TERM=xterm-256color")
	cmd.Stdin, cmd.Stdout, cmd.Stderr = terminal, ts.Stdout(), terminal
	cmd.SysProcAttr = &unix.SysProcAttr{Setsid: true, Setctty: true}
	err = cmd.Start()
	terminal.Close()
	ts.Check(err)
	var shown []byte
	for typed, some := keys == "", make([]byte, 4096); ; {
		n, err := person.Read(some)
		shown = append(shown, some[:n]...)
		if !typed && bytes.Contains(shown, []byte("Esc to cancel")) {
			_, err := io.WriteString(person, keys)
			ts.Check(err)
			typed = true
		}
		if err != nil { // the end of a terminal: EIO on Linux
			break
		}
	}
	ts.Logf("[terminal]\n%q", shown)
	ts.Check(os.WriteFile(ts.MkAbs("terminal"), shown, 0o600))
	err = cmd.Wait()
	if got := fmt.Sprint(cmd.ProcessState.ExitCode()); got != args[0] {
		ts.Fatalf("exit code %s, want %s (%v)", got, args[0], err)
	}
}

// program returns a command with the environment of the script.
func program(ts *testscript.TestScript, args []string) *exec.Cmd {
	path, err := exec.LookPath(args[0])
	ts.Check(err)
	cmd := exec.Command(path, args[1:]...)
	cmd.Dir = ts.MkAbs(".")
	for _, name := range []string{"HOME", "XDG_RUNTIME_DIR", "XDG_STATE_HOME", "XDG_CONFIG_HOME", "KUBECONFIG", "PATH", "GORACE", "FAKE_CONNECTED"} {
		cmd.Env = append(cmd.Env, name+"="+ts.Getenv(name))
	}
	return cmd
}

// cmdUnread starts a command whose standard output no process reads, and which ends when the script does.
func cmdUnread(ts *testscript.TestScript, neg bool, args []string) {
	read, write, err := os.Pipe()
	ts.Check(err)
	ts.Check(read.Close())
	cmd := program(ts, args)
	cmd.Stdout = write
	ts.Check(cmd.Start())
	ts.Check(write.Close())
	ts.Defer(func() { _ = cmd.Wait() }) // quitLeftover ends it
}

// cmdMode checks a file's permissions: mode 0700 DIR.
func cmdMode(ts *testscript.TestScript, neg bool, args []string) {
	info, err := os.Stat(ts.MkAbs(args[1]))
	ts.Check(err)
	if got := fmt.Sprintf("%04o", info.Mode().Perm()); (got == args[0]) == neg {
		ts.Fatalf("%s has mode %s", args[1], got)
	}
}

// cmdAwait waits until a file exists, or, negated, does not.
func cmdAwait(ts *testscript.TestScript, neg bool, args []string) {
	ts.Check(testenv.Poll(10*time.Second, func() error {
		_, err := os.Stat(ts.MkAbs(args[0]))
		if neg && err == nil {
			return fmt.Errorf("%s is still there", args[0])
		}
		if neg {
			return nil
		}
		return err
	}))
}

func quitLeftover(runtime string) {
	p := config.Paths{RuntimeDir: filepath.Join(runtime, "kubevpn")}
	_ = daemonclient.New(daemonclient.Config{Locate: func() (config.Paths, error) { return p, nil }}).Quit(context.Background(), func(api.Event) {})
}

// fakeDaemon behaves as the context of each request says. It records requests in files of the state directory, for the
// scripts.
type fakeDaemon struct {
	paths   config.Paths
	version string
	quit    chan struct{}

	mu          sync.Mutex
	helper      bool
	connections map[string]api.Connection
	intercepts  map[string]api.Intercept // by workload
}

func runFakeDaemon(ctx context.Context, paths config.Paths, ready func()) error {
	switch os.Getenv("FAKE_DAEMON") {
	case "fails":
		return api.Errorf(api.ExitDaemon, "the disk is full").WithHint("remove something")
	case "dies":
		os.Exit(3)
	}
	if err := errors.Join(paths.MakeRuntimeDir(), paths.MakeStateDir()); err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, time.Minute) // never outlives the test for long
	defer cancel()
	d := &fakeDaemon{
		paths: paths, version: version.Full(), quit: make(chan struct{}, 1),
		connections: map[string]api.Connection{}, intercepts: map[string]api.Intercept{},
	}
	if v := os.Getenv("FAKE_VERSION"); v != "" {
		d.version = v
	}
	if id := os.Getenv("FAKE_CONNECTED"); id != "" {
		d.put(api.Connection{ID: id, Cluster: "lab", ClusterID: id, Status: api.StatusConnected})
	}
	os.Remove(paths.Socket())
	os.Remove(paths.HelperSocket())
	l, err := net.Listen("unix", paths.Socket())
	if err != nil {
		return err
	}
	helpers, err := net.Listen("unix", paths.HelperSocket())
	if err != nil {
		return err
	}
	go d.takeHelpers(helpers)
	server := &http.Server{Handler: d.handler()}
	go server.Serve(l)
	ready()
	fmt.Println("no command reads this")
	select {
	case <-ctx.Done():
	case <-d.quit:
	}
	helpers.Close()
	return server.Shutdown(ctx)
}

func (d *fakeDaemon) takeHelpers(l net.Listener) {
	for {
		conn, err := l.Accept()
		if err != nil {
			return
		}
		oob := make([]byte, 64)
		_, n, _, _, err := conn.(*net.UnixConn).ReadMsgUnix(make([]byte, 1), oob)
		messages, _ := unix.ParseSocketControlMessage(oob[:n])
		var answer *api.Error
		if err != nil || len(messages) != 1 {
			answer = api.Errorf(api.ExitUnexpected, "no descriptor came")
		}
		d.mu.Lock()
		d.helper = true
		d.mu.Unlock()
		d.note("helper")
		json.NewEncoder(conn).Encode(answer)
		conn.Close()
	}
}

func (d *fakeDaemon) note(name string) {
	os.WriteFile(filepath.Join(d.paths.StateDir, name), nil, 0o600)
}

func (d *fakeDaemon) handler() http.Handler {
	mux := http.NewServeMux()
	mux.HandleFunc("POST "+api.PathConnect, d.connect)
	mux.HandleFunc("POST "+api.PathIntercept, d.intercept)
	mux.HandleFunc("POST "+api.PathLeave, d.leave)
	mux.HandleFunc("POST "+api.PathRequests, d.recorded)
	mux.HandleFunc("POST "+api.PathDisconnect, func(w http.ResponseWriter, r *http.Request) {
		var req api.DisconnectRequest
		json.NewDecoder(r.Body).Decode(&req)
		d.mu.Lock()
		defer d.mu.Unlock()
		for _, id := range req.IDs {
			if _, ok := d.connections[id]; !ok {
				json.NewEncoder(w).Encode(api.Event{Error: api.Errorf(api.ExitNotConnected, "no connection has the ID %s", id).WithHint("look at the status")})
				return
			}
		}
		for id, c := range d.connections {
			if req.All || len(req.IDs) == 1 && req.IDs[0] == id {
				delete(d.connections, id)
				json.NewEncoder(w).Encode(api.Event{Step: "Disconnecting from " + c.Cluster, Done: true, Connection: &c})
			}
		}
	})
	mux.HandleFunc("GET "+api.PathStatus, func(w http.ResponseWriter, r *http.Request) {
		d.mu.Lock()
		defer d.mu.Unlock()
		s := api.Status{Version: d.version, Connections: []api.Connection{}, Intercepts: []api.Intercept{}}
		if d.helper {
			s.Helper = "sudo"
		}
		for _, c := range d.connections {
			s.Connections = append(s.Connections, c)
		}
		for _, i := range d.intercepts {
			s.Intercepts = append(s.Intercepts, i)
		}
		json.NewEncoder(w).Encode(s)
	})
	mux.HandleFunc("POST "+api.PathQuit, func(w http.ResponseWriter, r *http.Request) {
		select {
		case d.quit <- struct{}{}:
		default:
		}
	})
	return mux
}

// lacksHelper reports whether the daemon has no helper, and then rejects the request.
func (d *fakeDaemon) lacksHelper(w http.ResponseWriter) bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.helper {
		return false
	}
	d.note("refused")
	w.WriteHeader(api.StatusNeedsHelper)
	json.NewEncoder(w).Encode(api.Errorf(api.ExitPrivilege, "a root helper is needed"))
	return true
}

func (d *fakeDaemon) connect(w http.ResponseWriter, r *http.Request) {
	http.NewResponseController(w).EnableFullDuplex()
	var req api.ConnectRequest
	json.NewDecoder(r.Body).Decode(&req)
	if d.lacksHelper(w) {
		return
	}
	text, _ := json.Marshal(req)
	os.WriteFile(filepath.Join(d.paths.StateDir, "request.json"), text, 0o600)

	id := "id-" + req.Context
	send := func(e api.Event) {
		json.NewEncoder(w).Encode(e)
		w.(http.Flusher).Flush()
	}
	send(api.Event{Step: "Looking for the traffic manager"})
	send(api.Event{Step: "Looking for the traffic manager", Detail: "kubevpn/manager-1", Done: true})
	if err := foreign(&req); err != nil {
		send(api.Event{Error: err})
		return
	}
	if req.Context == "installs" {
		m := theirs("kubevpn")
		send(api.Event{Installed: &m})
	}
	c := api.Connection{
		ID: id, Cluster: "lab", Namespace: req.Namespace, Status: api.StatusConnecting,
		Netstack: api.NetstackGVisor, NetstackReason: "as " + req.Netstack + " has it",
		Transport: "port-forward (websocket)", Device: "kubevpn-lab", CIDRs: []netip.Prefix{netip.MustParsePrefix("10.96.0.0/12")},
		DNS:   api.DNSStatus{Mode: api.ResolverNFTables, Domain: "cluster.local", ExtraDomains: req.ExtraDomains, ExcludeDomains: req.ExcludeDomains},
		Since: time.Now(), Settings: req.Settings,
	}
	switch req.Context {
	case "bad-image":
		send(api.Event{Error: api.Errorf(api.ExitImagePull, "the image %s cannot be pulled", req.Image).WithHint("name another one\nwith --image")})
		return
	case "hostile":
		evil := "pulled \x1b]0;pwned\x07\rConnected to lab \u202egnp.exe"
		send(api.Event{Step: "Waiting for the pod", Detail: evil})
		send(api.Event{Warning: evil})
		send(api.Event{Error: api.Errorf(api.ExitNotReady, "%s", evil).WithHint("%s", evil)})
		return
	case "crashes":
		os.Exit(7)
	case "hangs":
		d.put(c)
		send(api.Event{Step: "Waiting for the pod"})
		d.note("waiting")
		io.Copy(io.Discard, r.Body)
		d.note("canceled")
		d.mu.Lock()
		delete(d.connections, id)
		d.mu.Unlock()
		send(api.Event{Step: "Cleaning up", Done: true})
		return
	}
	c.Status = api.StatusConnected
	c.Warnings = []string{"only Services of namespace shop are known"}
	c.Checks = []api.Check{{What: "name", Target: "kubernetes.default", OK: true, Seen: "10.96.0.1"}}
	d.put(c)
	send(api.Event{Warning: c.Warnings[0]})
	send(api.Event{Connection: &c})
}

// theirs returns a manager of another user in a namespace.
func theirs(namespace string) api.TrustedManager {
	return api.TrustedManager{
		Namespace: namespace, NamespaceUID: "0b5e", Repository: "registry.example/kubevpn", ServiceAccount: "kubevpn-traffic-manager",
		Image: "registry.example/kubevpn:1\x1b[2J", Age: "12d",
	}
}

// foreign returns the error of a daemon for a manager of another user, for a cluster with a public domain, and for
// networks of the client defaults.
func foreign(req *api.ConnectRequest) *api.Error {
	context, consent := req.Context, req.Consent
	switch {
	case req.Setting("extraCIDRs").Origin == api.OriginCluster && len(req.Consent.Networks) == 0:
		err := api.Errorf(api.ExitConsent, "the client defaults add networks").WithHint("Use --extra-cidr ''.")
		err.Needs = &api.Consent{Networks: req.ExtraCIDRs, ExtraDomains: req.ExtraDomains}
		return err
	case context == "moving": // another one at each look
		return consent.Trusts(theirs(fmt.Sprint("kubevpn-", len(consent.Managers))))
	case context != "foreign":
		return nil
	}
	if err := consent.Trusts(theirs("kubevpn")); err != nil {
		return err
	}
	if consent.Domain == "" {
		err := api.Errorf(api.ExitConsent, "the cluster's domain is corp.example.com").WithHint("Is that so?")
		err.Needs = &api.Consent{Domain: "corp.example.com"}
		return err
	}
	return nil
}

func (d *fakeDaemon) put(c api.Connection) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.connections[c.ID] = c
}

func startFakeHelper(context.Context, func(string)) (*os.File, error) {
	if os.Getenv("FAKE_SUDO") == "refuses" {
		return nil, api.Errorf(api.ExitPrivilege, "sudo was refused").WithHint("ask for it")
	}
	return os.Open(os.DevNull)
}

func runFakeHelper(context.Context) error { return errors.New("nothing on stdin") }

// fakeHold holds a connection for a proxy, if there is a listener, or for this machine.
func fakeHold(
	ctx context.Context, req api.InterceptRequest, _ sandbox.Place, l net.Listener, progress func(api.Event),
) error {
	if l != nil {
		return fakeSOCKS(ctx, req.Connect, l, progress)
	}
	return fakeForeground(ctx, req.Connect, progress)
}

// fakeSOCKS writes the result of connecting to its listener, and the request, to files.
func fakeSOCKS(ctx context.Context, req api.ConnectRequest, l net.Listener, progress func(api.Event)) error {
	if err := foreign(&req); err != nil {
		return err
	}
	progress(api.Event{Connection: &api.Connection{ID: "id-socks", Cluster: "lab", Namespace: req.Namespace, Status: api.StatusConnected,
		DNS: api.DNSStatus{Mode: api.ResolverProxy, Domain: "cluster.local"}, CIDRs: []netip.Prefix{netip.MustParsePrefix("10.96.0.0/12")},
		SOCKS: &api.SOCKS{Address: l.Addr().String(), User: "kubevpn", Password: "p", PAC: "http://" + l.Addr().String() + "/s.pac"}}})
	paths, err := config.Locate(os.Getenv)
	if err := errors.Join(err, paths.MakeStateDir()); err != nil {
		return err
	}
	_, dialed := net.Dial("tcp", l.Addr().String())
	req.Kubeconfig, req.Credential = nil, nil
	text, _ := json.Marshal(req)
	os.WriteFile(filepath.Join(paths.StateDir, "socks.json"), fmt.Appendf(text, " %v", dialed), 0o600)
	os.WriteFile(filepath.Join(paths.StateDir, "socks"), nil, 0o600)
	<-ctx.Done()
	return nil
}

func fakeForeground(ctx context.Context, req api.ConnectRequest, progress func(api.Event)) error {
	progress(api.Event{Step: "Opening a session", Done: true})
	if req.Context == "bad-image" {
		return api.Errorf(api.ExitImagePull, "no image")
	}
	if err := foreign(&req); err != nil {
		return err
	}
	progress(api.Event{Connection: &api.Connection{ID: "id-fg", Cluster: "lab", Namespace: req.Namespace, Status: api.StatusConnected, Device: "kubevpn-lab"}})
	paths, err := config.Locate(os.Getenv)
	if err := errors.Join(err, paths.MakeStateDir()); err != nil {
		return err
	}
	os.WriteFile(filepath.Join(paths.StateDir, "foreground"), nil, 0o600)
	<-ctx.Done()
	progress(api.Event{Step: "Disconnecting from lab", Done: true})
	return nil
}
