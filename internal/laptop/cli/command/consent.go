package command

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"reflect"
	"strings"

	"kubevpn/internal/api"
	"kubevpn/internal/config"
	"kubevpn/internal/kube/client"
	"kubevpn/internal/kube/install"
	"kubevpn/internal/laptop/cli/term"
)

// maxQuestions limits the questions of one request: about a manager, networks and a domain, and about changes of these
// in the meantime.
const maxQuestions = 5

// Consenting is a request that may need the consent of the user.
type Consenting struct {
	Factory *Factory
	Cluster *client.Cluster
	Consent *api.Consent // of the request; Run and Load fill it in
	Yes     bool         // consent without a question
	Batch   bool         // a program reads the output, so do not ask
	Quiet   func()       // stops the progress display
	// Find looks for the traffic manager, so that the question about it comes before the password prompt of sudo. Nil:
	// the request needs no root.
	Find func(ctx context.Context) error

	paths config.Paths
}

// Run calls do with the stored consent for the cluster, and calls it again after each question that the user answers
// with yes. do calls its argument with each event. Run stores a traffic manager that the request installs as trusted.
func (c Consenting) Run(ctx context.Context, on func(api.Event), do func(on func(api.Event)) error) error {
	if err := c.Load(); err != nil {
		return err
	}
	if err := c.askEarly(ctx, on); err != nil {
		return err
	}
	handle := func(e api.Event) {
		switch {
		case needs(e.Error) != nil: // Run asks the user or returns it
		case e.Installed != nil:
			c.store(api.Consent{Managers: []api.TrustedManager{*e.Installed}}, on)
		default:
			on(e)
		}
	}
	var last *api.Consent
	for left := maxQuestions; ; left-- {
		err := do(handle)
		e, _ := errors.AsType[*api.Error](err)
		if needs(e) == nil || ctx.Err() != nil {
			return err
		}
		if reflect.DeepEqual(e.Needs, last) || left == 0 {
			return err // the user has already allowed it
		}
		last = e.Needs
		if err := c.Allow(ctx, e, on); err != nil {
			return err
		}
		c.store(*e.Needs, on)
	}
}

// askEarly asks about the traffic manager if the user trusts none of this cluster. It ignores other errors of Find,
// because the request reports them.
func (c *Consenting) askEarly(ctx context.Context, on func(api.Event)) error {
	if c.Find == nil || len(c.Consent.Managers) > 0 {
		return nil
	}
	e, _ := errors.AsType[*api.Error](c.Find(ctx))
	if needs(e) == nil {
		return nil
	}
	if err := c.Allow(ctx, e, on); err != nil {
		return err
	}
	c.store(*e.Needs, on)
	return nil
}

// needs returns the consent that the request requires in addition, or nil.
func needs(e *api.Error) *api.Consent {
	if e == nil || e.Code != api.ExitConsent {
		return nil
	}
	return e.Needs
}

// Image returns the image for containers in which kubevpn runs programs: that of the traffic manager if the user trusts
// it, because the nodes have it, or else the one that kubevpn would install.
func (c Consenting) Image(ctx context.Context, s config.Config, namespace string) (string, error) {
	if err := c.Load(); err != nil {
		return "", err
	}
	image, err := install.Find(ctx, c.Cluster, s.ManagerNamespace, namespace, *c.Consent)
	if err != nil {
		image = cmp.Or(s.Image, config.Default().Image)
	}
	return image, ctx.Err()
}

// Load reads the stored consent for the cluster.
func (c *Consenting) Load() error {
	var err error
	if c.paths, err = c.Factory.Paths(); err != nil {
		return err
	}
	all, err := c.paths.LoadTrust()
	if err != nil {
		return err
	}
	*c.Consent = all[c.Cluster.ID()].Consent
	return nil
}

// store adds needs to the consent of this request and to the stored consent. An error of the latter becomes a warning.
func (c *Consenting) store(needs api.Consent, on func(api.Event)) {
	*c.Consent = c.Consent.With(needs)
	err := c.paths.SaveTrust(func(all map[string]config.Trusted) {
		id := c.Cluster.ID()
		all[id] = config.Trusted{Cluster: c.Cluster.Name(), Server: c.Cluster.Server(),
			Consent: all[id].Consent.With(needs)}
	})
	if err != nil {
		on(api.Event{Warning: err.Error() + "; kubevpn will ask you again"})
	}
}

// Allow shows the message of e and asks whether the user allows it. It returns nil if the user agrees.
func (c *Consenting) Allow(ctx context.Context, e *api.Error, on func(api.Event)) error {
	if c.Yes {
		on(api.Event{Warning: e.Message + ": allowed without a question, because `yes` is set"})
		return nil
	}
	yes, err := false, term.ErrNoTerminal
	if !c.Batch {
		yes, err = c.Factory.Confirm(ctx, c.Quiet, fmt.Sprintf("%s\n  cluster         %s, %s\n%sAllow this? [y/N] ",
			term.Printable(e.Message), term.Printable(c.Cluster.Name()), c.Cluster.Server(), described(e.Needs)))
	}
	switch {
	case errors.Is(err, term.ErrNoTerminal):
		return e.WithHint("%s\nkubevpn cannot ask you here. "+
			"To allow it, pass --yes, or set `yes: true` in %s or KUBEVPN_YES=true.", e.Hint, c.paths.ConfigFile)
	case err == nil && !yes:
		return e.WithHint("You did not allow it. Nothing was changed.")
	}
	return err
}

// described returns a line for each part of c, which may be nil.
func described(c *api.Consent) string {
	var b strings.Builder
	if c == nil {
		return ""
	}
	add := func(title, value string) {
		if value != "" {
			fmt.Fprintf(&b, "  %-15s %s\n", title, term.Printable(value))
		}
	}
	for _, m := range c.Managers {
		add("namespace", m.Namespace)
		add("image", m.Image)
		add("age", m.Age)
		add("ServiceAccount", m.ServiceAccount)
		add("namespace UID", m.NamespaceUID)
	}
	add("networks", api.Some(c.Networks, term.MaxShown))
	add("domain", c.Domain)
	add("extra domains", api.Some(c.ExtraDomains, term.MaxShown))
	return b.String()
}
