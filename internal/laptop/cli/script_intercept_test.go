//go:build unix

package cli

import (
	"context"
	"encoding/json"
	"io"
	"net/http"
	"net/netip"
	"os"
	"path/filepath"
	"time"

	"kubevpn/internal/api"
	"kubevpn/internal/kube/client"
)

// intercept behaves as the name of the first workload says.
func (d *fakeDaemon) intercept(w http.ResponseWriter, r *http.Request) {
	http.NewResponseController(w).EnableFullDuplex()
	var req api.InterceptRequest
	json.NewDecoder(r.Body).Decode(&req)
	if d.lacksHelper(w) {
		return
	}
	text, _ := json.Marshal(req)
	os.WriteFile(filepath.Join(d.paths.StateDir, "intercept.json"), text, 0o600)
	send := func(e api.Event) {
		json.NewEncoder(w).Encode(e)
		w.(http.Flusher).Flush()
	}
	if err := foreign(&req.Connect); err != nil {
		send(api.Event{Error: err})
		return
	}
	c := api.Connection{ID: "id-" + req.Connect.Context, Cluster: "lab", Namespace: "default", Status: api.StatusConnected, Since: time.Now()}
	d.put(c)
	send(api.Event{Connection: &c})
	workload := req.Workloads[0]
	leave := func(doing string) {
		d.note(doing)
		io.Copy(io.Discard, r.Body)
		d.mu.Lock()
		delete(d.intercepts, workload)
		d.mu.Unlock()
		d.note("left")
		send(api.Event{Step: "Leaving " + workload, Done: true})
	}
	send(api.Event{Step: "Adding the agent"})
	switch workload {
	case "deployment/taken":
		send(api.Event{Error: api.Errorf(api.ExitConflict, "bob@desk has everything of port 8080 since 14:02").WithHint("ask them")})
		return
	case "deployment/slow":
		leave("waiting")
		return
	}
	send(api.Event{Step: "Adding the agent", Done: true})
	for _, name := range req.Workloads {
		i := api.Intercept{
			ID: "3f2a91c04b7e", Connection: c.ID, Namespace: req.Connect.Namespace, Workload: name, State: api.InterceptActive,
			Mode: api.ModeEphemeral, ModeReason: "the namespace admits it", Match: "x-user=me", Mirror: req.Spec.Mirror,
			Ports: req.Spec.Ports, Pods: []api.InterceptedPod{{Name: "web-1", Intercepted: true}, {Name: "web-2", Reason: "is starting"}},
			Owner: "ann@laptop", Since: time.Now(), Requests: 7,
			Others: []api.Claim{{Owner: "bob@desk", Match: "x-user=bob", Away: true, Ports: []api.AgentPort{{Protocol: "tcp", Port: 8080}}}},
		}
		if c := req.Spec.Clone; c != nil {
			i.Mode, i.Pods, i.Others = api.ModeEphemeral, []api.InterceptedPod{{Name: "web-1", Intercepted: true}}, nil
			i.Ports = []api.PortMap{{Protocol: "tcp", Container: 8080, Name: "http", Local: 8080}}
			i.Clone = &api.Clone{
				Namespace: req.Connect.Namespace, Name: "web-ann", State: api.CloneRunning, Host: "web-ann." + req.Connect.Namespace,
				Ports:     []api.ClonePort{{Protocol: "tcp", Port: 80, Target: 8080}, {Protocol: "udp", Port: 53, Target: 53}},
				Pods:      []api.ClonePod{{Name: "web-ann-7xk2p", IP: "10.244.1.19", Ready: true}, {Name: "web-ann-q9d4z", Reason: "app: ErrImagePull"}},
				Notes:     []string{"volume data is empty"},
				NoTraffic: c.NoTraffic,
			}
			for n, pair := range c.Sync {
				i.Clone.Sync = append(i.Clone.Sync, api.Synced{SyncPair: pair, Synced: n == 0, Files: 37, LastError: []string{"", "at the other end: mkdir /app: permission denied"}[n]})
			}
			if c.NoTraffic {
				i.Match, i.Mode, i.Ports, i.Pods = "nothing", "", nil, nil
			}
		}
		d.mu.Lock()
		d.intercepts[name] = i
		d.mu.Unlock()
		send(api.Event{Intercept: &i})
	}
	if req.Attached {
		leave("attached")
	}
}

func (d *fakeDaemon) leave(w http.ResponseWriter, r *http.Request) {
	var req api.LeaveRequest
	json.NewDecoder(r.Body).Decode(&req)
	d.mu.Lock()
	defer d.mu.Unlock()
	if req.All {
		for name := range d.intercepts {
			req.Workloads = append(req.Workloads, name)
		}
	}
	for _, name := range req.Workloads {
		i, ok := d.intercepts[name]
		if !ok || req.Namespace != "" && req.Namespace != i.Namespace {
			json.NewEncoder(w).Encode(api.Event{Error: api.Errorf(api.ExitWorkload, "%s is not intercepted from here", name)})
			return
		}
		delete(d.intercepts, name)
		json.NewEncoder(w).Encode(api.Event{Step: "Leaving " + name, Done: true, Intercept: &i})
	}
}

// recorded answers with two requests of which the first is what a hostile client sent, and ends unless it is followed.
func (d *fakeDaemon) recorded(w http.ResponseWriter, r *http.Request) {
	var req api.RequestsRequest
	json.NewDecoder(r.Body).Decode(&req)
	if req.Workload != "deployment/web" {
		w.WriteHeader(http.StatusInternalServerError)
		json.NewEncoder(w).Encode(api.Errorf(api.ExitWorkload, "%s is not intercepted from here", req.Workload))
		return
	}
	text, _ := json.Marshal(req)
	os.WriteFile(filepath.Join(d.paths.StateDir, "requests.json"), text, 0o600)
	send := func(r api.Record) {
		json.NewEncoder(w).Encode(r)
		w.(http.Flusher).Flush()
	}
	if req.Follow {
		send(api.Record{Warning: "cannot record in pod web-2: its agent is old"})
		send(api.Record{Pods: 1})
	}
	e := api.Exchange{
		Began: time.Date(2026, 1, 2, 3, 4, 5, 6e6, time.UTC), Wait: 0.0012, Seconds: 1.23456, Pod: "web-1", Match: "x-user=me", To: api.ToLaptop,
		Server: netip.MustParseAddrPort("10.244.1.7:8080"),
		Request: api.ExchangeRequest{Method: "POST", Scheme: "http", Host: "web", Path: "/a\x1b[2J'", Proto: "HTTP/1.1",
			Body: api.ExchangeBody{Size: 9, Data: []byte("it's\nme")}},
		Response: &api.ExchangeResponse{Status: 200, Trailers: http.Header{"Grpc-Status": {"5"}}, Body: api.ExchangeBody{Size: 3, Data: []byte("\x00\x01\x02")}},
	}
	send(api.Record{Exchange: &e})
	e = api.Exchange{Began: e.Began, Pod: "web-1", To: api.ToApplication, Mirrored: true, Error: "the client gave up",
		Request: api.ExchangeRequest{Method: "GET", Path: "/b"}}
	send(api.Record{Exchange: &e, Dropped: 3})
	if req.Follow {
		<-r.Context().Done()
	}
}

func fakeReset(_ context.Context, _ *client.Cluster, req api.ResetRequest, progress func(api.Event)) error {
	if req.Workloads[0] == "deployment/foreign" {
		if err := req.Consent.Trusts(theirs("kubevpn")); err != nil {
			return err
		}
	}
	if req.Workloads[0] == "deployment/theirs" {
		return api.Errorf(api.ExitPermission, "you may not patch deployments in the namespace %s", req.Namespace)
	}
	if req.Mine && req.Workloads[0] != "deployment/left" {
		return api.Errorf(api.ExitWorkload, "%s is not intercepted from here, and its template has no agent of yours", req.Workloads[0])
	}
	for _, name := range req.Workloads {
		progress(api.Event{Step: "Resetting " + name, Detail: req.Namespace + " " + req.Image, Done: true})
	}
	return nil
}
