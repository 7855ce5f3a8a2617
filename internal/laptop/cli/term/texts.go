package term

import (
	"context"
	"errors"
	"fmt"
	"io"
	"strings"

	"kubevpn/internal/api"
)

// CheckText describes a check of a connection or an intercept.
func CheckText(c api.Check) string { return fmt.Sprintf("%s %s: %s", c.What, c.Target, c.Seen) }

// Pods returns the number of intercepted pods and of all pods: "2/3".
func Pods(i *api.Intercept) string {
	intercepted := 0
	for _, p := range i.Pods {
		if p.Intercepted {
			intercepted++
		}
	}
	return fmt.Sprintf("%d/%d", intercepted, len(i.Pods))
}

// Matched describes the requests that an intercept receives: "x-user=me, copied".
func Matched(match string, mirror bool) string {
	if mirror {
		return match + ", copied"
	}
	return match
}

// Port returns "8080" or "udp/53".
func Port(protocol string, port uint16) string {
	if protocol == "" || protocol == "tcp" {
		return fmt.Sprint(port)
	}
	return fmt.Sprintf("%s/%d", protocol, port)
}

// PortMap formats a port like --port: 8080, udp/5353:53 or 80=172.17.0.5:8080.
func PortMap(p api.PortMap) string {
	text := Port(p.Protocol, p.Local)
	if p.Host != "" {
		return Port(p.Protocol, p.Container) + "=" + p.Place()
	} else if p.Local != p.Container {
		text += fmt.Sprintf(":%d", p.Container)
	}
	return text
}

// ClonePod returns "ready", or "not ready" with the reason.
func ClonePod(p api.ClonePod) string {
	switch {
	case p.Ready:
		return "ready"
	case p.Reason != "":
		return "not ready: " + p.Reason
	}
	return "not ready"
}

// CloneHost returns the host name of the clone with its ports: "web-ann.shop: 80 → 8080, 8080".
func CloneHost(c *api.Clone) string {
	ports := strings.Join(api.Texts(c.Ports, func(p api.ClonePort) string {
		text := Port(p.Protocol, p.Port)
		if p.Target != p.Port {
			text += fmt.Sprintf(" → %d", p.Target)
		}
		return text
	}), ", ")
	return strings.TrimSuffix(c.Host+": "+ports, ": ")
}

// Synced returns "/home/ann/web → /app: 37 in sync", or the error.
func Synced(s api.Synced) string {
	state := "copying"
	switch {
	case s.LastError != "":
		state = s.LastError
	case s.Synced:
		state = fmt.Sprintf("%d in sync", s.Files)
	}
	return fmt.Sprintf("%s → %s: %s", s.Local, s.Remote, state)
}

// AsError converts the error of a command for the user, or for a program that reads the output.
func AsError(ctx context.Context, err error) *api.Error {
	if ctx.Err() != nil && errors.Is(err, context.Canceled) {
		return api.Errorf(api.ExitInterrupted, "interrupted")
	}
	return api.AsError(err)
}

// PrintError writes the message of e and, indented, its hint.
func PrintError(w io.Writer, e *api.Error) { fmt.Fprintln(w, strings.Join(ErrorLines(e), "\n")) }

// ErrorLines returns the message of e and, indented, its hint. It returns nothing if e is nil.
func ErrorLines(e *api.Error) []string {
	if e == nil {
		return nil
	}
	return strings.Split(indented(strings.TrimRight("Error: "+e.Message+"\n"+e.Hint, "\n")), "\n")
}

// indented indents all lines but the first, so that text of the cluster cannot imitate lines of kubevpn.
func indented(text string) string { return strings.ReplaceAll(text, "\n", "\n  ") }
