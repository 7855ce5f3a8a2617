package osdns

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"

	"kubevpn/pkg/host/netfilter"
)

// enact carries out a decision. First it undoes the parts of the previous decision that this one does not want.
func (c *Configurator) enact(d decision, force bool) error {
	before := c.decision
	if before.Mode == ModeFile && d.Mode != ModeFile {
		if err := c.closeJournal(); err != nil {
			return err
		}
	}
	if before.PerLink && !d.PerLink {
		if c.resolved != nil { // without the bus, resolved is gone too
			if err := c.resolved.set(nil); err != nil {
				return err
			}
		}
	}
	c.decision = d
	if d.PerLink && (force || !before.PerLink || !c.resolved.inForce(c.cfg.Links)) {
		if err := c.resolved.set(c.cfg.Links); err != nil && d.Mode == ModeResolved {
			return err
		} else if err != nil {
			d.warn("systemd-resolved, which some programs ask: %v", err)
		}
	}
	if d.Mode == ModeFile {
		if err := c.enactFile(&d); err != nil {
			return err
		}
	}
	if err := c.enactTable(&d, before); err != nil {
		return err
	}
	c.applied = Applied{Mode: d.Mode, Upstreams: d.Upstreams, Warnings: d.Warnings}
	c.opt.Logger.Info("DNS", "mode", string(d.Mode), "upstreams", d.Upstreams, "redirected", d.Redirect, "warnings",
		d.Warnings)
	return nil
}

func (c *Configurator) enactFile(d *decision) error {
	if c.gaveUp = c.gaveUp || c.tramples > maxTramples; c.gaveUp {
		d.Mode = ModeNone
		d.warn("another program keeps rewriting %s: cluster names are not resolved", c.opt.ResolvConf)
		return c.closeJournal()
	}
	original, foreign, err := c.journal.original()
	if err != nil {
		return fmt.Errorf("reading %s: %w", c.opt.ResolvConf, err)
	}
	ours := withNameservers(original, d.Nameservers)
	if !foreign && c.journal.last != nil &&
		strings.TrimRight(string(c.journal.last.Ours), "\n") == strings.TrimRight(string(ours), "\n") {
		return nil
	}
	if err := c.journal.edit(ours); err != nil {
		return err
	}
	c.seen = c.look()
	return nil
}

// enactTable fills the table, or closes it if it would be empty.
func (c *Configurator) enactTable(d *decision, before decision) error {
	if c.table == nil {
		return nil
	}
	r := redirection{nameservers: d.Redirect, to4: c.cfg.Listen4, to6: c.cfg.Listen6,
		links: c.cfg.Links}
	guards := slices.ContainsFunc(r.links, func(l Link) bool { return len(l.Addrs) > 0 })
	if len(r.nameservers) == 0 && !guards {
		return c.closeTable()
	}
	if err := c.table.set(r); err != nil {
		return fmt.Errorf("nftables: %w", err)
	}
	var changed []netip.Addr
	for _, a := range slices.Concat(d.Redirect, before.Redirect) {
		if slices.Contains(d.Redirect, a) != slices.Contains(before.Redirect, a) {
			changed = append(changed, a)
		}
	}
	c.forget(changed)
	if d.Mode != ModeNFTables {
		return nil
	}
	if others, err := c.table.Others(tablePrefix); err == nil && len(others) > 0 {
		// Among chains of one priority, the kernel runs the newest first (nf_hook_entries_grow).
		d.warn("another kubevpn (%s) already redirects this machine's DNS; its names do not resolve while this "+
			"connection exists",
			strings.Join(others, ", "))
	}
	return nil
}

// forget deletes the conntrack entries of UDP flows to port 53 of these nameservers. Otherwise the queries of a program
// that keeps one socket (c-ares does) would follow its first packet.
func (c *Configurator) forget(nameservers []netip.Addr) {
	if len(nameservers) == 0 {
		return
	}
	if _, err := netfilter.DeleteFlows(flowsTo(nameservers)); err != nil {
		c.opt.Logger.Debug("conntrack: flows of programs that keep a socket open go on for 30 s", "error", err)
	}
}

// closeJournal restores resolv.conf.
func (c *Configurator) closeJournal() error {
	err := c.journal.close()
	if left(err) {
		c.opt.Logger.Warn("resolv.conf", "error", err)
		err = nil
	}
	return err
}
