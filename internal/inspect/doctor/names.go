package doctor

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net/netip"
	"strings"
	"sync"
	"time"

	"github.com/miekg/dns"

	"kubevpn/internal/api"
	"kubevpn/pkg/host/osdns"
	"kubevpn/pkg/wakeup"
	"kubevpn/pkg/wire/transport"
)

const (
	// fightWindow is the age of resolv.conf below which the check waits as long, to see whether it changes again.
	fightWindow = 3 * time.Second
	// queryTimeout limits a query, and queryTries is how often an unanswered one is sent.
	queryTimeout = time.Second
	queryTries   = 2
)

func inspect() (osdns.Inspection, error) {
	lacking, _ := lacksNFTables()
	return osdns.Inspect(osdns.Options{}, lacking)
}

// resolver checks how kubevpn would put its resolver into the path of queries, and who else wants that place.
func resolver(ctx context.Context, f *facts) api.Finding {
	i, err := inspect()
	if errors.Is(err, errors.ErrUnsupported) {
		return skipped("%v", err)
	}
	if err != nil {
		return failed(api.Errorf(api.ExitNetwork, "cannot read the machine's nameservers: %w", err).
			WithHint("ls -l /etc/resolv.conf"), "names do not resolve")
	}
	status, err := f.status()
	return resolverOf(i, status != nil || err != nil, changesAgain(ctx, i))
}

// changesAgain reports whether a file that changed just now changes once more.
func changesAgain(ctx context.Context, i osdns.Inspection) bool {
	if i.Changed.IsZero() || time.Since(i.Changed) > fightWindow || !wakeup.Pause(ctx, fightWindow) {
		return false
	}
	now, err := inspect()
	return err == nil && !now.Changed.Equal(i.Changed)
}

// resolverOf judges name resolution. running: a daemon runs. fought: a program keeps writing resolv.conf.
func resolverOf(i osdns.Inspection, running, fought bool) api.Finding {
	switch {
	case i.Mode == osdns.ModeNone:
		return failed(api.Errorf(api.ExitNetwork, "no method to resolve cluster names fits this machine: %s",
			strings.Join(i.Warnings, "; ")).WithHint("sudo modprobe nf_tables"),
			"`kubevpn connect` fails")
	case fought:
		return warning(fmt.Sprintf("%s keeps changing %s", cmp.Or(i.Writer, "another program"), i.File),
			"programs may use other nameservers from one moment to the next; kubevpn follows each change",
			"stop the program that writes the file: sudo lsof /etc/resolv.conf; ls -l /etc/resolv.conf")
	case i.Edited && !running:
		return warning(i.File+" still has the edit of a kubevpn that was killed", "names do not resolve",
			"kubevpn connect   # its root helper puts the original back first")
	case i.Mode == osdns.ModeFile:
		return warning("kubevpn will edit "+i.File+": "+strings.Join(i.Warnings, "; "),
			"another program that writes the file takes cluster names away until kubevpn edits it again",
			"sudo modprobe nf_tables   # or install systemd-resolved")
	case len(i.Warnings) > 0:
		return warning(strings.Join(i.Warnings, "; "), "some programs do not find cluster names",
			"sudo ln -sf /run/systemd/resolve/stub-resolv.conf /etc/resolv.conf   # with systemd-resolved")
	}
	managed := ""
	if i.Writer != "" {
		managed = ", which " + i.Writer + " writes"
	}
	return ok("kubevpn would use %s; the file is %s%s", i.Mode, i.File, managed)
}

// nameservers checks whether the machine's nameservers answer.
func nameservers(ctx context.Context, _ *facts) api.Finding {
	i, err := inspect()
	if err != nil {
		return skipped("%v", err)
	}
	silent := make([]string, len(i.Nameservers))
	var wg sync.WaitGroup
	for n, server := range i.Nameservers {
		wg.Go(func() { silent[n] = unanswered(ctx, server) })
	}
	wg.Wait()
	return nameserversOf(i.Nameservers, silent)
}

// nameserversOf judges why each server does not answer; "" means that it does.
func nameserversOf(servers []netip.AddrPort, silent []string) api.Finding {
	var bad, names []string
	for n, server := range servers {
		names = append(names, server.Addr().String())
		if silent[n] != "" {
			bad = append(bad, fmt.Sprintf("%v (%s)", server.Addr(), silent[n]))
		}
	}
	const fix = "resolvectl status; cat /etc/resolv.conf   # restart the VPN or the network that set this nameserver"
	switch {
	case len(names) == 0:
		return warning("this machine has no nameserver", "public names do not resolve", fix)
	case len(bad) == len(names):
		return failed(api.Errorf(api.ExitNetwork, "no nameserver of this machine answers: %s", strings.Join(bad, ", ")).
			WithHint("%s", fix), "names do not resolve, that of the API server among them")
	case len(bad) > 0:
		return warning("nameservers do not answer: "+strings.Join(bad, ", "), "names resolve slowly", fix)
	}
	return ok("%s answer", strings.Join(names, ", "))
}

// unanswered queries a nameserver, and returns why there is no answer, or "". Any answer will do.
func unanswered(ctx context.Context, server netip.AddrPort) (why string) {
	m := new(dns.Msg)
	m.SetQuestion(".", dns.TypeNS)
	c := dns.Client{Timeout: queryTimeout}
	for range queryTries {
		_, _, err := c.ExchangeContext(ctx, m, server.String())
		if err == nil {
			return ""
		}
		why = transport.CodeOf(err).String()
	}
	return why
}
