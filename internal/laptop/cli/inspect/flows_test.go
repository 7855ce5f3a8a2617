package inspect

import (
	"bytes"
	"net/netip"
	"strings"
	"testing"
	"time"

	"kubevpn/internal/api"
	"kubevpn/internal/laptop/cli/term"
)

func TestFlowsPrintsATableWithASum(t *testing.T) {
	link := 2
	now := time.Unix(1000, 0)
	list := api.FlowList{Time: now, Items: []api.Flow{
		{
			Connection: "3f2a91c04b7e", Program: "cu\x1brl\n", PID: 42, Protocol: "tcp", Source: netip.MustParseAddrPort("198.19.0.2:40000"),
			Destination: netip.MustParseAddrPort("10.96.0.80:80"), Name: api.ObjectName{Kind: "service", Namespace: "default", Name: "web"},
			Since: now.Add(-time.Minute), Counted: true, Sent: 120, Received: 33e6, ReceivedRate: 11e6, Seconds: 0.0012,
			RoundTripTo: api.RoundTripManager, Transport: "direct", Link: &link,
		},
		{
			Protocol: "tcp", Source: netip.MustParseAddrPort("198.19.0.2:40001"), Destination: netip.MustParseAddrPort("10.244.1.7:9"),
			Counted: true, Stall: api.StallProgram, StallSeconds: 3.4,
		},
		{Protocol: "icmp", Source: netip.MustParseAddrPort("198.19.0.2:0"), Destination: netip.MustParseAddrPort("10.244.1.8:0")},
	}, Total: api.FlowTotal{Flows: 70, Stalled: 1, SentRate: 5, ReceivedRate: 11e6}, Warnings: []string{"this system is odd"}}
	var out bytes.Buffer
	o := &flowsOptions{output: term.NewFormat("wide")}
	if err := o.print(&out, list); err != nil {
		t.Fatal(err)
	}
	text := strings.Join(strings.Fields(out.String()), " ")
	for _, want := range []string{
		"curl (42) tcp 40000 10.96.0.80:80 service default/web 120 B 33 MB 11 MB/s 1.2 ms - 3f2a91c04b7e direct 2 60s -",
		"- tcp 40001 10.244.1.7:9 - 0 B 0 B 0 B/s - program does not read, 3 s",
		"- icmp - 10.244.1.8 - - - - - -",
		"70 flows, 3 shown, 1 stalled: 5 B/s sent, 11 MB/s received", "! this system is odd",
	} {
		if !strings.Contains(text, want) {
			t.Errorf("%q is missing in\n%s", want, out.String())
		}
	}
}

func TestFollowedObjectsAreLinesOfJSON(t *testing.T) {
	var out bytes.Buffer
	o := &flowsOptions{output: term.NewFormat("json"), follow: true}
	for range 2 {
		if err := o.print(&out, api.FlowList{Items: []api.Flow{{}}}); err != nil {
			t.Fatal(err)
		}
	}
	if n := strings.Count(out.String(), "\n"); n != 2 {
		t.Errorf("%d lines:\n%s", n, out.String())
	}
}
