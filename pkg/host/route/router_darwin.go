package route

import (
	"bytes"
	"errors"
	"fmt"
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

// Set brings the links into the state of cfg, and reads them back. It may be called again with the same cfg. After an
// error the state is between the old and the new one.
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
		if have, err := readLink(name); err == nil { // otherwise the link is gone
			errs = append(errs, run(commands(name, have.present(from), Link{})))
		}
		delete(r.links, name)
	}
	for _, l := range cfg.Links {
		if err := r.setLink(l); err != nil {
			errs = append(errs, fmt.Errorf("link %s: %w", l.Name, err))
		}
	}
	return Applied{}, errors.Join(errs...)
}

// setLink brings a link into a state. The caller holds mu.
func (r *Router) setLink(l Link) error {
	l.Addrs, l.Routes = distinct(l.Addrs), distinct(l.Routes)
	before, err := readLink(l.Name)
	if err != nil {
		return err
	}
	// Routes and addresses that this Router did not set are the kernel's own, such as that of the link-local network.
	ran := run(commands(l.Name, before.present(r.links[l.Name]), l))
	r.links[l.Name] = l
	after, err := readLink(l.Name)
	if err != nil {
		return errors.Join(ran, err)
	}
	if missing := after.missing(l); len(missing) > 0 {
		err = fmt.Errorf("was set and read back without %s", strings.Join(missing, ", "))
	}
	return errors.Join(ran, err)
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
