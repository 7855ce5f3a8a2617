//go:build e2e && linux

package e2e

import (
	"bufio"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/creack/pty"
	"github.com/google/go-cmp/cmp"
	"github.com/google/go-dap"

	"kubevpn/internal/testenv"
	"kubevpn/test/lab"
)

// debugManifest is the workload NAME, whose program learns its port from its environment.
const debugManifest = `
apiVersion: apps/v1
kind: Deployment
metadata: {name: NAME, namespace: debug}
spec:
  selector: {matchLabels: {app: NAME}}
  template:
    metadata: {labels: {app: NAME}}
    spec:
      terminationGracePeriodSeconds: 1
      containers:
      - name: app
        image: APP_IMAGE
        imagePullPolicy: Never
        args: [-http, "NUMBER"]
        env: [{name: GREETING, value: hello from debug}, {name: PORT, value: "NUMBER"}]
        ports: [{containerPort: NUMBER}]
        readinessProbe: {httpGet: {path: /, port: NUMBER}, periodSeconds: 1}
---
apiVersion: v1
kind: Service
metadata: {name: NAME, namespace: debug}
spec:
  selector: {app: NAME}
  ports: [{port: 80, targetPort: NUMBER}]
---
`

// task is a task of .vscode/tasks.json.
type task struct {
	Label, Type, Command string
	IsBackground         bool
	ProblemMatcher       struct {
		Background struct{ BeginsPattern, EndsPattern string }
	}
}

// attachment is a configuration of .vscode/launch.json.
type attachment struct {
	Type, Request, PreLaunchTask string

	Host, Address, HostName string
	Port                    int
	Connect                 struct {
		Host string
		Port int
	}
	all json.RawMessage // what VS Code sends to the debugger
}

func (a *attachment) UnmarshalJSON(text []byte) error {
	type fields attachment
	a.all = slices.Clone(text)
	return json.Unmarshal(text, (*fields)(a))
}

// debugger returns the address that the configuration attaches to.
func (a *attachment) debugger() string {
	host := a.Host + a.Address + a.HostName + a.Connect.Host
	return net.JoinHostPort(host, fmt.Sprint(a.Port+a.Connect.Port))
}

// idePage is what docs/how-to/debug-in-an-ide.md lets a user do.
type idePage struct {
	commands []string // of the shell
	tasks    map[string]task
	attach   []attachment
}

func readIDEPage(t *testing.T) idePage {
	t.Helper()
	file := filepath.Join(moduleRoot(t), "docs", "how-to", "debug-in-an-ide.md")
	text, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	p := idePage{commands: shellLines(t, file), tasks: map[string]task{}}
	var inTasks []string
	for _, block := range regexp.MustCompile("(?s)\n```json\n(.*?)\n```\n").FindAllSubmatch(text, -1) {
		var content struct {
			Version        string
			Tasks          []task
			Configurations []attachment
		}
		if err := json.Unmarshal(block[1], &content); err != nil {
			t.Fatalf("%v\n%s", err, block[1])
		}
		for _, task := range content.Tasks {
			p.tasks[task.Label] = task
			inTasks = append(inTasks, task.Command)
		}
		p.attach = append(p.attach, content.Configurations...)
	}
	attaches := slices.DeleteFunc(slices.Clone(p.commands), isolates)
	if slices.Sort(attaches); len(attaches) != 4 || len(p.attach) != 4 || len(p.commands) != 5 {
		t.Fatalf("the test reads the page wrongly: %+v", p)
	}
	if slices.Sort(inTasks); !cmp.Equal(inTasks, attaches) {
		t.Errorf("other commands in tasks.json: %s", cmp.Diff(attaches, inTasks))
	}
	return p
}

func isolates(command string) bool { return strings.Contains(command, "--isolate") }

// debugSuite runs each command of the page in a terminal, attaches a debugger to the program, and stops a request from
// the cluster in it.
func debugSuite(t *testing.T, w *world) {
	testenv.NeedPrograms(t, "node", "java", "javac", "jdb")
	testenv.Run(t, "/usr/bin/python3 -m debugpy --version") // of python3-debugpy, which has no program of its own
	page := readIDEPage(t)
	w.loadApp(t)
	manifest := "apiVersion: v1\nkind: Namespace\nmetadata: {name: debug}\n---\n"
	names := []string{"go", "node", "java", "debugpy", "isolated"}
	for i, name := range names {
		values := strings.NewReplacer("NAME", name, "NUMBER", fmt.Sprint(8081+i), "APP_IMAGE", appRef)
		manifest += values.Replace(debugManifest)
	}
	w.apply(t, manifest)
	d := newDebugged(t, w)
	for _, name := range names {
		w.kubectl(t, "-n", "debug", "rollout", "status", "deployment/"+name, "--timeout=120s")
	}
	d.connect(t)
	t.Run("side_by_side", func(t *testing.T) {
		for _, a := range page.attach {
			t.Run(a.Type, func(t *testing.T) {
				t.Parallel()
				d.attaches(t, page.tasks[a.PreLaunchTask], a)
			})
		}
		for _, command := range page.commands {
			if isolates(command) {
				t.Run("isolated", func(t *testing.T) {
					t.Parallel()
					d.isolated(t, command, page.attach)
				})
			}
		}
	})
}

// debugged is a laptop with a workspace: the programs of testdata/debug.
type debugged struct {
	*laptop
	visitor *visitor
	dir     string
	env     []string
}

func newDebugged(t *testing.T, w *world) *debugged {
	t.Helper()
	d := &debugged{laptop: w.newUser(t, lab.Admin), visitor: w.visitor(t), dir: t.TempDir()}
	if err := os.CopyFS(d.dir, os.DirFS("testdata/debug")); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(d.dir, "go.mod"), []byte("module web\n"), 0o644); err != nil {
		t.Fatal(err)
	}
	testenv.Run(t, "javac -g -d "+filepath.Join(d.dir, "target/classes")+" "+filepath.Join(d.dir, "Web.java"))
	dlv := strings.TrimSpace(testenv.Run(t, "go tool -n dlv"))
	dirs := strings.Fields(testenv.Run(t, "go env GOROOT GOCACHE"))
	path := []string{filepath.Dir(dlv), bin, filepath.Join(dirs[0], "bin"), "/usr/bin", "/bin", "/usr/sbin"}
	d.env = []string{"PATH=" + strings.Join(path, ":"), "GOCACHE=" + dirs[1], "GOTOOLCHAIN=local", "CGO_ENABLED=0",
		"TERM=xterm"}
	return d
}

// attaches runs a task, attaches to it when VS Code would, and ends it.
func (d *debugged) attaches(t *testing.T, task task, a attachment) {
	if a.Request != "attach" || task.Type != "shell" || !task.IsBackground {
		t.Fatalf("%+v, %+v", a, task)
	}
	program := d.terminal(t, strings.Replace(task.Command, "deployment/web", "deployment/"+a.Type+" -n debug", 1))
	program.shows(t, "(?m)"+task.ProblemMatcher.Background.BeginsPattern)
	program.shows(t, "(?m)"+task.ProblemMatcher.Background.EndsPattern)
	program.shows(t, "(?m)^serving ")
	switch a.Type {
	case "go":
		d.stops(t, a.Type, func(request func()) string { return d.speakDAP(t, a, "cmd/web/main.go", request) })
		d.stops(t, a.Type, func(request func()) string {
			client := d.terminal(t, "dlv connect "+a.debugger())
			return client.debugs(t, d.delve(t), request)
		})
	case "debugpy":
		d.stops(t, a.Type, func(request func()) string { return d.speakDAP(t, a, "web.py", request) })
	case "node":
		line := d.line(t, "web.js")
		d.stops(t, a.Type, func(request func()) string {
			return d.terminal(t, "node inspect "+a.debugger()).debugs(t, debuggerCommands{
				prompt: "debug> ", stop: fmt.Sprintf("sb('web.js', %d)", line), set: fmt.Sprintf("> %d ", line),
				stopped: `break in .*web\.js:`, read: "exec greeting", resume: "cont"}, request)
		})
	case "java":
		d.stops(t, a.Type, func(request func()) string {
			return d.terminal(t, "jdb -attach "+a.debugger()).debugs(t, debuggerCommands{
				prompt: "> ", stop: fmt.Sprintf("stop at Web:%d", d.line(t, "Web.java")), set: "Set breakpoint ",
				stopped: `(?s)Breakpoint hit: .*\[1\] `, read: "print greeting", resume: "cont"}, request)
		})
	default:
		t.Fatalf("no debugger for %s", a.all)
	}
	program.interrupt(t)
	for _, i := range d.status(t).Intercepts {
		if i.Workload == "deployment/"+a.Type {
			t.Errorf("the intercept is left: %+v", i)
		}
	}
}

// isolated checks that a debugger in the terminal of an isolated program works, and that none of this machine reaches
// it.
func (d *debugged) isolated(t *testing.T, command string, attach []attachment) {
	program := d.terminal(t, strings.Replace(command, "deployment/web", "deployment/isolated -n debug", 1))
	d.stops(t, "isolated", func(request func()) string {
		return program.debugs(t, d.delve(t), func() {
			program.shows(t, "(?m)^serving ")
			request()
		})
	})

	const address = "127.0.0.1:9240"
	hidden := d.terminal(t, "kubevpn dev deployment/isolated -n debug --isolate -- node --inspect="+address+" web.js")
	hidden.shows(t, "Debugger listening on ")
	if _, err := dialIn(d.network(), address); !errors.Is(err, syscall.ECONNREFUSED) {
		t.Errorf("the debugger of an isolated program: %v", err)
	}
}

// line returns the number of the line of a program at which the suite stops it.
func (d *debugged) line(t *testing.T, file string) int {
	t.Helper()
	text, err := os.ReadFile(filepath.Join(d.dir, file))
	before, _, ok := strings.Cut(string(text), "break here")
	if err != nil || !ok {
		t.Fatalf("%s, %v", text, err)
	}
	return strings.Count(before, "\n") + 1
}

// stops lets a debugger stop a request of the visitor, read a variable that the program took from its environment,
// and resume the program, which then answers. The debugger calls request when the breakpoint is set.
func (d *debugged) stops(t *testing.T, service string, debugger func(request func()) (variable string)) {
	t.Helper()
	answered := make(chan string, 1)
	url := "http://" + d.clusterIP(t, "debug", service)
	variable := debugger(func() {
		go func() {
			answer, err := d.visitor.text(url)
			answered <- fmt.Sprint(answer, err)
		}()
	})
	if !strings.Contains(variable, "hello from debug") {
		t.Errorf("the debugger reads %q", variable)
	}
	if got := <-answered; !strings.HasSuffix(got, ": hello from debug<nil>") {
		t.Errorf("the program answers %q", got)
	}
}

// text returns the answer of a program on the laptop.
func (v *visitor) text(url string) (string, error) {
	req, err := http.NewRequest(http.MethodGet, url, nil)
	if err != nil {
		return "", err
	}
	req.Header.Set(mine, me)
	resp, err := v.http.Do(req)
	if err != nil {
		return "", err
	}
	defer resp.Body.Close()
	text, err := io.ReadAll(resp.Body)
	return string(text), err
}

// console is a command that runs in a terminal, as an IDE runs a task.
type console struct {
	*os.File
	cmd    *exec.Cmd
	screen testenv.Buffer
}

// terminal starts a command line in the workspace, and kills it after the test.
func (d *debugged) terminal(t *testing.T, command string) *console {
	t.Helper()
	argv := append(append([]string{"env"}, d.env...), "sh", "-c", "cd "+d.dir+" && exec "+command)
	c := &console{cmd: d.command(t.Context(), t, argv...)}
	var err error
	if c.File, err = pty.StartWithSize(c.cmd, &pty.Winsize{Rows: 50, Cols: 200}); err != nil {
		t.Fatal(err)
	}
	go func() { _, _ = io.Copy(&c.screen, c) }() // the end of a terminal is an error
	t.Cleanup(func() {
		_ = c.cmd.Process.Kill() // it may have ended
		_ = c.cmd.Wait()
		c.Close()
		if t.Failed() {
			t.Logf("%s\n%s", command, c.screen.String())
		}
	})
	return c
}

// shows waits until the text on the screen matches.
func (c *console) shows(t *testing.T, pattern string) {
	t.Helper()
	testenv.Eventually(t, time.Minute, func() error {
		if text := c.screen.String(); !regexp.MustCompile(pattern).MatchString(text) {
			return fmt.Errorf("no %q in\n%s", pattern, text)
		}
		return nil
	})
}

func (c *console) types(t *testing.T, line string) {
	t.Helper()
	if _, err := c.WriteString(line + "\n"); err != nil {
		t.Fatal(err)
	}
}

// interrupt types Ctrl-C, which must end the command.
func (c *console) interrupt(t *testing.T) {
	t.Helper()
	if _, err := c.Write([]byte{3}); err != nil {
		t.Fatal(err)
	}
	kill := time.AfterFunc(time.Minute, func() { _ = c.cmd.Process.Kill() }) // it may have ended
	_ = c.cmd.Wait()                                                         // the exit code is the debugger's
	if !kill.Stop() {
		t.Error("Ctrl-C does not end it")
	}
}

// debuggerCommands are what a user types into a debugger, and patterns of what it shows.
type debuggerCommands struct {
	prompt    string // when it is attached
	stop, set string // a breakpoint
	start     string // for a program that does not run yet
	stopped   string
	read      string // a variable
	resume    string
}

func (d *debugged) delve(t *testing.T) debuggerCommands {
	t.Helper()
	const file = "cmd/web/main.go"
	return debuggerCommands{prompt: `\(dlv\)`, stop: fmt.Sprintf("break %s:%d", file, d.line(t, file)),
		set: `Breakpoint \d+ set `, start: "continue", stopped: `> \[Breakpoint \d+\]`,
		read: "print greeting", resume: "continue"}
}

// debugs stops the program at a breakpoint, reads a variable, and resumes the program.
func (c *console) debugs(t *testing.T, say debuggerCommands, request func()) (variable string) {
	t.Helper()
	c.shows(t, say.prompt)
	c.types(t, say.stop)
	c.shows(t, say.set)
	if say.start != "" {
		c.types(t, say.start)
	}
	request()
	c.shows(t, say.stopped)
	c.screen.Take()
	c.types(t, say.read)
	c.shows(t, "hello from debug")
	variable = c.screen.Take()
	c.types(t, say.resume)
	return variable
}

// speakDAP does what VS Code does for a configuration whose debugger speaks the Debug Adapter Protocol.
func (d *debugged) speakDAP(t *testing.T, a attachment, file string, request func()) (variable string) {
	t.Helper()
	conn, err := dialIn(d.network(), a.debugger())
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	if err := conn.SetDeadline(time.Now().Add(time.Minute)); err != nil {
		t.Fatal(err)
	}
	c := &dapClient{conn: conn, r: bufio.NewReader(conn)}
	c.send(t, "initialize", map[string]any{"adapterID": a.Type, "pathFormat": "path", "linesStartAt1": true})
	until[*dap.InitializeResponse](t, c)
	c.send(t, "attach", a.all)
	until[*dap.InitializedEvent](t, c)
	source := dap.Source{Path: filepath.Join(d.dir, file)}
	at := []dap.SourceBreakpoint{{Line: d.line(t, file)}}
	c.send(t, "setBreakpoints", map[string]any{"source": source, "breakpoints": at})
	if set := until[*dap.SetBreakpointsResponse](t, c).Body.Breakpoints; len(set) != 1 || !set[0].Verified {
		t.Fatalf("%+v", set)
	}
	c.send(t, "configurationDone", nil)
	until[*dap.ConfigurationDoneResponse](t, c)
	if !c.attached {
		until[*dap.AttachResponse](t, c)
	}
	request()
	thread := until[*dap.StoppedEvent](t, c).Body.ThreadId
	c.send(t, "stackTrace", dap.StackTraceArguments{ThreadId: thread, Levels: 1})
	frames := until[*dap.StackTraceResponse](t, c).Body.StackFrames
	if len(frames) == 0 {
		t.Fatal("no frames")
	}
	c.send(t, "evaluate", dap.EvaluateArguments{Expression: "greeting", FrameId: frames[0].Id, Context: "watch"})
	variable = until[*dap.EvaluateResponse](t, c).Body.Result
	c.send(t, "setBreakpoints", map[string]any{"source": source, "breakpoints": []int{}}) // Delve would keep it
	until[*dap.SetBreakpointsResponse](t, c)
	c.send(t, "continue", dap.ContinueArguments{ThreadId: thread})
	until[*dap.ContinueResponse](t, c)
	c.send(t, "disconnect", dap.DisconnectArguments{})
	until[*dap.DisconnectResponse](t, c)
	return variable
}

type dapClient struct {
	conn     net.Conn
	r        *bufio.Reader
	seq      int
	attached bool // Delve answers to attach before the configuration, debugpy after it
}

func (c *dapClient) send(t *testing.T, command string, arguments any) {
	t.Helper()
	c.seq++
	content, err := json.Marshal(map[string]any{"seq": c.seq, "type": "request", "command": command,
		"arguments": arguments})
	if err == nil {
		err = dap.WriteBaseMessage(c.conn, content)
	}
	if err != nil {
		t.Fatal(err)
	}
}

// until returns the next message of a type. It skips others, but for errors.
func until[M dap.Message](t *testing.T, c *dapClient) M {
	t.Helper()
	for {
		content, err := dap.ReadBaseMessage(c.r)
		if err != nil {
			t.Fatalf("no %T: %v", *new(M), err)
		}
		message, err := dap.DecodeProtocolMessage(content)
		var unknown *dap.DecodeProtocolMessageFieldError // debugpy has events of its own
		if err != nil && !errors.As(err, &unknown) {
			t.Fatalf("%v: %s", err, content)
		}
		switch m := message.(type) {
		case M:
			return m
		case *dap.AttachResponse:
			c.attached = true
		case *dap.ErrorResponse:
			t.Fatalf("%s", content)
		}
	}
}
