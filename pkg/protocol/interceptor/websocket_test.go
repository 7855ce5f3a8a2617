package interceptor

import (
	"bytes"
	"net/http"
	"testing"

	"github.com/gorilla/websocket"
)

func webSocketServer(tb testing.TB, name string) string {
	return serve(tb, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		u := websocket.Upgrader{Subprotocols: []string{"chat"}, EnableCompression: true}
		c, err := u.Upgrade(w, r, http.Header{"X-From": {name}})
		if err != nil {
			return
		}
		defer c.Close()
		for {
			kind, b, err := c.ReadMessage()
			if err != nil {
				return
			}
			if string(b) == "leave" {
				c.WriteMessage(websocket.CloseMessage, websocket.FormatCloseMessage(4000, "as you say"))
				return
			}
			if err := c.WriteMessage(kind, b); err != nil {
				return
			}
		}
	}))
}

func TestWebSocketReachesItsTarget(t *testing.T) {
	r := newRig(t, webSocketServer(t, "app"))
	stats := new(Stats)
	r.claim(Claim{ID: "me", Match: header(t, "x-user=me"), Target: &target{addr: webSocketServer(t, "laptop")}, Stats: stats},
		Claim{ID: "lost", Match: header(t, "x-user=lost"), Target: &target{addr: "127.0.0.1:1"}},
		Claim{ID: "mirror", Mirror: true, Target: &target{addr: webSocketServer(t, "mirror")}})
	d := websocket.Dialer{Subprotocols: []string{"chat"}, EnableCompression: true}
	for user, want := range map[string]string{"me": "laptop", "you": "app"} {
		c, resp, err := d.Dial("ws://"+r.addr+"/", http.Header{"X-User": {user}})
		if err != nil {
			t.Fatal(err)
		}
		if resp.Header.Get("X-From") != want || c.Subprotocol() != "chat" {
			t.Errorf("%s was answered with %v", user, resp.Header)
		}
		for _, n := range []int{0, 1, 125, 70000, 1 << 20} {
			message := bytes.Repeat([]byte{7}, n)
			if err := c.WriteMessage(websocket.BinaryMessage, message); err != nil {
				t.Fatal(err)
			}
			if kind, got, err := c.ReadMessage(); err != nil || kind != websocket.BinaryMessage || !bytes.Equal(got, message) {
				t.Fatalf("%d bytes of %d came back, %v", len(got), n, err)
			}
		}
		if err := c.WriteMessage(websocket.TextMessage, []byte("leave")); err != nil {
			t.Fatal(err)
		}
		if _, _, err := c.ReadMessage(); !websocket.IsCloseError(err, 4000) {
			t.Errorf("the close message arrived as %v", err)
		}
		c.Close()
	}
	if stats.Requests() != 1 {
		t.Errorf("%d requests were counted", stats.Requests())
	}
	if _, resp, err := d.Dial("ws://"+r.addr+"/", http.Header{"X-User": {"lost"}}); err == nil || resp == nil || resp.StatusCode != http.StatusBadGateway {
		t.Errorf("a target that refuses connections: %v, %v", resp, err)
	}
}
