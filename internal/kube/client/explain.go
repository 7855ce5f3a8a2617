package client

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
	"strings"
	"syscall"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"

	"kubevpn/internal/api"
)

// Explain converts the error of a request to the API server into an *api.Error with an exit code, a message and a hint.
// It adds the server's name, the plugin's command, and when the credentials expired. It returns an *api.Error in err's
// chain as it is, and nil for nil.
func (c *Cluster) Explain(err error) *api.Error {
	f := facts{server: c.server.Host}
	if c.login != nil {
		f.exec = c.login.plugin.command()
	}
	if via, e := c.proxy(); e == nil && via != nil {
		f.proxy = via.Redacted()
	}
	f.expired = func() string { return expiry(c.credentials(), time.Now()) }
	return f.explain(err)
}

// ExplainContext returns nil if err is nil, ctx's error if ctx has ended, and Explain(err) otherwise.
func (c *Cluster) ExplainContext(ctx context.Context, err error) error {
	if err == nil {
		return nil
	}
	if ended := ctx.Err(); ended != nil {
		return ended
	}
	return c.Explain(err)
}

// facts are known besides the error. Each may be empty.
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
	for _, try := range []func(error) *api.Error{f.plugin, f.jump, f.explained, f.status, f.tls, f.network, f.ended} {
		if e := try(err); e != nil {
			return e
		}
	}
	return api.Errorf(api.ExitUnexpected, "%w", err)
}

// plugin explains the failure of a credential plugin that a request ran.
func (f facts) plugin(err error) *api.Error {
	if e := (*loginError)(nil); errors.As(err, &e) {
		return e.why
	}
	return nil
}

// explainer is an error that may know more than its causes. Explain returns nil if it does not; apiServer is "the API
// server HOST:PORT".
type explainer interface {
	error
	Explain(apiServer string) *api.Error
}

// explained calls the error's own Explain.
func (f facts) explained(err error) *api.Error {
	if e, ok := errors.AsType[explainer](err); ok {
		return e.Explain(f.api())
	}
	return nil
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
			return api.Errorf(api.ExitUnreachable,
				"the certificate of %s is valid only from %s on, and this machine's clock says %s",
				f.api(), stamp(invalid.Cert.NotBefore), stamp(now)).
				WithHint("Set this machine's clock; if it is right, the clock of the cluster is wrong.")
		}
		return api.Errorf(api.ExitUnreachable, "the certificate of %s expired on %s, by this machine's clock (%s)",
			f.api(), stamp(invalid.Cert.NotAfter), stamp(now)).
			WithHint("Check this machine's clock; if it is right, ask a cluster admin to renew the certificate.")
	case errors.As(err, &unknown):
		return api.Errorf(api.ExitUnreachable, "%s has a certificate that the kubeconfig's authority did not sign",
			f.api()).
			WithHint("The cluster was recreated, or something intercepts the connection. Fetch the kubeconfig again.")
	case errors.As(err, &hostname):
		return api.Errorf(api.ExitUnreachable, "the certificate of %s is for another name: %w", f.api(), hostname).
			WithHint("Correct `server` in the kubeconfig, or set its `tls-server-name`.")
	case errors.As(err, &record), strings.Contains(err.Error(), "server gave HTTP response to HTTPS client"):
		return api.Errorf(api.ExitUnreachable, "%s does not speak TLS", f.api()).
			WithHint("Check `server` in the kubeconfig: it may need http instead of https, or another port.")
	case errors.As(err, &alert), strings.Contains(err.Error(), "remote error: tls:"):
		return api.Errorf(api.ExitCredentials, "%s rejects the TLS connection: %w", f.api(), innermost(err)).
			WithHint("Is the kubeconfig's client certificate for this cluster, and still valid? Fetch the kubeconfig " +
				"again.")
	case errors.As(err, &invalid):
		return api.Errorf(api.ExitUnreachable, "the certificate of %s: %w", f.api(), invalid)
	}
	return nil
}

// proxyRefused returns the status with which a proxy refused CONNECT, or "". net/http returns only its text.
func proxyRefused(err error) string {
	var u *url.Error
	if !errors.As(err, &u) {
		return ""
	}
	for code := 300; code < 600; code++ {
		if text := http.StatusText(code); text != "" && u.Err.Error() == text {
			return fmt.Sprintf("%s (%d)", text, code)
		}
	}
	return ""
}

// network explains a server that cannot be reached.
func (f facts) network(err error) *api.Error {
	server, hint := f.api(),
		"Is this machine on the network (or the VPN) that the cluster needs? `kubectl version` should answer too."
	if f.proxy != "" {
		hint = fmt.Sprintf("The connection uses the proxy %s. %s", f.proxy, hint)
	}
	// client-go adds the previous error as text, not to the chain.
	_, previous, retried := strings.Cut(err.Error(), " - error from a previous attempt: ")
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
	case f.proxy != "" && proxyRefused(err) != "":
		e = api.Errorf(api.ExitUnreachable, "%s cannot be reached: the proxy %s answers %s", server, f.proxy,
			proxyRefused(err))
		hint = "Check HTTPS_PROXY, NO_PROXY and the kubeconfig's `proxy-url`: the proxy may require a user and a " +
			"password, or block this server."
	case errors.Is(err, syscall.ECONNREFUSED):
		e = api.Errorf(api.ExitUnreachable, "%s cannot be reached: connection refused", server)
		hint = "Does the cluster run, and is `server` in the kubeconfig right? " + hint
	case errors.Is(err, syscall.EHOSTUNREACH), errors.Is(err, syscall.ENETUNREACH):
		e = api.Errorf(api.ExitUnreachable, "%s cannot be reached: %w", server, innermost(err))
	case errors.Is(err, context.Canceled):
		return nil
	case errors.Is(err, syscall.ECONNRESET), errors.Is(err, syscall.EPIPE),
		errors.Is(err, io.EOF), errors.Is(err, io.ErrUnexpectedEOF),
		strings.Contains(err.Error(), "http2: client connection lost"):
		e = api.Errorf(api.ExitUnreachable, "%s, or a proxy before it, broke the connection: %w", server,
			innermost(err))
	case retried: // until there was no time left
		e = api.Errorf(api.ExitUnreachable, "%s, or a proxy before it, broke the connection: %s", server, previous)
	case errors.Is(err, os.ErrDeadlineExceeded), errors.Is(err, context.DeadlineExceeded), errors.As(err, &timeout) &&
		timeout.Timeout():
		e = api.Errorf(api.ExitUnreachable, "%s did not answer in time", server)
	default:
		return nil
	}
	return e.WithHint("%s", hint)
}

// ended explains the end of a context that the user canceled.
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
	message, code := api.OneLine(status.Status().Message), status.Status().Code
	switch {
	case apierrors.IsUnauthorized(err):
		return f.unauthorized()
	case apierrors.IsForbidden(err), isPolicy(message):
		return forbidden(message)
	case apierrors.IsNotFound(err):
		return api.Errorf(api.ExitUnexpected, "not found in the cluster: %s", message).
			WithHint("If it existed a moment ago, it was deleted: connect again.")
	case apierrors.IsTooManyRequests(err):
		return api.Errorf(api.ExitUnreachable, "%s is busy: %s", f.api(), message).
			WithHint("Try again in a minute.")
	case apierrors.IsTimeout(err), apierrors.IsServerTimeout(err):
		return api.Errorf(api.ExitUnreachable, "%s did not answer in time: %s", f.api(), message).
			WithHint("It is overloaded, or its etcd or a webhook does not answer. Try again in a minute.")
	case code >= 500 && apierrors.IsUnexpectedServerError(err): // the answer is not a Status of Kubernetes
		return api.Errorf(api.ExitUnreachable, "%s, or a proxy before it, answers with error %d: %s", f.api(), code,
			http.StatusText(int(code))).
			WithHint("The cluster or a load balancer has a fault. Try again in a minute.")
	case code >= 500:
		return api.Errorf(api.ExitUnreachable, "%s answers with error %d: %s", f.api(), code, message).
			WithHint("The cluster has a fault. Try again in a minute; `kubectl get --raw /readyz?verbose` shows the " +
				"checks that fail.")
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
		return e.WithHint("Log in again: the credentials come from `%s`.", commandLine(f.exec))
	}
	return e.WithHint("Log in again, or fetch the kubeconfig again. `kubectl auth whoami` fails the same way.")
}

// innermost returns the last error of `Get "https://...": dial tcp ...`.
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

func stamp(t time.Time) string { return t.UTC().Format("2006-01-02 15:04 UTC") }

// ErrPodGone is in the chain of an error if the pod was deleted, or will not run again.
var ErrPodGone = errors.New("has gone")

// PodGone returns an *api.Error about a pod that is gone, with ErrPodGone in its chain.
func PodGone(namespace, name string) error {
	return api.Errorf(api.ExitInject, "the pod %s/%s %w", namespace, name, ErrPodGone).
		WithHint("Its replacement has another name: see `kubectl -n %s get pods`.", api.ShellQuote(namespace))
}
