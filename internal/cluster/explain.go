package cluster

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"os"
	"regexp"
	"strconv"
	"strings"
	"syscall"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"

	"kubevpn/internal/api"
)

// Explain turns an error of a request to the API server into what the user is told: the exit code, one line, and the
// next step, with the server's name, the plugin's command, and when the credentials expired. An *api.Error in err's
// chain is passed through. Explain(nil) is nil.
func (c *Cluster) Explain(err error) *api.Error {
	f := facts{server: c.server.Host, exec: c.exec}
	if via, e := c.config.Proxy(requestTo(c.server)); e == nil && via != nil {
		f.proxy = via.Redacted()
	}
	f.expired = func() string { return expiry(c.config, time.Now()) }
	return f.explain(err)
}

// facts are what is known besides the error. Each may be missing.
type facts struct {
	server  string
	proxy   string
	exec    []string
	expired func() string // "the token expired 3h0m0s ago", or ""
}

func (f facts) api() string {
	if f.server == "" {
		return "the API server"
	}
	return "the API server " + f.server
}

func (f facts) explain(err error) *api.Error {
	if err == nil {
		return nil
	}
	if e := (*api.Error)(nil); errors.As(err, &e) {
		return api.AsError(err)
	}
	for _, try := range []func(error) *api.Error{f.plugin, f.podProxy, f.status, f.tls, f.network, f.ended} {
		if e := try(err); e != nil {
			return e
		}
	}
	return api.Errorf(api.ExitUnexpected, "%w", err)
}

var (
	execFailed  = regexp.MustCompile(`exec: executable (\S+) failed with exit code (-?\d+)`)
	execMissing = regexp.MustCompile(`exec: executable (\S+) not found`)
)

// plugin explains what client-go says of a kubeconfig's credential plugin, which is text only.
func (f facts) plugin(err error) *api.Error {
	text := err.Error()
	if !strings.Contains(text, "getting credentials: ") && !strings.Contains(text, "exec plugin") {
		return nil
	}
	name, byHand := "", "Run the plugin by hand to see what it says; the daemon's log has its messages too: `kubevpn logs`."
	if len(f.exec) > 0 {
		name = " " + f.exec[0]
		byHand = fmt.Sprintf("Run it by hand to see what it says, and log in if it asks: `%s`", strings.Join(f.exec, " "))
	}
	_, why, _ := strings.Cut(text, "getting credentials: ")
	code := 0
	if m := execFailed.FindStringSubmatch(text); m != nil {
		code, _ = strconv.Atoi(m[2])
		why = "failed with exit code " + m[2]
		if name == "" {
			name = " " + m[1]
		}
	} else if m := execMissing.FindStringSubmatch(text); m != nil {
		code = exitExecNotFound
		if name == "" {
			name = " " + m[1]
		}
	}
	var e *api.Error
	switch code {
	case exitExecTimeout:
		e = api.Errorf(api.ExitExecPlugin, "the credential plugin%s did not answer within %v and was killed", name, ExecTimeout)
	case exitExecNotFound:
		e = api.Errorf(api.ExitExecPlugin, "the credential plugin%s is not installed", name)
		byHand = "Install it, or put its folder into PATH, then connect again."
	default:
		if strings.HasPrefix(why, "decoding stdout: ") {
			e = api.Errorf(api.ExitExecPlugin, "the credential plugin%s gave no credentials that can be understood", name)
			break
		}
		if why == "" {
			why = text
		}
		e = api.Errorf(api.ExitExecPlugin, "the credential plugin%s: %s", name, strings.TrimPrefix(why, "exec: "))
	}
	return e.WithHint("%s", byHand)
}

// tls explains a handshake that failed.
func (f facts) tls(err error) *api.Error {
	var (
		invalid  x509.CertificateInvalidError
		unknown  x509.UnknownAuthorityError
		hostname x509.HostnameError
		record   tls.RecordHeaderError
		alert    tls.AlertError
	)
	switch {
	case errors.As(err, &invalid) && invalid.Reason == x509.Expired:
		now := time.Now()
		if now.Before(invalid.Cert.NotBefore) {
			return api.Errorf(api.ExitUnreachable, "the certificate of %s is valid only from %s on, and this machine's clock says %s",
				f.api(), stamp(invalid.Cert.NotBefore), stamp(now)).
				WithHint("Set this machine's clock; if it is right, the cluster's is not.")
		}
		return api.Errorf(api.ExitUnreachable, "the certificate of %s expired on %s, by this machine's clock (%s)",
			f.api(), stamp(invalid.Cert.NotAfter), stamp(now)).
			WithHint("Check this machine's clock; if it is right, ask a cluster admin to renew the certificate.")
	case errors.As(err, &unknown):
		return api.Errorf(api.ExitUnreachable, "%s shows a certificate that the kubeconfig's authority did not sign", f.api()).
			WithHint("The cluster was made anew, or something intercepts the connection. Fetch the kubeconfig again.")
	case errors.As(err, &hostname):
		return api.Errorf(api.ExitUnreachable, "the certificate of %s is for another name: %w", f.api(), hostname).
			WithHint("Correct `server` in the kubeconfig, or set its `tls-server-name`.")
	case errors.As(err, &record), strings.Contains(err.Error(), "server gave HTTP response to HTTPS client"):
		return api.Errorf(api.ExitUnreachable, "%s does not speak TLS", f.api()).
			WithHint("Look at `server` in the kubeconfig: is it http instead of https, or is the port another program's?")
	case errors.As(err, &alert), strings.Contains(err.Error(), "remote error: tls:"):
		return api.Errorf(api.ExitCredentials, "%s rejects the TLS connection: %w", f.api(), innermost(err)).
			WithHint("Is the kubeconfig's client certificate of this cluster, and still valid? Fetch the kubeconfig again.")
	case errors.As(err, &invalid):
		return api.Errorf(api.ExitUnreachable, "the certificate of %s: %w", f.api(), invalid)
	}
	return nil
}

// network explains a server that cannot be reached.
func (f facts) network(err error) *api.Error {
	server, hint := f.api(), "Is this machine on the network (or the VPN) that the cluster needs? `kubectl version` should answer too."
	if f.proxy != "" {
		hint = fmt.Sprintf("The way goes through the proxy %s. %s", f.proxy, hint)
	}
	_, previous, retried := strings.Cut(err.Error(), " - error from a previous attempt: ") // client-go; it is not in the chain
	var dns *net.DNSError
	var timeout net.Error
	var e *api.Error
	switch {
	case errors.As(err, &dns) && dns.IsNotFound:
		e = api.Errorf(api.ExitUnreachable, "%s cannot be reached: there is no host %s", server, dns.Name)
	case errors.As(err, &dns):
		e = api.Errorf(api.ExitUnreachable, "%s cannot be reached: resolving %s: %s", server, dns.Name, dns.Err)
	case strings.Contains(err.Error(), "proxyconnect "), strings.Contains(err.Error(), "socks connect "):
		e = api.Errorf(api.ExitUnreachable, "%s cannot be reached: the proxy: %w", server, innermost(err))
	case errors.Is(err, syscall.ECONNREFUSED):
		e = api.Errorf(api.ExitUnreachable, "%s cannot be reached: connection refused", server)
		hint = "Does the cluster run, and is `server` in the kubeconfig right? " + hint
	case errors.Is(err, syscall.EHOSTUNREACH), errors.Is(err, syscall.ENETUNREACH):
		e = api.Errorf(api.ExitUnreachable, "%s cannot be reached: %w", server, innermost(err))
	case errors.Is(err, context.Canceled):
		return nil
	case errors.Is(err, syscall.ECONNRESET), errors.Is(err, syscall.EPIPE),
		errors.Is(err, io.EOF), errors.Is(err, io.ErrUnexpectedEOF), strings.Contains(err.Error(), "http2: client connection lost"):
		e = api.Errorf(api.ExitUnreachable, "%s, or something on the way to it, broke the connection: %w", server, innermost(err))
	case retried: // until there was no time left
		e = api.Errorf(api.ExitUnreachable, "%s, or something on the way to it, broke the connection: %s", server, previous)
	case errors.Is(err, os.ErrDeadlineExceeded), errors.Is(err, context.DeadlineExceeded), errors.As(err, &timeout) && timeout.Timeout():
		e = api.Errorf(api.ExitUnreachable, "%s did not answer in time", server)
	case errors.Is(err, errNoUpgrade):
		e = api.Errorf(api.ExitUnreachable, "something between here and %s does not let port-forwards through: %w", server, errNoUpgrade)
		hint = "A proxy or load balancer must pass WebSocket or SPDY upgrades; `kubectl port-forward` meets the same obstacle."
	default:
		return nil
	}
	return e.WithHint("%s", hint)
}

// ended explains the user's own impatience.
func (f facts) ended(err error) *api.Error {
	if errors.Is(err, context.Canceled) {
		return api.Errorf(api.ExitInterrupted, "interrupted")
	}
	return nil
}

// status explains an answer of the API server.
func (f facts) status(err error) *api.Error {
	var status apierrors.APIStatus
	if !errors.As(err, &status) {
		return nil
	}
	message, code := oneLine(status.Status().Message), status.Status().Code
	switch {
	case apierrors.IsUnauthorized(err):
		return f.unauthorized()
	case apierrors.IsForbidden(err):
		return forbidden(message)
	case apierrors.IsNotFound(err):
		return api.Errorf(api.ExitUnexpected, "the cluster does not have it: %s", message).
			WithHint("If it was there a moment ago, somebody deleted it: connect again.")
	case apierrors.IsTooManyRequests(err):
		return api.Errorf(api.ExitUnreachable, "%s is busy: %s", f.api(), message).
			WithHint("Try again in a minute.")
	case apierrors.IsTimeout(err), apierrors.IsServerTimeout(err):
		return api.Errorf(api.ExitUnreachable, "%s did not answer in time: %s", f.api(), message).
			WithHint("It is overloaded, or its etcd or a webhook does not answer. Try again in a minute.")
	case code >= 500 && apierrors.IsUnexpectedServerError(err): // not in Kubernetes' words
		return api.Errorf(api.ExitUnreachable, "%s, or a proxy before it, answers with error %d: %s", f.api(), code, http.StatusText(int(code))).
			WithHint("The fault is the cluster's, or a load balancer's. Try again in a minute.")
	case code >= 500:
		return api.Errorf(api.ExitUnreachable, "%s answers with error %d: %s", f.api(), code, message).
			WithHint("The fault is the cluster's. Try again in a minute; `kubectl get --raw /readyz?verbose` says what it lacks.")
	}
	return api.Errorf(api.ExitUnexpected, "%s: %s", f.api(), message)
}

func (f facts) unauthorized() *api.Error {
	why := ""
	if f.expired != nil {
		why = f.expired()
	}
	if why != "" {
		why = ": " + why
	}
	e := api.Errorf(api.ExitCredentials, "%s rejects the kubeconfig's credentials%s", f.api(), why)
	if len(f.exec) > 0 {
		return e.WithHint("Log in again: the credentials come from `%s`.", strings.Join(f.exec, " "))
	}
	return e.WithHint("Log in again, or fetch the kubeconfig anew. `kubectl auth whoami` fails the same way.")
}

// innermost drops the layers of `Get "https://...": dial tcp ...`.
func innermost(err error) error {
	if u := (*url.Error)(nil); errors.As(err, &u) {
		err = u.Err
	}
	if op := (*net.OpError)(nil); errors.As(err, &op) {
		err = op.Err
	}
	if sys := (*os.SyscallError)(nil); errors.As(err, &sys) {
		err = sys.Err
	}
	return err
}

func oneLine(s string) string { return strings.Join(strings.Fields(s), " ") }

func stamp(t time.Time) string { return t.UTC().Format("2006-01-02 15:04 UTC") }
