//go:build linux

package main

import (
	"bytes"
	"context"
	"encoding/xml"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"regexp"
	"strings"

	"github.com/google/go-cmp/cmp"

	"kubevpn/test/lab"
)

// namespace contains the workload of the picture: a Deployment and a Service of one port, as most have.
const namespace = "staging"

// step is a command of the picture, and a text that a user must see in its output.
type step struct{ command, want string }

// firstMinute returns what a user does first.
func firstMinute() []step {
	return []step{
		{"kubevpn connect", "Connected to "},
		{"curl http://web.staging/hello", "hello from web-"},
		{"kubevpn proxy deployment/web --headers x-user=me", "requests come to this machine"},
		{"curl -H 'x-user: me' http://web.staging/hello", "hello from my laptop"},
		{"curl http://web.staging/hello", "hello from web-"},
		{"kubevpn disconnect --all", "Disconnecting from "},
	}
}

// picture records the first minute, and writes it to file, or compares it with file.
func (d *demo) picture(ctx context.Context, file string, check bool) error {
	title("The first minute")
	r, err := d.record(ctx)
	if err != nil {
		return err
	}
	fmt.Println(r.text)
	made := r.svg()
	if !check {
		return os.WriteFile(file, made, 0o644)
	}
	stored, err := os.ReadFile(file)
	if err != nil {
		return err
	}
	if err := same(stored, made); err != nil {
		return fmt.Errorf("%s is out of date: run `make picture`: %w", file, err)
	}
	return nil
}

// record runs the first minute as a user whose cluster does not have the traffic manager yet, and whose laptop runs a
// server at port 8080.
func (d *demo) record(ctx context.Context) (_ *recording, err error) {
	if err := d.reset(ctx); err != nil {
		return nil, err
	}
	defer func() { // WithoutCancel: also after Ctrl-C
		_, err2 := d.ask(context.WithoutCancel(ctx), "delete", "namespace", namespace, "--wait=false")
		err = errors.Join(err, err2)
	}()
	kubeconfig, err := d.workload(ctx)
	if err != nil {
		return nil, err
	}
	listener, err := d.Listen("laptop", "tcp", "127.0.0.1:8080")
	if err != nil {
		return nil, err
	}
	server := &http.Server{Handler: http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		_, _ = io.WriteString(w, "hello from my laptop\n") // curl says if that fails
	})}
	defer server.Close()
	go func() { _ = server.Serve(listener) }() // returns when the server closes

	env := append([]string{"env", "-i"}, d.env...)
	shell, err := d.Command(ctx, "laptop", append(env, "KUBECONFIG="+kubeconfig, "PATH="+filepath.Dir(d.kubevpn)+
		":/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin", "LANG=C.UTF-8", "TERM=xterm-256color", "PS1="+prompt,
		"bash", "--norc", "--noprofile", "-i")...)
	if err != nil {
		return nil, err
	}
	return recordShell(shell, firstMinute())
}

// reset removes what earlier runs left in the cluster and in the user's home.
func (d *demo) reset(ctx context.Context) error {
	if err := d.laptop(ctx, d.kubevpn, "uninstall"); err != nil {
		return err
	}
	if err := d.laptop(ctx, d.kubevpn, "quit"); err != nil {
		return err
	}
	if err := os.RemoveAll(d.home); err != nil {
		return err
	}
	return os.Mkdir(d.home, 0o700)
}

// workload creates the workload, and returns a kubeconfig whose default namespace is that of the workload.
func (d *demo) workload(ctx context.Context) (kubeconfig string, err error) {
	admin, err := d.Kubeconfig(lab.Admin)
	if err != nil {
		return "", err
	}
	content, err := os.ReadFile(admin)
	if err != nil {
		return "", err
	}
	kubeconfig = filepath.Join(d.home, "kubeconfig")
	if err := os.WriteFile(kubeconfig, content, 0o600); err != nil {
		return "", err
	}
	for _, args := range []string{
		"config set-context --current --namespace " + namespace + " --kubeconfig " + kubeconfig,
		"delete namespace --ignore-not-found " + namespace,
		"create namespace " + namespace,
		"-n " + namespace + " create deployment web --port 8080 --image " + lab.EchoImage,
		"-n " + namespace + " expose deployment web --port 80 --target-port 8080",
		"-n " + namespace + " rollout status deployment/web --timeout 1m",
	} {
		if _, err := d.ask(ctx, strings.Fields(args)...); err != nil {
			return "", err
		}
	}
	return kubeconfig, nil
}

// same returns an error if two pictures show other commands or other outputs, apart from what differs between runs.
func same(stored, made []byte) error {
	before, err := textOf(stored)
	if err != nil {
		return err
	}
	after, err := textOf(made)
	if err != nil {
		return err
	}
	if diff := cmp.Diff(strings.Split(steady(before), "\n"), strings.Split(steady(after), "\n")); diff != "" {
		return fmt.Errorf("(-picture +now)\n%s", diff)
	}
	return nil
}

// textOf returns what the terminal of a picture showed.
func textOf(svg []byte) (string, error) {
	var picture struct {
		Text string `xml:"desc"`
	}
	if err := xml.NewDecoder(bytes.NewReader(svg)).Decode(&picture); err != nil {
		return "", err
	}
	return picture.Text, nil
}

// steady replaces what differs between runs: durations, IDs, random names of pods, addresses and versions.
func steady(text string) string {
	for _, r := range []struct{ pattern, with string }{
		{`(?m) \(\d+\.\d+s\)$`, ""}, // only slow steps have it
		{`\d+(\.\d+)? (ms|s)\b`, "TIME"},
		{`\b[0-9a-f]{12}\b`, "ID"},
		{`-[0-9a-z]{5,10}-[0-9a-z]{5}\b`, "-POD"},
		{`\d+(\.\d+)+`, "N"},
	} {
		text = regexp.MustCompile(r.pattern).ReplaceAllString(text, r.with)
	}
	return text
}
