package connection

import (
	"bufio"
	"bytes"
	"errors"
	"fmt"
	"io"
	"strings"
	"testing"

	"kubevpn/internal/api"
)

// conversation is a control stream that already contains all messages of the manager.
type conversation struct{ io.Reader }

func (conversation) Write(p []byte) (int, error) { return len(p), nil }

func TestControlRejectsAnEndlessMessage(t *testing.T) {
	hello := fmt.Sprintf("{\"hello\":{\"protocol\":%d}}\n", api.Protocol)
	said := io.MultiReader(strings.NewReader(hello), strings.NewReader(`{"names":{"add":{"`), bytes.NewReader(make([]byte, 4*maxMessage)))
	c, _, err := startControl(conversation{said}, api.ClientHello{Protocol: api.Protocol}, nil)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := c.next(); !errors.Is(err, bufio.ErrTooLong) {
		t.Errorf("got %v", err)
	}
}

// FuzzControl plays a hostile traffic manager: whatever it sends on the control stream, the index stays bounded and
// contains only names of Services.
func FuzzControl(f *testing.F) {
	hello := fmt.Sprintf(`{"hello":{"protocol":%d,"version":"1","pod":"m","lease":{"addrs":["198.19.0.2"],"networks":["198.19.0.0/24"]},"state":{"resolvesVIPs":true,"sessions":1}}}`+"\n", api.Protocol)
	for _, seed := range []string{
		hello + `{"names":{"reset":true,"add":{"default":["web","db"]}}}` + "\n" + `{"names":{"remove":{"default":["web"]}}}` + "\n",
		hello + `{"state":{"podCIDRs":["10.244.0.0/16","fd00::/48"],"serviceCIDRs":["10.96.0.0/12"],"dnsServers":["10.96.0.10"],"dnsDomain":"cluster.local"}}` + "\n",
		hello + `{"names":{"add":{"Default":["web\u001b[2J"],"":[""],"a.b":["c"]}}}` + "\n",
		hello + `{"state":{"gateway":{"mtu":-1,"addrs":["x"]},"innerNetworks":["0.0.0.0/0"],"probePod":"1.2.3.4:99999"}}` + "\n",
		hello + `{"error":{"code":15,"message":"no"}}` + "\n",
		`{"hello":{"protocol":1}}`, `{"error":null}`, "null\n", "[]\n", "\n",
	} {
		f.Add([]byte(seed))
	}
	f.Fuzz(func(t *testing.T, said []byte) {
		c, _, err := startControl(conversation{bytes.NewReader(said)}, api.ClientHello{Protocol: api.Protocol}, nil)
		if err != nil {
			return
		}
		n := newNames()
		for {
			m, err := c.next()
			if err != nil {
				break
			}
			if m.Names != nil {
				n.apply(fromManager, *m.Names)
			}
		}
		if held := n.index.Size(); held > maxNames {
			t.Errorf("%d names are held, more than %d", held, maxNames)
		}
		for _, ns := range n.matchable() {
			if !isLabel(ns) {
				t.Errorf("%q is taken for a namespace", ns)
			}
		}
	})
}
