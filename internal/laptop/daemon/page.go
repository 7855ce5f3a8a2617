package daemon

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net/http"
	"os"
	"sync"
	"time"

	"kubevpn/internal/api"
	"kubevpn/internal/inspect/doctor"
	"kubevpn/internal/inspect/exchanges"
	"kubevpn/internal/kube/client"
	"kubevpn/internal/laptop/connection"
	"kubevpn/internal/laptop/hostservice"
	"kubevpn/internal/laptop/page"
	"kubevpn/pkg/host/sockets"
	"kubevpn/pkg/wakeup"
)

// servedPage is the page of `kubevpn ui`.
type servedPage struct {
	mu     sync.Mutex
	server *page.Server    // nil: nobody asked for the page
	asked  api.PageRequest // the last request
}

// servePage begins or ends the page.
func (d *daemon) servePage(_ context.Context, req api.PageRequest) (api.Page, error) {
	if req.Stop {
		d.stopPage()
		return api.Page{}, nil
	}
	p := &d.page
	p.mu.Lock()
	defer p.mu.Unlock()
	if d.ending.Err() != nil {
		return api.Page{}, errEnding
	}
	p.asked = req
	if p.server == nil {
		server, err := page.Listen(d.counted(d.pageHandler()), d.logger)
		if err != nil {
			return api.Page{}, err
		}
		p.server = server
		d.logger.Info("page begins")
	}
	out := api.Page{URL: p.server.URL(), File: d.cfg.Paths.PageFile()}
	// The arguments of a browser are no secret on most systems, so it gets the name of a file.
	text := fmt.Sprintf("<!doctype html>\n<meta http-equiv=refresh content=\"0; url=%s\">\n", out.URL)
	if err := os.WriteFile(out.File, []byte(text), 0o600); err != nil {
		return api.Page{}, fmt.Errorf("cannot write the file that opens the page: %w", err)
	}
	return out, nil
}

// stopPage ends the page, if there is one.
func (d *daemon) stopPage() {
	p := &d.page
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.server == nil {
		return
	}
	p.server.Close()
	p.server, p.asked = nil, api.PageRequest{}
	if err := os.Remove(d.cfg.Paths.PageFile()); err != nil && !errors.Is(err, fs.ErrNotExist) {
		d.logger.Warn("cannot remove the file that opened the page", "err", err)
	}
	d.logger.Info("page ends")
}

// lastRequest returns the last request for the page.
func (p *servedPage) lastRequest() api.PageRequest {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.asked
}

// pageHandler serves the requests that the page may send. None of them changes a connection or an intercept; only
// /requests makes agents record.
func (d *daemon) pageHandler() http.Handler {
	mux := http.NewServeMux()
	mux.HandleFunc("GET /updates", d.handleUpdates)
	mux.HandleFunc("POST /requests", streaming(d,
		func(ctx context.Context, req api.RequestsRequest, emit func(api.Record)) error {
			req.Redact = d.page.lastRequest().Redact
			return d.connections.intercepts.requests(ctx, req, emit)
		}))
	mux.HandleFunc("POST /curl", answering(d, toCurl))
	mux.HandleFunc("POST /har", d.handleHAR)
	mux.HandleFunc("POST /doctor", d.handleDoctor)
	return mux
}

// handleUpdates answers a line of PageUpdate at once, and one each second until the client has gone.
func (d *daemon) handleUpdates(w http.ResponseWriter, r *http.Request) {
	recent, queries, end := d.connections.queries.follow(false)
	defer end()
	sampler := &flowSampler{sources: d.connections.working, list: sockets.List, owners: sockets.Owners}
	logged := 0
	d.lines(w, r, func(ctx context.Context, send func(any)) {
		for {
			u := api.PageUpdate{Status: d.status(), Flows: sampler.sample(time.Now(), maxPageFlows)}
			u.DNS = append([]api.DNSQuery{}, recent...) // never null
			u.Log, logged = d.log.since(logged)
			send(u)
			if !wakeup.Pause(ctx, flowInterval) {
				return
			}
			recent = queries.drain()
		}
	})
}

// maxPageFlows limits the flows of a PageUpdate.
const maxPageFlows = 200

// drain returns the queries that wait.
func (f *queryFollower) drain() []api.DNSQuery {
	out := []api.DNSQuery{}
	for {
		select {
		case q := <-f.queue:
			out = append(out, q)
		default:
			return out
		}
	}
}

// maxHAR limits the exchanges that the page saves, in bytes of JSON.
const maxHAR = 64 << 20

func toCurl(_ context.Context, e api.Exchange) (string, error) { return exchanges.Curl(&e), nil }

func (d *daemon) handleHAR(w http.ResponseWriter, r *http.Request) {
	var list []api.Exchange
	if !d.read(w, r, maxHAR, &list) {
		return
	}
	var out bytes.Buffer
	h := exchanges.NewHAR(&out)
	var err error
	for i := range list {
		err = errors.Join(err, h.Add(&list[i], ""))
	}
	if err = errors.Join(err, h.Close("")); err != nil {
		d.answer(w, http.StatusInternalServerError, api.AsError(err))
		return
	}
	w.Header().Set("Content-Type", "application/json")
	_, _ = out.WriteTo(w) // an error means that the client has gone
}

// handleDoctor answers the Diagnosis of the cluster that the last `kubevpn ui` named.
func (d *daemon) handleDoctor(w http.ResponseWriter, r *http.Request) {
	asked := d.page.lastRequest()
	req := asked.Connect
	cfg := doctor.Config{
		Settings: req.ConnectSettings, Paths: d.cfg.Paths, Machine: asked.Machine,
		Load: func() (p client.Prepared, c *client.Cluster, err error) {
			if asked.KubeconfigError != nil {
				return p, nil, asked.KubeconfigError
			}
			p = client.Prepared{Kubeconfig: req.Kubeconfig, Context: req.Context, Cluster: asked.Cluster,
				Namespace: req.Namespace}
			c, err = client.Load(p.Kubeconfig, client.Options{Logger: d.logger})
			return p, c, err
		},
		Status:        func(context.Context) (api.Status, error) { return d.status(), nil },
		HelperService: hostservice.Status, Foresee: connection.Foresee, Try: connection.Try,
	}
	d.answer(w, http.StatusOK, doctor.Run(r.Context(), cfg))
}
