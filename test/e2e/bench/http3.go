//go:build linux

package main

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"io"
	"math/big"
	"net/http"
	"sync/atomic"
	"time"

	"github.com/quic-go/quic-go/http3"
)

// The measurements of HTTP/3: one download and one upload over QUIC, and the same over HTTP/2 with TLS, from the same
// server to the same client.

const securePort = 9201 // UDP: HTTP/3; TCP: HTTP/2

// serveSecure serves /down, which sends zeros until the client disconnects, and /up, which discards the body.
func serveSecure(address string) error {
	certificate, err := selfSigned()
	if err != nil {
		return err
	}
	mux := http.NewServeMux()
	mux.HandleFunc("/down", func(w http.ResponseWriter, _ *http.Request) {
		zeros := make([]byte, 64<<10)
		for {
			if _, err := w.Write(zeros); err != nil {
				return
			}
		}
	})
	mux.HandleFunc("/up", func(w http.ResponseWriter, r *http.Request) { _, _ = io.Copy(io.Discard, r.Body) })
	config := &tls.Config{Certificates: []tls.Certificate{certificate}, MinVersion: tls.VersionTLS13}
	three := http3.Server{Addr: address, Handler: mux, TLSConfig: http3.ConfigureTLSConfig(config)}
	two := http.Server{Addr: address, Handler: mux, TLSConfig: config, ReadHeaderTimeout: dialTimeout}
	failed := make(chan error, 2)
	go func() { failed <- three.ListenAndServe() }()
	go func() { failed <- two.ListenAndServeTLS("", "") }()
	return <-failed
}

func selfSigned() (tls.Certificate, error) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return tls.Certificate{}, err
	}
	template := &x509.Certificate{SerialNumber: big.NewInt(1), NotAfter: time.Now().Add(24 * time.Hour)}
	der, err := x509.CreateCertificate(rand.Reader, template, template, key.Public(), key)
	return tls.Certificate{Certificate: [][]byte{der}, PrivateKey: key}, err
}

// secure moves bytes one way in one request. The first fifth of the time is not counted.
func (w worker) secure() (measured, error) {
	config := &tls.Config{InsecureSkipVerify: true} // the server has just created its certificate
	var transport http.RoundTripper = &http.Transport{TLSClientConfig: config, ForceAttemptHTTP2: true}
	if w.Kind == "http3-down" || w.Kind == "http3-up" {
		three := &http3.Transport{TLSClientConfig: config}
		defer three.Close()
		transport = three
	}
	start := time.Now()
	from, end := start.Add(w.Duration/5), start.Add(w.Duration)
	ctx, cancel := context.WithDeadline(context.Background(), end)
	defer cancel()
	var moved atomic.Int64
	counted := counter(func(n int) {
		if now := time.Now(); now.After(from) && now.Before(end) {
			moved.Add(int64(n))
		}
	})
	var err error
	if w.Kind == "http3-down" || w.Kind == "http2-down" {
		err = download(ctx, transport, "https://"+w.Target+"/down", counted)
	} else {
		err = upload(ctx, transport, "https://"+w.Target+"/up", counted)
	}
	if err != nil && ctx.Err() == nil {
		return measured{}, err
	}
	if moved.Load() == 0 {
		return measured{}, errors.New("no byte has moved")
	}
	return measured{MBps: float64(moved.Load()) / 1e6 / end.Sub(from).Seconds()}, nil
}

// counter counts bytes that are written to it or read from it.
type counter func(n int)

func (c counter) Write(p []byte) (int, error) { c(len(p)); return len(p), nil }

// Read reads zeros without end.
func (c counter) Read(p []byte) (int, error) { c(len(p)); return len(p), nil }

func download(ctx context.Context, transport http.RoundTripper, url string, to counter) error {
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, url, http.NoBody)
	if err != nil {
		return err
	}
	response, err := transport.RoundTrip(request)
	if err != nil {
		return err
	}
	defer response.Body.Close()
	_, err = io.CopyBuffer(to, response.Body, make([]byte, 64<<10))
	return err
}

func upload(ctx context.Context, transport http.RoundTripper, url string, from counter) error {
	request, err := http.NewRequestWithContext(ctx, http.MethodPost, url, io.NopCloser(from))
	if err != nil {
		return err
	}
	response, err := transport.RoundTrip(request)
	if err != nil {
		return err
	}
	return response.Body.Close()
}

// secureMeasurements are the rows of HTTP.
var secureMeasurements = []struct{ kind, row string }{
	{"http2-down", "HTTP/2 down"}, {"http3-down", "HTTP/3 down"}, {"http2-up", "HTTP/2 up"}, {"http3-up", "HTTP/3 up"},
}

// measureSecure measures HTTP over one path.
func (b *bench) measureSecure(ctx context.Context, r *report, p path) error {
	for _, m := range secureMeasurements {
		got, err := b.measure(ctx, work{Kind: m.kind, Target: b.target(p, securePort), Flows: 1, Duration: b.each})
		if err != nil {
			return fmt.Errorf("%s, %s: %w", m.row, p, err)
		}
		r.add(m.row, p, got.MBps)
		say("%s, %s: %.0f MB/s", m.row, p, got.MBps)
	}
	return nil
}
