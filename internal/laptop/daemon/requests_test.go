//go:build linux

package daemon

import (
	"bytes"
	"encoding/json"
	"testing"

	"kubevpn/internal/api"
)

func TestRequestsOfAnIntercept(t *testing.T) {
	r := start(t)
	r.connect("a")
	r.intercept(interceptRequest("a", "deployment/web"))
	body, err := json.Marshal(api.RequestsRequest{Workload: "deployment/web", Follow: true})
	if err != nil {
		t.Fatal(err)
	}
	resp, err := r.client.Post("http://daemon"+api.PathRequests, "application/json", bytes.NewReader(body))
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	dec := json.NewDecoder(resp.Body)
	var record api.Record
	if err := dec.Decode(&record); err != nil || record.Exchange == nil || record.Exchange.Workload != "deployment/web" {
		t.Errorf("record %+v, %v", record, err)
	}
	r.mustPost(api.PathLeave, api.LeaveRequest{All: true})
	record = api.Record{}
	if err := dec.Decode(&record); err != nil || record.Error == nil || record.Error.Code != api.ExitLost {
		t.Errorf("after the end of the intercept: %+v, %v", record, err)
	}
	if got := r.mustPost(api.PathRequests, api.RequestsRequest{Workload: "deployment/web"}); got.err == nil || got.err.Code != api.ExitWorkload {
		t.Errorf("requests of no intercept: %+v", got)
	}
}
