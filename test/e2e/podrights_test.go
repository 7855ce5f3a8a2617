//go:build e2e && linux

package e2e

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"kubevpn/internal/api"
	"kubevpn/internal/testenv"
	"kubevpn/test/lab"
)

// metadataAddress is that of the metadata service of most clouds.
const metadataAddress = "169.254.169.254"

// serveMetadata runs a web server at metadataAddress on each node until the test ends.
func (w *world) serveMetadata(t *testing.T) {
	t.Helper()
	for n := range w.Config().Nodes {
		node := fmt.Sprintf("node%d", n+1)
		address := func(verb string) {
			cmd, err := w.Command(context.WithoutCancel(t.Context()), node,
				"ip", "address", verb, metadataAddress+"/32", "dev", "lo")
			if err != nil {
				t.Fatal(err)
			}
			output(t, cmd)
		}
		address("add")
		t.Cleanup(func() { address("del") })
		l, err := w.Listen(node, "tcp", metadataAddress+":80")
		if err != nil {
			t.Fatal(err)
		}
		server := &http.Server{Handler: http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
			fmt.Fprint(w, "identity of the node")
		})}
		done := make(chan error, 1)
		go func() { done <- server.Serve(l) }()
		t.Cleanup(func() {
			if err := errors.Join(server.Close(), <-done); !errors.Is(err, http.ErrServerClosed) {
				t.Error(err)
			}
		})
	}
}

// podRole is what a user needs to connect through the pods of the namespace, without the right to exec in them.
const podRole = `
apiVersion: rbac.authorization.k8s.io/v1
kind: Role
metadata: {name: via, namespace: podded}
rules:
- {apiGroups: [""], resources: [pods], verbs: [get, list, watch]}
- {apiGroups: [""], resources: [pods/log], verbs: [get]}
- {apiGroups: [""], resources: [pods/ephemeralcontainers], verbs: [patch]}
- {apiGroups: [apps], resources: [deployments], verbs: [get]}
---
apiVersion: rbac.authorization.k8s.io/v1
kind: RoleBinding
metadata: {name: via, namespace: podded}
roleRef: {apiGroup: rbac.authorization.k8s.io, kind: Role, name: via}
subjects: [{apiGroup: rbac.authorization.k8s.io, kind: User, name: dev}]
---
apiVersion: rbac.authorization.k8s.io/v1
kind: RoleBinding
metadata: {name: podded-dev, namespace: kubevpn}
roleRef: {apiGroup: rbac.authorization.k8s.io, kind: Role, name: kubevpn-traffic-manager-user}
subjects: [{apiGroup: rbac.authorization.k8s.io, kind: User, name: dev}]
`

// podRights checks that only a user who may exec in the pod reaches what hands out the identity of the node.
func podRights(t *testing.T, p *podded) {
	p.serveMetadata(t)
	p.apply(t, podRole)
	for _, right := range [][]string{
		{"patch", "pods", "--subresource=ephemeralcontainers", "-n", p.namespace},
		{"create", "pods", "--subresource=portforward", "-n", "kubevpn"},
	} {
		testenv.Eventually(t, soon, func() error { // the API server follows a change a moment later
			_, err := p.tryKubectl(t.Context(), append([]string{"auth", "can-i", "--as", "dev"}, right...)...)
			return err
		})
	}
	dev := p.newUser(t, lab.Developer)
	dev.within = withDevice(0o666)
	ask := func(l *laptop, via ...string) result {
		args := append([]string{"kubevpn", "run", "-n", p.namespace}, via...)
		return l.run(t, append(args, "--", "sh", "-c", "curl -sS --max-time 5 http://"+metadataAddress+"/; "+
			"curl -sS -o /dev/null -w ' %{http_code}' --max-time 20 http://"+p.echo+":8080/")...)
	}
	const secret, echo = "identity of the node", " 200"
	for _, tt := range []struct {
		name string
		ask  func() result
		want string
	}{
		{"with_the_right", func() result { return ask(p.eve, "--via", p.workload) }, secret + echo},
		{"without_the_right", func() result { return ask(dev, "--via", p.workload) }, echo},
		{"through_the_traffic_manager", func() result { return ask(p.eve) }, echo},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			if r := tt.ask(); r.code != 0 || r.stdout != tt.want {
				t.Errorf("%v\nwant %q", r, tt.want)
			}
		})
	}
	t.Run("all_needs_the_right", func(t *testing.T) {
		t.Parallel()
		failure{code: api.ExitPermission, message: "pods/exec", hint: "--egress all", within: 20 * time.Second}.
			checkProgress(t, ask(dev, "--via", p.workload, "--egress", "all"))
	})
}

// podKilled checks that kill -9 of the command ends its program, and leaves nothing on the laptop.
func podKilled(t *testing.T, p *podded) {
	const program = "sleep 1234569"
	before := p.root.snapshot(t)
	file := filepath.Join(p.eve.home, "began")
	cmd := p.eve.command(t.Context(), t, "kubevpn", "dev", p.workload, "-n", p.namespace, "--via-pod", "--",
		"sh", "-c", "curl -sS http://"+p.echo+":8080/ >"+file+".new && mv "+file+".new "+file+" && exec "+program)
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	testenv.Eventually(t, time.Minute, func() error {
		_, err := os.Stat(file)
		return err
	})
	if r := p.eve.run(t, "pgrep", "-f", program); r.code != 0 {
		t.Errorf("the program does not run: %v", r)
	}
	if err := cmd.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	_ = cmd.Wait() // the signal makes it fail
	testenv.Eventually(t, soon, func() error {
		if r := p.eve.run(t, "pgrep", "-f", program); r.code == 0 {
			return fmt.Errorf("the program is left: %s", r.stdout)
		}
		return nil
	})
	p.root.soonAs(t, before)
	for _, role := range []string{"dev", theDaemon, theHelper} {
		if left := p.eve.processes(t, role); len(left) > 0 {
			t.Errorf("a %s is left: %v", role, left)
		}
	}
}

// podDeleted checks that a live flow ends with its pod, and that the next one leaves from another pod.
func podDeleted(t *testing.T, p *podded) {
	old := p.leaving(t)
	conn := p.root.dial(t, net.JoinHostPort(p.echo, "9001"))
	defer conn.Close()
	if _, err := conn.Write([]byte("x")); err != nil {
		t.Fatal(err)
	}
	if _, err := io.ReadFull(conn, make([]byte, 1)); err != nil {
		t.Fatal(err)
	}
	if err := conn.SetReadDeadline(time.Now().Add(soon)); err != nil {
		t.Fatal(err)
	}
	began := time.Now()
	p.kubectl(t, "-n", p.namespace, "delete", "pod", old, "--wait=false")
	_, err := io.Copy(io.Discard, conn)
	ended := time.Now()
	if errors.Is(err, os.ErrDeadlineExceeded) {
		t.Fatal("the flow outlives its pod")
	}
	r := p.root.run(t, "curl", "-sS", "--max-time", "20", "http://"+p.echo+":8080/")
	t.Logf("the flow ended %v after the deletion (%v), and a request was answered %v later",
		ended.Sub(began).Round(time.Millisecond), err, time.Since(ended).Round(time.Millisecond))
	now := p.leaving(t)
	if now == old || p.podAt(t, r.seen()) != now {
		t.Errorf("status names %s after %s, and the server sees another: %v", now, old, r)
	}
	if warned := p.root.connection(t).Warnings; len(warned) > 0 {
		t.Errorf("%q", strings.Join(warned, "\n"))
	}
}
