//go:build !linux && !darwin

package route

import (
	"errors"
	"runtime"
)

// Router is not implemented on this system: Set returns an error for all but the zero Config.
type Router struct{}

// New returns a Router.
func New() *Router { return &Router{} }

// Set fails unless cfg is the zero value.
func (r *Router) Set(cfg Config) (Applied, error) {
	if len(cfg.Links) == 0 {
		return Applied{}, nil
	}
	return Applied{}, errors.New("kubevpn cannot configure addresses and routes on " + runtime.GOOS)
}

// Close does nothing.
func (r *Router) Close() error { return nil }

// readRoutes returns nothing: it is not implemented on this system.
func readRoutes(func(link string) bool) ([]localRoute, error) { return nil, nil }
