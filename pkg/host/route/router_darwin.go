package route

import (
	"bytes"
	"errors"
	"fmt"
	"net"
	"os/exec"
	"slices"
	"strings"
	"sync"
)

// Router keeps links, their addresses and their routes in the state of the last Set, with ifconfig(8) and route(8).
// The kernel removes a utun, its addresses and its routes when its owner ends. Its methods are safe for concurrent
// use.
type Router struct {
	mu    sync.Mutex
	links map[string]Link
}

// New returns a Router that manages no link.
func New() *Router {
	return &Router{links: map[string]Link{}}
}

// Set brings the links into the state of cfg. It may be called again with the same cfg. After an error the state is
// between the old and the new one.
func (r *Router) Set(cfg Config) (Applied, error) {
	if err := cfg.validate(); err != nil {
		return Applied{}, err
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	var errs []error
	for name, from := range r.links {
		if slices.ContainsFunc(cfg.Links, func(l Link) bool { return l.Name == name }) {
			continue
		}
		if _, err := net.InterfaceByName(name); err == nil {
			errs = append(errs, run(commands(name, from, Link{})))
		}
		delete(r.links, name)
	}
	for _, l := range cfg.Links {
		l.Addrs, l.Routes = set(l.Addrs), set(l.Routes)
		err := run(commands(l.Name, r.links[l.Name], l))
		if err != nil {
			errs = append(errs, fmt.Errorf("link %s: %w", l.Name, err))
		}
		r.links[l.Name] = l
	}
	return Applied{}, errors.Join(errs...)
}

// Close removes everything. The Router can be used again afterwards.
func (r *Router) Close() error {
	_, err := r.Set(Config{})
	return err
}

func run(commands [][]string) error {
	var errs []error
	for _, c := range commands {
		out, err := exec.Command(c[0], c[1:]...).CombinedOutput()
		if err != nil {
			errs = append(errs, fmt.Errorf("%s: %w: %s", strings.Join(c, " "), err, bytes.TrimSpace(out)))
		}
	}
	return errors.Join(errs...)
}
