package client

import (
	"cmp"
	"context"
	"fmt"
	"net"
	"net/http"
	"net/url"
	"time"
)

// Path describes the hops between this machine and the API server, according to the kubeconfig.
type Path struct {
	Address string // HOST:PORT of the proxy, or else of the API server, which the jump hosts dial if there are any
	Proxy   string // URL of the proxy, without its password; empty: none
	Jump    string // SSH jump hosts; empty: none
}

// Path returns the path of requests.
func (c *Cluster) Path() (Path, error) {
	to := c.server
	p := Path{}
	if c.dial.jump != nil {
		p.Jump = c.dial.jump.Hosts().String()
	} else if via, err := c.proxy(); err != nil {
		return Path{}, err
	} else if via != nil {
		p.Proxy, to = via.Redacted(), via
	}
	defaults := map[string]string{"http": "80", "socks5": "1080", "socks5h": "1080"}
	p.Address = net.JoinHostPort(to.Hostname(), cmp.Or(to.Port(), defaults[to.Scheme], "443"))
	return p, nil
}

// proxy returns the URL of the proxy before the API server, or nil if there is none.
func (c *Cluster) proxy() (*url.URL, error) {
	via, err := c.config.Proxy(&http.Request{URL: c.server})
	if err != nil {
		return nil, fmt.Errorf("choosing a proxy for %s: %w", c.server.Host, err)
	}
	return via, nil
}

// Skew returns how far the clock of the API server is ahead of this machine's, exact to about a second.
func (c *Cluster) Skew(ctx context.Context) (time.Duration, error) {
	target := c.server.JoinPath("/version")
	req, err := http.NewRequestWithContext(ctx, http.MethodHead, target.String(), nil)
	if err != nil {
		return 0, fmt.Errorf("making the request: %w", err)
	}
	began := time.Now()
	resp, err := c.httpClient().Do(req)
	if err != nil {
		return 0, c.Explain(err)
	}
	resp.Body.Close()
	said, err := http.ParseTime(resp.Header.Get("Date"))
	if err != nil {
		return 0, fmt.Errorf("the answer of the API server has no date: %w", err)
	}
	const half = 500 * time.Millisecond // the header has whole seconds
	now := began.Add(time.Since(began) / 2)
	return said.Add(half).Sub(now.Round(0)), nil
}
