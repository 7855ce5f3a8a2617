//go:build e2e && linux

package e2e

import (
	"errors"
	"fmt"
	"net"
	"strings"
	"testing"
	"time"

	"kubevpn/internal/api"
	"kubevpn/internal/testenv"
	"kubevpn/test/lab"
)

// exposeSuite makes Services for programs of the laptop, which clients in the cluster use by name and address.
func exposeSuite(t *testing.T, w *world) {
	w.newShop(t, "expose-shop", "restricted") // the namespace, and pods that are clients
	l := w.newUser(t, lab.Admin)
	v := w.visitor(t)
	before := w.objectsOf(t, "expose-shop")
	expose := func(args ...string) []string {
		return append([]string{"kubevpn", "expose", "-n", "expose-shop"}, args...)
	}
	// fetch is curl in a pod, by the name that the pod's search path completes, and on a node, by the ClusterIP.
	fetch := func(name string) error {
		pod := w.kubectl(t, "-n", "expose-shop", "get", "pods", "-l", "app=shop", "-o", "jsonpath={.items[0].metadata.name}")
		for _, at := range []string{"http://" + name + "/here", "http://" + name + ".expose-shop.svc.cluster.local/here"} {
			if _, err := w.tryKubectl(t.Context(), "-n", "expose-shop", "exec", pod, "-c", "app", "--", "/app", "-get", at); err != nil {
				return fmt.Errorf("%s from a pod: %w", at, err)
			}
		}
		out, err := v.run(t, "curl", "-sS", "--max-time", "5", "http://"+w.clusterIP(t, "expose-shop", name)+"/here")
		if err != nil || !strings.Contains(out, "laptop") {
			return fmt.Errorf("by the ClusterIP: %w: %s", err, out)
		}
		return nil
	}
	endpoints := func(name string, want int) error {
		out := w.kubectl(t, "-n", "expose-shop", "get", "endpointslices", "-l", "kubernetes.io/service-name="+name, "-o", "jsonpath={.items[*].endpoints[?(@.conditions.ready==true)].addresses[0]}")
		if n := len(strings.Fields(out)); n != want {
			return fmt.Errorf("%d ready endpoints of %s, want %d", n, name, want)
		}
		return nil
	}

	t.Run("invalid_arguments_are_rejected", func(t *testing.T) {
		for _, args := range [][]string{{"hook"}, {"Hook", "80"}, {"hook", "http"}, {"hook", "80:0"}, {"hook", "80", "80:3000"}} {
			failure{code: api.ExitUsage, message: ".", hint: "kubevpn expose"}.check(t, l.run(t, expose(args...)...))
		}
	})
	t.Run("pods_reach_the_program", func(t *testing.T) {
		stop := l.servePage(t, "3000")
		r := l.run(t, expose("hook", "80:3000")...)
		if r.code != 0 || !strings.Contains(r.stdout, "hook.expose-shop") || strings.Contains(r.stderr, "no agent answered") {
			t.Fatal(r)
		}
		// The traffic manager has reached it. Other nodes hear of the endpoint a moment later.
		testenv.Eventually(t, soon, func() error { return errors.Join(fetch("hook"), endpoints("hook", 1)) })
		if out := l.must(t, "kubevpn", "status"); !strings.Contains(out, "service/hook") {
			t.Error(out)
		}
		stop() // readiness follows the program
		testenv.Eventually(t, 20*time.Second, func() error { return endpoints("hook", 0) })
		stop = l.servePage(t, "3000")
		defer stop()
		testenv.Eventually(t, 20*time.Second, func() error { return errors.Join(endpoints("hook", 1), fetch("hook")) })
		l.must(t, "kubevpn", "leave", "service/hook")
		testenv.Eventually(t, 20*time.Second, func() error { return same(w.objectsOf(t, "expose-shop"), before) })
	})
	t.Run("two_ports_and_udp", func(t *testing.T) {
		defer l.servePage(t, "3000")()
		r := l.run(t, expose("many", "80:3000", "81:3000", "udp/5300:5353")...)
		if r.code != 0 {
			t.Fatal(r)
		}
		defer l.must(t, "kubevpn", "leave", "service/many")
		vip := w.clusterIP(t, "expose-shop", "many")
		if err := inside(l.network(), func() error {
			udp, err := net.ListenPacket("udp", "127.0.0.1:5353")
			if err != nil {
				return err
			}
			t.Cleanup(func() { udp.Close() })
			go func() {
				b := make([]byte, 100)
				for {
					n, from, err := udp.ReadFrom(b)
					if err != nil {
						return
					}
					_, _ = udp.WriteTo(append([]byte("laptop "), b[:n]...), from)
				}
			}()
			return nil
		}); err != nil {
			t.Fatal(err)
		}
		testenv.Eventually(t, 20*time.Second, func() error {
			for _, port := range []string{"80", "81"} {
				if out, err := v.run(t, "curl", "-sS", "--max-time", "5", "http://"+vip+":"+port+"/here"); err != nil || !strings.Contains(out, "laptop") {
					return fmt.Errorf("port %s: %w: %s", port, err, out)
				}
			}
			out, err := v.run(t, "python3", "-c", "import socket,sys; s=socket.socket(socket.AF_INET,socket.SOCK_DGRAM); s.settimeout(3); s.sendto(b'hello',(sys.argv[1],5300)); print(s.recv(100))", vip)
			if err != nil || !strings.Contains(out, "laptop hello") {
				return fmt.Errorf("UDP: %w: %s", err, out)
			}
			return nil
		})
	})
	t.Run("name_of_another_object_is_a_conflict", func(t *testing.T) {
		failure{code: api.ExitConflict, message: "already has a Service shop", hint: "name"}.check(t, l.run(t, expose("shop", "80:3000")...))
		if err := same(w.objectsOf(t, "expose-shop"), before); err != nil {
			testenv.Eventually(t, 20*time.Second, func() error { return same(w.objectsOf(t, "expose-shop"), before) })
		}
	})
	t.Run("program_that_does_not_listen_is_told", func(t *testing.T) {
		r := l.run(t, expose("early", "80:3000")...)
		if r.code != 0 || !strings.Contains(r.stderr, "nothing listens on port 3000 of this machine: the Service has no endpoint") {
			t.Error(r)
		}
		l.must(t, "kubevpn", "leave", "service/early")
	})
	t.Run("gone_two_minutes_after_the_laptop", func(t *testing.T) {
		defer l.servePage(t, "3000")()
		if r := l.run(t, expose("mortal", "80:3000")...); r.code != 0 {
			t.Fatal(r)
		}
		kill(t, l.daemonPID(t))
		// Kubernetes ends a Job at its deadline, and deletes what it owns: the clones' deaths show it.
		out := w.kubectl(t, "-n", "expose-shop", "get", "job", "mortal", "-o", "jsonpath={.spec.activeDeadlineSeconds} {.spec.ttlSecondsAfterFinished}")
		owner := w.kubectl(t, "-n", "expose-shop", "get", "service", "mortal", "-o", "jsonpath={.metadata.ownerReferences[0].kind}/{.metadata.ownerReferences[0].name}")
		if out != "90 5" || owner != "Job/mortal" {
			t.Errorf("it lives for %s s, and %s owns its Service", out, owner)
		}
		w.kubectl(t, "-n", "expose-shop", "delete", "job", "mortal")
		testenv.Eventually(t, time.Minute, func() error { return same(w.objectsOf(t, "expose-shop"), before) })
	})
	t.Run("ingress", func(t *testing.T) { exposeOutside(t, w, l, expose) })
	l.must(t, "kubevpn", "disconnect", "--all")
}

// exposeOutside looks at the Ingress and the HTTPRoute that the API server accepts. The lab has no controller of either.
func exposeOutside(t *testing.T, w *world, l *laptop, expose func(...string) []string) {
	defer l.servePage(t, "3000")()
	failure{code: api.ExitWorkload, message: "no Gateway admits .* no IngressClass", hint: "--host"}.
		check(t, l.run(t, expose("door", "80:3000", "--host", "door.example.com")...))
	w.apply(t, `
apiVersion: networking.k8s.io/v1
kind: IngressClass
metadata: {name: e2e}
spec: {controller: example.com/none}
`)
	defer w.kubectl(t, "delete", "ingressclass", "e2e")
	r := l.run(t, expose("door", "80:3000", "--host", "door.example.com")...)
	if r.code != 0 || !strings.Contains(r.stdout, "door.example.com (Ingress, class e2e)") || !strings.Contains(r.stderr, "no controller has accepted the Ingress door") {
		t.Fatal(r)
	}
	if out := w.kubectl(t, "-n", "expose-shop", "get", "ingress", "door", "-o", "jsonpath={.spec.ingressClassName} {.spec.rules[0].host} {.spec.rules[0].http.paths[0].backend.service.name} {.metadata.ownerReferences[0].kind}"); out != "e2e door.example.com door Job" {
		t.Error(out)
	}
	l.must(t, "kubevpn", "leave", "service/door")
	testenv.Eventually(t, 20*time.Second, func() error {
		if out := w.kubectl(t, "-n", "expose-shop", "get", "ingress", "-o", "name"); out != "" {
			return errors.New(out)
		}
		return nil
	})
}

// servePage runs Python's web server on a port of the laptop's loopback, until the returned function is called.
func (l *laptop) servePage(t *testing.T, port string) (stop func()) {
	t.Helper()
	cmd := l.command(t.Context(), t, "sh", "-c", `cd "$(mktemp -d)" && echo laptop > here && exec python3 -m http.server --bind 127.0.0.1 `+port)
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	ended := false
	stop = func() {
		if !ended {
			ended = true
			_ = cmd.Process.Kill()
			_ = cmd.Wait()
		}
	}
	t.Cleanup(stop)
	testenv.Eventually(t, time.Minute, func() error {
		c, err := dialIn(l.network(), "127.0.0.1:"+port)
		if err == nil {
			c.Close()
		}
		return err
	})
	return stop
}

// objectsOf lists what a namespace has, except Events and what changes by itself.
func (w *world) objectsOf(t *testing.T, namespace string) string {
	t.Helper()
	return w.kubectl(t, "-n", namespace, "get", "jobs,services,ingresses,pods", "-o", "name")
}

func same(now, before string) error {
	if now != before {
		return fmt.Errorf("there is\n%s\nand was\n%s", now, before)
	}
	return nil
}
