//go:build !linux && !darwin

package osdns

import (
	"errors"
	"net/netip"
	"runtime"
)

// Configurator is not implemented on this system: Set returns an error for all but the zero Config.
type Configurator struct{}

// New returns a Configurator.
func New(Options) *Configurator { return &Configurator{} }

// Set fails unless cfg is the zero value.
func (c *Configurator) Set(cfg Config) (Applied, error) {
	if cfg.zero() {
		return Applied{}, nil
	}
	return Applied{}, errors.New("kubevpn cannot configure the resolver on " + runtime.GOOS)
}

// Nameservers returns none.
func (c *Configurator) Nameservers() ([]netip.AddrPort, error) { return nil, nil }

// Close does nothing.
func (c *Configurator) Close() error { return nil }

// Recover has nothing to undo.
func Recover(Options) (did string, err error) { return "", nil }
