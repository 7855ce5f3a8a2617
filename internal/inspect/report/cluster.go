package report

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"kubevpn/internal/api"
	"kubevpn/internal/kube/client"
	"kubevpn/internal/kube/install"
	"kubevpn/internal/kube/podstatus"
)

const (
	// logMost limits what the API server sends of a container's log, in bytes.
	logMost = 4 * partMost
	// logLines limits the lines of a container's log.
	logLines = 5000
	// logsMost limits the number of logs, of managers with their gateways and of agents.
	logsMost = 10
	// podsMost limits the pods of a namespace that are looked at.
	podsMost = 500
)

// Cluster says what to collect in a cluster.
type Cluster struct {
	*client.Cluster
	Timeout          time.Duration // for its first answer; 0: that of Collect
	ManagerNamespace string        // as in install.Options
	Namespace        string        // of the user's context
	Intercepted      []string      // namespaces with intercepts of this machine
}

// Collect collects the state and the logs of the traffic manager, its gateways and the agents.
func (c Cluster) Collect(ctx context.Context) []Part {
	summary := Part{Name: "cluster.txt", About: "the cluster, the traffic manager and the agents"}
	reaching, cancel := context.WithTimeout(ctx, cmp.Or(c.Timeout, sourceTimeout))
	defer cancel()
	if err := c.Reach(reaching, cmp.Or(c.ManagerNamespace, install.DefaultNamespace), c.Namespace); err != nil {
		summary.Err = err
		return []Part{summary}
	}
	s := &summarized{Part: summary}
	if v, err := c.Kube().Discovery().ServerVersion(); s.ok("the version of the API server", c, err) {
		s.line("API server %s, %s", v.GitVersion, v.Platform)
	}
	ns, pods, err := install.Pods(ctx, c.Cluster, c.ManagerNamespace, c.Namespace)
	if s.ok("the pods of the traffic manager", c, err) && len(pods) == 0 {
		s.line("no traffic manager in the namespace %s", ns)
	}
	d, err := c.Kube().AppsV1().Deployments(ns).Get(ctx, install.ManagerName, metav1.GetOptions{})
	if s.ok("the Deployment of the traffic manager", c, err) {
		s.line("deployment %s/%s: %d of %d ready, labels %v", ns, d.Name, d.Status.ReadyReplicas, d.Status.Replicas,
			d.Labels)
		for _, condition := range d.Status.Conditions {
			s.line("  %s %s: %s %s", condition.Type, condition.Status, condition.Reason, api.OneLine(condition.Message))
		}
	}
	logs := c.logs(ctx, s, pods, func(string) bool { return true })
	var intercepted []*corev1.Pod
	namespaces := append([]string{c.Namespace}, c.Intercepted...)
	slices.Sort(namespaces)
	for _, namespace := range slices.Compact(namespaces) {
		list, err := c.Kube().CoreV1().Pods(namespace).List(ctx, metav1.ListOptions{Limit: podsMost})
		if s.ok("the agents in "+namespace, c, err) {
			for i := range list.Items {
				intercepted = append(intercepted, &list.Items[i])
			}
		}
	}
	logs = append(logs, c.logs(ctx, s, intercepted, api.IsAgent)...)
	return append([]Part{s.Part}, logs...)
}

// summarized is the part with the summary, which grows.
type summarized struct{ Part }

func (s *summarized) line(format string, args ...any) { s.Text += fmt.Sprintf(format, args...) + "\n" }

// ok reports whether there is no error. It notes an error.
func (s *summarized) ok(what string, c Cluster, err error) bool {
	if err == nil {
		return true
	}
	s.Err = errors.Join(s.Err, fmt.Errorf("%s: %w", what, c.Explain(err)))
	return false
}

// logs describes the containers of the pods that wanted accepts, and returns their logs.
func (c Cluster) logs(ctx context.Context, s *summarized, pods []*corev1.Pod, wanted func(string) bool) (logs []Part) {
	for _, p := range pods {
		for _, status := range podstatus.Containers(p) {
			if !wanted(status.Name) {
				continue
			}
			of := podstatus.Of(p, status.Name)
			s.line("pod %s/%s on %s, container %s: image %s, running %v, restarts %d %s", p.Namespace, p.Name,
				p.Spec.NodeName, status.Name, status.Image, of.Running, status.RestartCount, of.Text)
			if len(logs) >= logsMost {
				continue
			}
			logs = append(logs, c.log(ctx, p, status.Name, false))
			if status.RestartCount > 0 {
				logs = append(logs, c.log(ctx, p, status.Name, true))
			}
		}
	}
	return logs
}

// log returns the end of a container's log.
func (c Cluster) log(ctx context.Context, p *corev1.Pod, container string, previous bool) Part {
	part := Part{Name: "logs/" + p.Namespace + "-" + p.Name + "-" + container + ".log",
		About: fmt.Sprintf("the log of %s in %s/%s", container, p.Namespace, p.Name)}
	if previous {
		part.Name = strings.TrimSuffix(part.Name, ".log") + "-previous.log"
		part.About += ", before the restart"
	}
	r, err := c.Kube().CoreV1().Pods(p.Namespace).GetLogs(p.Name, &corev1.PodLogOptions{
		Container: container, Previous: previous, TailLines: new(int64(logLines)), Timestamps: true}).Stream(ctx)
	var text []byte
	if err == nil {
		defer r.Close()
		text, err = io.ReadAll(io.LimitReader(r, logMost))
	}
	if err != nil {
		part.Err = c.Explain(err)
	}
	part.Text = string(text)
	return part
}
