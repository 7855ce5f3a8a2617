//go:build linux

package agent

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"kubevpn/internal/api"
	"kubevpn/pkg/wire/transport"
)

// FuzzCommands sends anything on the control stream of an authorized owner. The agent
// must answer with valid reports, and another owner's claim must keep working.
func FuzzCommands(f *testing.F) {
	hello := fmt.Sprintf(`{"protocol":%d,"version":"t"}`, api.Protocol)
	for _, lines := range []string{
		"", "{}", "hello", hello, hello + "\n{}", hello + "\nnull\n[]\n\"\"\n1",
		hello + "\n" + `{"id":1,"claim":{"id":"1","ports":[{"protocol":"tcp","port":8080}]}}`,
		hello + "\n" + `{"id":1,"claim":{"id":"1","match":{"headers":[{"name":"x","value":"~("}]},"ports":[{"protocol":"tcp","port":8080}]}}`,
		hello + "\n" + `{"id":1,"claim":{"id":"1","match":{"headers":[{"name":"x-user","value":"mallory"}]},"ports":[{"protocol":"tcp","port":8080}],"mirror":true,"flush":true}}` + "\n" + `{"id":2,"release":"1"}`,
		hello + "\n" + `{"id":1,"claim":{"id":"bob","ports":[{"protocol":"tcp","port":8081,"listen":7}]}}`,
		hello + "\n" + `{"id":1,"claim":{"id":"own","ports":[{"protocol":"tcp","port":7},{"protocol":"sctp","port":1}]}}`,
		hello + "\n" + `{"id":1,"claim":{"id":"clone","ports":[{"protocol":"tcp","port":9}],"clone":{"addresses":["127.0.0.1","","::"]}}}`,
		hello + "\n" + `{"id":1,"claim":{"id":"tls","ports":[{"protocol":"tcp","port":9}],"tls":{"certificate":"eA==","key":"eA=="}}}`,
		hello + "\n" + `{"id":1,"release":"bob","probe":{"preface":""}}` + "\n" + `{"id":2,"release":"bob"}` + "\n" + `{"id":18446744073709551616}`,
		hello + "\n" + `{"id":1,"probe":{"preface":"eA=="}}`,
		hello + "\n" + strings.Repeat("[", 10000),
		hello + "\n" + `{"id":1,"claim":{"id":"` + strings.Repeat("x", 200) + `","since":"9999-12-31T23:59:59Z"}}`,
	} {
		f.Add([]byte(lines))
	}
	f.Fuzz(func(t *testing.T, said []byte) {
		if mayReset(said) || usesSockets(said) {
			return // every owner may reset the agent
		}
		synctest.Test(t, func(t *testing.T) {
			bob, mallory := newPerson(t, "bob@desk"), newPerson(t, "mallory@laptop")
			p := newPod(t, bob)
			b := p.connect(bob)
			if err := b.claim("bob", "x-user=bob"); err != nil {
				t.Fatal(err)
			}
			m := p.attach(p.standby(mallory))
			control, err := m.session.Open(t.Context(), transport.Request{Proto: transport.ProtoControl})
			if err != nil {
				t.Fatal(err)
			}
			go func() {
				control.Write(said) // the agent may have ended the stream
				control.CloseWrite()
			}()
			reports, err := io.ReadAll(control)
			if err != nil {
				t.Logf("the stream ends with %v", err)
			}
			for line := range bytes.Lines(reports) {
				var r api.AgentReport
				if err := json.Unmarshal(line, &r); err != nil {
					t.Errorf("the agent sent %q: %v", line, err)
				}
			}
			if err := b.order(api.AgentOrder{Probe: &api.Probe{Preface: probeOf("still there")}}); err != nil {
				t.Errorf("the agent rejects another owner's order: %v", err)
			}
			if got := p.ask("X-User=bob"); got != "bob@desk" {
				t.Errorf("%s answers bob's requests", got)
			}
		})
	})
}

// mayReset reports whether one of the lines may be the order to reset.
func mayReset(said []byte) bool {
	for line := range bytes.Lines(said) {
		var o api.AgentOrder
		if json.Unmarshal(line, &o); o.Reset {
			return true
		}
	}
	return false
}

func probeOf(text string) []byte {
	return append([]byte(api.ProbePrefix+text), make([]byte, api.ProbeLength)...)[:api.ProbeLength]
}

// usesSockets reports whether an order may name a UDP port. UDP sockets are real ones, for which a bubble cannot wait.
func usesSockets(said []byte) bool {
	return bytes.Contains(bytes.ToLower(said), []byte("udp")) || bytes.Contains(said, []byte(`\u`))
}

// FuzzRegistration sends anything to the agents' socket.
func FuzzRegistration(f *testing.F) {
	const hash = "47DEQpj8HBSa-_TImW-5JCeuQeRkm5NMpJWZG3hSuFU"
	for _, line := range []string{
		"", "{}", "hello\n", `{"owner":"` + hash + `"}` + "\n", `{"owner":"` + hash + `","name":"a@b"}` + "\nmore\n", `{"owner":"YWJj"}` + "\n",
		`{"owner":"` + hash + `=","name":"` + strings.Repeat("x", 300) + `"}` + "\n", `{"owner":"` + hash,
		`{"owner":"` + hash + `","listen":[{"protocol":"tcp","port":8080,"listen":18080}]}` + "\n",
		`{"owner":"` + hash + `","listen":[{"protocol":"tcp","port":8080,"listen":8080},{"protocol":"sctp","port":0,"listen":0}]}` + "\n",
		`{"owner":"` + hash + `","listen":[{"protocol":"tcp","port":0,"listen":70000}]}` + "\n",
		strings.Repeat("x", 1<<16),
	} {
		f.Add([]byte(line))
	}
	f.Fuzz(func(t *testing.T, said []byte) {
		if usesSockets(said) {
			return
		}
		synctest.Test(t, func(t *testing.T) {
			bob := newPerson(t, "bob@desk")
			p := newPod(t, bob)
			b := p.connect(bob)
			if err := b.claim("bob"); err != nil {
				t.Fatal(err)
			}
			conn, err := p.agents.Dial(t.Context())
			if err != nil {
				t.Fatal(err)
			}
			defer conn.Close()
			go conn.Write(said) // the agent may have closed it
			conn.SetReadDeadline(time.Now().Add(2 * messageTimeout))
			var m message
			if err := json.NewDecoder(conn).Decode(&m); err == nil && m.Info != nil && m.Error != nil {
				t.Errorf("the agent sent %+v", m)
			}
			synctest.Wait()
			for at := range p.incoming {
				if at != 0 && !bytes.Contains(said, fmt.Append(nil, at)) {
					t.Errorf("the agent listens on %d, which the registration does not contain", at)
				}
			}
			if got := p.ask(); got != "bob@desk" {
				t.Errorf("%s answers bob's requests", got)
			}
		})
	})
}
