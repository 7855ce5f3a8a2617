package client

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"mime"
	"net/http"
	"net/url"
	"regexp"
	"strings"

	authorizationv1 "k8s.io/api/authorization/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"kubevpn/internal/api"
)

// reachMost limits the part of an answer that Reach reads, in bytes.
const reachMost = 64 << 10

// Reach returns nil if the API server answers and knows the user. It follows no redirect, because that leads to a login
// page. If the user may not review permissions, Reach lists pods in the namespaces instead. Errors are *api.Error, or
// ctx's if it was canceled.
func (c *Cluster) Reach(ctx context.Context, namespaces ...string) error {
	err := c.askAboutSelf(ctx)
	if apierrors.IsForbidden(err) && !strings.Contains(err.Error(), " cannot impersonate") {
		err = c.probeNamespaces(ctx, err, namespaces)
	}
	if err == nil {
		return nil
	}
	if errors.Is(ctx.Err(), context.Canceled) {
		return ctx.Err()
	}
	return c.Explain(err)
}

// askAboutSelf reviews a permission of the user. Every user that the API server knows may request that, and only the
// API server can answer. The answer does not matter.
func (c *Cluster) askAboutSelf(ctx context.Context) error {
	body, err := json.Marshal(authorizationv1.SelfSubjectAccessReview{
		TypeMeta: metav1.TypeMeta{APIVersion: "authorization.k8s.io/v1", Kind: "SelfSubjectAccessReview"},
		Spec: authorizationv1.SelfSubjectAccessReviewSpec{
			NonResourceAttributes: &authorizationv1.NonResourceAttributes{Path: "/version", Verb: "get"},
		},
	})
	if err != nil {
		return fmt.Errorf("writing the request: %w", err)
	}
	target := c.server.JoinPath("/apis/authorization.k8s.io/v1/selfsubjectaccessreviews")
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, target.String(), bytes.NewReader(body))
	if err != nil {
		return fmt.Errorf("making the request: %w", err)
	}
	req.Header.Set("Content-Type", "application/json")
	req.Header.Set("Accept", "application/json")
	client := *c.httpClient()
	client.CheckRedirect = func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse }
	resp, err := client.Do(req)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	text, err := io.ReadAll(io.LimitReader(resp.Body, reachMost))
	if err != nil {
		return fmt.Errorf("reading the answer: %w", err)
	}
	return c.judge(resp, text)
}

// judge returns nil if the API server answered, or an error that describes the answer.
func (c *Cluster) judge(resp *http.Response, text []byte) error {
	var kind metav1.TypeMeta
	var status metav1.Status
	known := json.Unmarshal(text, &kind) == nil
	switch {
	case known && resp.StatusCode/100 == 2 && kind.Kind == "SelfSubjectAccessReview":
		return nil
	case known && kind.Kind == "Status" && json.Unmarshal(text, &status) == nil:
		return &apierrors.StatusError{ErrStatus: status}
	case resp.StatusCode/100 == 3:
		to := "elsewhere"
		if u, err := url.Parse(resp.Header.Get("Location")); err == nil && u.Host != "" {
			to = "to " + api.CleanLine(u.Host)
		}
		return c.loginPage(fmt.Sprintf("%s redirects %s", c.asked(), to))
	case isHTML(resp, text) && resp.StatusCode < 500:
		return c.loginPage(fmt.Sprintf("%s answers with a web page%s", c.asked(), title(text)))
	case resp.StatusCode/100 == 2:
		return api.Errorf(api.ExitUnreachable, "%s is not a Kubernetes API server: it did not answer like one",
			c.asked()).
			WithHint("Check `server` in the kubeconfig: another program may use the port.")
	case resp.StatusCode == http.StatusForbidden:
		return api.Errorf(api.ExitPermission,
			"%s, or a proxy before it, forbids every request (403) with an answer that is not from Kubernetes",
			c.asked()).
			WithHint("Is this machine on the network (or the VPN) that the cluster needs? `kubectl version` gets the " +
				"same answer.")
	}
	return apierrors.NewGenericServerResponse(resp.StatusCode, resp.Request.Method, corev1.Resource("pods"), "", "", 0,
		true)
}

func (c *Cluster) asked() string { return facts{server: c.server.Host}.api() }

func (c *Cluster) loginPage(what string) *api.Error {
	return api.Errorf(api.ExitUnreachable, "%s, as the login page of a proxy does", what).
		WithHint("Open https://%s in a browser and log in there, or connect to the network (or the VPN) that the "+
			"cluster needs.", api.Clean(c.server.Host))
}

// isHTML reports whether the answer is a web page.
func isHTML(resp *http.Response, text []byte) bool {
	kind, _, err := mime.ParseMediaType(resp.Header.Get("Content-Type"))
	return err == nil && strings.HasSuffix(kind, "html") || bytes.HasPrefix(bytes.TrimSpace(text), []byte("<"))
}

var htmlTitle = regexp.MustCompile(`(?is)<title[^>]*>(.{1,200}?)</title>`)

// title returns the title of a web page as ` titled "Sign in"`, or "".
func title(page []byte) string {
	m := htmlTitle.FindSubmatch(page)
	if m == nil {
		return ""
	}
	return fmt.Sprintf(" titled %q", api.CleanLine(string(m[1])))
}

// probeNamespaces checks whether a user who may not review permissions may list pods in one of the namespaces. denied
// is the error of the review.
func (c *Cluster) probeNamespaces(ctx context.Context, denied error, namespaces []string) error {
	message := ""
	if status := apierrors.APIStatus(nil); errors.As(denied, &status) {
		message = api.CleanLine(status.Status().Message)
	}
	user, _, known := parseDenial(message)
	if user == "system:anonymous" {
		return api.Errorf(api.ExitCredentials, "%s does not know you: it treats the request as anonymous", c.asked()).
			WithHint("The kubeconfig has no credentials for this cluster. Log in again, or fetch the kubeconfig again.")
	}
	for _, namespace := range namespaces {
		_, err := c.kube.CoreV1().Pods(namespace).List(ctx, metav1.ListOptions{Limit: 1})
		if !apierrors.IsForbidden(err) {
			return err
		}
	}
	who := "you"
	if known {
		who = user
	}
	return api.Errorf(api.ExitPermission, "%s knows %s, and forbids everything: %s", c.asked(), who, message).
		WithHint("Choose another --context, or ask a cluster admin for rights: `kubevpn connect` needs the role\n" +
			"`edit` in one namespace, or the Role of a traffic manager that is installed.")
}
