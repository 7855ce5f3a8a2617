//go:build e2e && linux

package e2e

import (
	"encoding/json"
	"io"
	"net"
	"strings"
	"testing"

	"kubevpn/internal/api"
	"kubevpn/test/browser"
	"kubevpn/test/lab"
)

// pageSuite checks that the page of `kubevpn ui` shows in Chromium what real programs do, as they do it, and that other
// users of the laptop and other sites cannot read it.
func pageSuite(t *testing.T, w *world) {
	l := w.newLaptop(t, lab.Admin)
	s := w.newShop(t, "page-shop", "privileged")
	var p api.Page
	if err := json.Unmarshal([]byte(l.must(t, "kubevpn", "ui", "--no-open", "-o", "json")), &p); err != nil || p.Kind != api.KindPage {
		t.Fatalf("%+v, %v", p, err)
	}
	if url := l.must(t, "kubevpn", "ui", "--no-open"); url != p.URL {
		t.Errorf("a second command prints %s, the first %s", url, p.URL)
	}
	address, token, _ := strings.Cut(strings.TrimPrefix(p.URL, "http://"), "/#token=")
	l.forwardLoopback(t, address)
	b := browser.Start(t, p.URL)
	b.Shows("not connected")
	l.connect(t)
	b.Shows("connected", "port-forward", "Checks of the tunnel", "kube-dns", l.connection(t).ID)
	b.Until(`document.querySelector("svg[role=img]").getAttribute("aria-label").includes("received now")`)

	t.Run("others_are_rejected", func(t *testing.T) { pageRejects(t, l, address, token) })
	t.Run("flow_of_curl_and_its_name", func(t *testing.T) {
		b.View("flows")
		curl := l.background(t, "curl", "-sN", "telnet://"+net.JoinHostPort(w.clusterIP(t, "default", "web"), "9001"))
		curl.write("hello\n")
		b.Shows("curl (", "service default/web")
		b.View("names")
		const name = "web.default.svc.cluster.local"
		l.must(t, "dig", "+short", "+time=3", name)
		b.Shows(name, "NOERROR")
	})
	t.Run("requests_of_an_intercept", func(t *testing.T) { pageRequests(t, l, b, s) })
	t.Run("checks", func(t *testing.T) {
		b.View("checks")
		b.Click("Run the checks")
		b.Shows(" skipped", "yes: connect", "kubeconfig")
	})
	b.View("log")
	b.Shows("daemon begins")
	b.View("connections")
	l.must(t, "kubevpn", "disconnect", "--all")
	b.Shows("This machine is not connected")
	l.must(t, "kubevpn", "ui", "--stop")
	b.Shows("Run `kubevpn ui`")
	if r := l.sh(t, "curl -sS http://%s/", address); r.code == 0 {
		t.Errorf("the page still answers: %v", r)
	}
}

// pageRejects checks what programs of the laptop without the token, and other sites, get.
func pageRejects(t *testing.T, l *laptop, address, token string) {
	curl := "curl -sS --max-time 20 -o /dev/null -w '%{http_code}' "
	authorized := "-H 'Authorization: Bearer " + token + "' "
	url := "http://" + address + "/api/updates"
	for name, test := range map[string]struct{ command, want string }{
		"another user":    {"setpriv --reuid 65534 --regid 65534 --clear-groups -- " + curl + url, "401"},
		"a wrong token":   {curl + "-H 'Authorization: Bearer wrong' " + url, "401"},
		"another site":    {curl + authorized + "-H 'Origin: http://evil.test' " + url, "403"},
		"another port":    {curl + authorized + "-H 'Sec-Fetch-Site: same-site' " + url, "403"},
		"DNS rebinding":   {curl + authorized + "-H 'Host: evil.test' " + url, "421"},
		"the page itself": {curl + "http://" + address + "/", "200"},
	} {
		if r := l.run(t, "sh", "-c", test.command); r.stdout != test.want {
			t.Errorf("%s: %v, want %s", name, r, test.want)
		}
	}
}

// pageRequests checks that the page shows a request while it is recorded, and the end of its intercept.
func pageRequests(t *testing.T, l *laptop, b *browser.Tab, s *shop) {
	l.startApp(t, "laptop")
	l.proxy(t, s, "--headers", mine+"="+me)
	b.View("intercepts")
	b.Shows(s.namespace+"/"+s.workload, mine+"="+me, "active", "No request is shown")
	b.Click("Record requests")
	b.Shows("Recording in 2 pods")
	_, ip := first(s.ready(t))
	v := l.visitor(t)
	for _, header := range []string{mine + ": you", mine + ": " + me} {
		path := "/seen?" + strings.Fields(header)[1]
		if out, err := v.run(t, "curl", "-sS", "--max-time", "20", "-H", "Cookie: session=secret", "-H", header, "http://"+ip+":8080"+path); err != nil {
			t.Fatal(out, err)
		}
	}
	b.Shows("GET /seen?"+me, "200", "laptop")
	b.Click("GET /seen?" + me)
	b.Shows("Cookie: ", "curl --globoff")
	if text := browser.Eval[string](b, "document.body.innerText"); strings.Contains(text, "secret") || strings.Contains(text, "/seen?you") {
		t.Errorf("the page shows a cookie, or a request that does not match:\n%s", text)
	}
	l.leave(t, s)
	b.Shows("No workload is intercepted")
}

// forwardLoopback forwards a loopback address of this machine, where the browser runs, to the laptop.
func (l *laptop) forwardLoopback(t *testing.T, address string) {
	t.Helper()
	listener, err := net.Listen("tcp", address)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { listener.Close() })
	go func() {
		for {
			conn, err := listener.Accept()
			if err != nil {
				return
			}
			go func() {
				defer conn.Close()
				to, err := l.Dial(t.Context(), "laptop", "tcp", address)
				if err != nil {
					return
				}
				defer to.Close()
				go func() {
					defer to.Close()
					_, _ = io.Copy(to, conn) // an error is the end of the browser's conn
				}()
				_, _ = io.Copy(conn, to) // an error is the end of the page's conn
			}()
		}
	}()
}
