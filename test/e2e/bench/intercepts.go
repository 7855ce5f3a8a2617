//go:build linux

package main

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"kubevpn/internal/api"
	"kubevpn/test/e2e/build"
	"kubevpn/test/lab"
)

// The measurements of intercepts: a visitor (a process on a node) asks an application in a pod (test/e2e/app).
//
//	visitor ── pod's IP ── application                                   as it is
//	visitor ── pod's IP ── agent ── application                          passed on: the request lacks the header
//	visitor ── pod's IP ── agent ── manager ═══ laptop ── application    taken
const (
	firstRow    = "proxy, 1 pod: from the command to the laptop's first answer"
	twentyRow   = "proxy, 20 pods: from the command until each pod's requests come"
	requestRow  = "a request to the application, median"
	downloadRow = "a download from the application"
)

// The columns of the table.
const (
	asItIs   path = "as it is"
	passedOn path = "passed on by the agent"
	taken    path = "answered by the laptop"
)

const (
	appRef      = "docker.io/kubevpn/app:bench"
	ownHeader   = "x-user"
	ownValue    = "bench"
	laptopsName = "laptop"
	appWorkload = "deployment/shop"
)

const shopManifest = `
apiVersion: apps/v1
kind: Deployment
metadata: {name: shop, namespace: default}
spec:
  replicas: 1
  selector: {matchLabels: {app: shop}}
  template:
    metadata: {labels: {app: shop}}
    spec:
      terminationGracePeriodSeconds: 1
      containers:
      - name: app
        image: APP_IMAGE
        imagePullPolicy: Never
        ports: [{containerPort: 8080, name: http}]
        readinessProbe: {httpGet: {path: /, port: http}, periodSeconds: 1}
`

// openShop starts the application in the cluster and on the laptop, and connects. stop stops the laptop's application.
func (b *bench) openShop(ctx context.Context) (stop func(), err error) {
	say("the application")
	if err := build.App(ctx, b.dir, appRef); err != nil {
		return nil, err
	}
	if err := b.Load(ctx, filepath.Join(b.dir, "app.tar")); err != nil {
		return nil, err
	}
	manifest := filepath.Join(b.dir, "shop.yaml")
	if err := os.WriteFile(manifest, []byte(strings.ReplaceAll(shopManifest, "APP_IMAGE", appRef)), 0o600); err != nil {
		return nil, err
	}
	if _, err := b.kubectl(ctx, "apply", "-f", manifest); err != nil {
		return nil, err
	}
	if err := b.connectBy(ctx, api.NetstackGVisor, api.TransportAPIProxy); err != nil {
		return nil, err
	}
	app := b.laptop(ctx, filepath.Join(b.dir, "app"), "-name", laptopsName, "-host", "127.0.0.1")
	if err := app.Start(); err != nil {
		return nil, err
	}
	return func() { _ = app.Process.Kill(); _ = app.Wait() }, nil
}

// measureIntercepts fills the table of proxy.
func (b *bench) measureIntercepts(ctx context.Context, r *report) error {
	stop, err := b.openShop(ctx)
	if err != nil {
		return err
	}
	defer stop()
	for round := range b.rounds {
		if err := b.interceptOnce(ctx, r, 20, twentyRow); err != nil {
			return err
		}
		if err := b.interceptOnce(ctx, r, 1, firstRow); err != nil {
			return err
		}
		say("round %d of %d: %s %.2f s, %s %.2f s", round+1, b.rounds, firstRow, r.median(firstRow, all), twentyRow,
			r.median(twentyRow, all))
		if err := b.passThrough(ctx, r); err != nil {
			return err
		}
	}
	return nil
}

// settled is the age of pods when they are intercepted. The kubelet waits a second between two changes of a pod.
const settled = 5 * time.Second

// freshPods returns n pods of the application that have never had an agent.
func (b *bench) freshPods(ctx context.Context, n int) ([]string, error) {
	if _, err := b.shopPods(ctx, 0); err != nil {
		return nil, err
	}
	ips, err := b.shopPods(ctx, n)
	if err != nil {
		return nil, err
	}
	select {
	case <-time.After(settled):
		return ips, nil
	case <-ctx.Done():
		return nil, ctx.Err()
	}
}

// shopPods scales the application, and returns its pods' addresses.
func (b *bench) shopPods(ctx context.Context, n int) ([]string, error) {
	if _, err := b.kubectl(ctx, "scale", appWorkload, "--replicas", strconv.Itoa(n)); err != nil {
		return nil, err
	}
	if _, err := b.kubectl(ctx, "rollout", "status", appWorkload, "--timeout=120s"); err != nil {
		return nil, err
	}
	for {
		out, err := b.kubectl(ctx, "get", "pods", "-l", "app=shop", "-o",
			`jsonpath={range .items[*]}{.status.podIP} {end}`)
		if err != nil {
			return nil, err
		}
		if ips := strings.Fields(out); len(ips) == n {
			return ips, nil
		}
		select { // surplus pods are still terminating
		case <-time.After(100 * time.Millisecond):
		case <-ctx.Done():
			return nil, ctx.Err()
		}
	}
}

// interceptOnce proxies a number of pods, and leaves them.
func (b *bench) interceptOnce(ctx context.Context, r *report, pods int, row string) error {
	ips, err := b.freshPods(ctx, pods)
	if err != nil {
		return err
	}
	answered := make(chan error, 1)
	go func() {
		_, err := b.visit(ctx, work{Kind: "await", Targets: ips, Duration: time.Minute})
		answered <- err
	}()
	began := time.Now()
	if err := b.proxyShop(ctx); err != nil {
		return err
	}
	if err := <-answered; err != nil {
		return fmt.Errorf("waiting for the laptop's answers: %w", err)
	}
	r.add(row, all, time.Since(began).Seconds())
	return b.leaveShop(ctx)
}

func (b *bench) proxyShop(ctx context.Context) error {
	if out, err := b.laptop(ctx, b.kubevpn(), "proxy", appWorkload, "--headers",
		ownHeader+"="+ownValue).CombinedOutput(); err != nil {
		return fmt.Errorf("kubevpn proxy: %w\n%s", err, out)
	}
	return nil
}

func (b *bench) leaveShop(ctx context.Context) error {
	if out, err := b.laptop(ctx, b.kubevpn(), "leave", appWorkload).CombinedOutput(); err != nil {
		return fmt.Errorf("kubevpn leave: %w\n%s", err, out)
	}
	return nil
}

// passThrough measures the cost of an agent in the path.
func (b *bench) passThrough(ctx context.Context, r *report) error {
	ips, err := b.shopPods(ctx, 1)
	if err != nil {
		return err
	}
	measure := func(p path, header string) error {
		got, err := b.visit(ctx, work{Kind: "requests", Targets: ips, Header: header, Duration: b.each})
		if err != nil {
			return err
		}
		r.add(requestRow, p, got.P50us)
		if got, err = b.visit(ctx, work{Kind: "fetch", Targets: ips, Header: header, Duration: b.each}); err != nil {
			return err
		}
		r.add(downloadRow, p, got.MBps)
		return nil
	}
	if err := measure(asItIs, ""); err != nil {
		return err
	}
	if err := b.proxyShop(ctx); err != nil {
		return err
	}
	return errors.Join(measure(passedOn, ""), measure(taken, ownValue), b.leaveShop(ctx))
}

// visit makes a measurement on the control plane's node.
func (b *bench) visit(ctx context.Context, w work) (measured, error) {
	ctx, cancel := context.WithTimeout(ctx, w.Duration+30*time.Second)
	defer cancel()
	spec, err := json.Marshal(w)
	if err != nil {
		return measured{}, err
	}
	cmd, err := b.Command(ctx, "node1", b.self, "-client", string(spec))
	if err != nil {
		return measured{}, err
	}
	var m measured
	out, err := cmd.Output()
	if exit := (*exec.ExitError)(nil); errors.As(err, &exit) {
		return m, fmt.Errorf("%w: %s", err, exit.Stderr)
	} else if err != nil {
		return m, err
	}
	return m, json.Unmarshal(out, &m)
}

func (b *bench) kubectl(ctx context.Context, args ...string) (string, error) {
	cmd, err := b.Kubectl(ctx, lab.Admin, args...)
	if err != nil {
		return "", err
	}
	out, err := cmd.CombinedOutput()
	if err != nil {
		return "", fmt.Errorf("kubectl %s: %w: %s", strings.Join(args, " "), err, out)
	}
	return string(out), nil
}

// The measurements that the visitor makes.

const appPort = "8080"

func appURL(ip, path string) string { return "http://" + net.JoinHostPort(ip, appPort) + path }

func get(ctx context.Context, c *http.Client, url, header string) (*http.Response, error) {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
	if err != nil {
		return nil, err
	}
	if header != "" {
		req.Header.Set(ownHeader, header)
	}
	return c.Do(req)
}

// await asks each target until the laptop answers.
func (w work) await() (measured, error) {
	ctx, cancel := context.WithTimeout(context.Background(), w.Duration)
	defer cancel()
	c := &http.Client{Transport: &http.Transport{DisableKeepAlives: true}}
	left := slices.Clone(w.Targets)
	for len(left) > 0 {
		resp, err := get(ctx, c, appURL(left[0], "/"), ownValue)
		if err != nil {
			if ctx.Err() != nil {
				return measured{}, fmt.Errorf("requests to %d pods do not arrive; one is %s", len(left), left[0])
			}
			continue
		}
		name := resp.Header.Get("X-Name")
		_, err = io.Copy(io.Discard, resp.Body)
		resp.Body.Close()
		if err == nil && name == laptopsName {
			left = left[1:]
			continue
		}
		select {
		case <-time.After(2 * time.Millisecond):
		case <-ctx.Done():
		}
	}
	return measured{Count: len(w.Targets)}, nil
}

// requests sends requests to one target over one connection.
func (w work) requests() (measured, error) {
	ctx, cancel := context.WithTimeout(context.Background(), w.Duration+dialTimeout)
	defer cancel()
	c := &http.Client{Transport: &http.Transport{MaxIdleConnsPerHost: 1}}
	var turn <-chan time.Time
	if w.Rate > 0 {
		ticker := time.NewTicker(time.Duration(float64(time.Second) / w.Rate))
		defer ticker.Stop()
		turn = ticker.C
	}
	var took []time.Duration
	for end := time.Now().Add(w.Duration); time.Now().Before(end); {
		if turn != nil {
			<-turn
		}
		began := time.Now()
		resp, err := get(ctx, c, appURL(w.Targets[0], "/"), w.Header)
		if err != nil {
			return measured{}, err
		}
		_, err = io.Copy(io.Discard, resp.Body)
		resp.Body.Close()
		if err != nil {
			return measured{}, err
		}
		took = append(took, time.Since(began))
	}
	return quantiles(took), nil
}

// fetch downloads until the duration has passed.
func (w work) fetch() (measured, error) {
	ctx, cancel := context.WithTimeout(context.Background(), w.Duration+dialTimeout)
	defer cancel()
	resp, err := get(ctx, http.DefaultClient, appURL(w.Targets[0], "/download?bytes=1000000000000"), w.Header)
	if err != nil {
		return measured{}, err
	}
	defer resp.Body.Close()
	body := bufio.NewReaderSize(resp.Body, 256<<10)
	var moved int64
	count, end := time.Now().Add(w.Duration/5), time.Now().Add(w.Duration)
	buf := make([]byte, 256<<10)
	for {
		n, err := body.Read(buf)
		now := time.Now()
		if now.After(end) {
			return measured{MBps: float64(moved) / 1e6 / end.Sub(count).Seconds()}, nil
		}
		if now.After(count) {
			moved += int64(n)
		}
		if err != nil {
			return measured{}, err
		}
	}
}
