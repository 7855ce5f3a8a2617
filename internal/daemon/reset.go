package daemon

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"strings"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"kubevpn/internal/api"
	"kubevpn/internal/cluster"
	"kubevpn/internal/config"
	"kubevpn/internal/intercept"
)

// Reset removes every intercept of the workloads, whoever made it, with the rights of who asks. It needs no daemon and no
// connection, and makes none.
func Reset(ctx context.Context, req api.ResetRequest, progress func(api.Event), logger *slog.Logger) error {
	owner, err := NewOwner()
	if err != nil {
		return err
	}
	c, err := clusterOf(api.ConnectRequest{Kubeconfig: req.Kubeconfig}, logger)
	if err != nil {
		return err
	}
	var errs []error
	for _, workload := range req.Workloads {
		image, err := resetImage(ctx, c, req, workload)
		if err == nil {
			err = intercept.Reset(ctx, intercept.ResetConfig{
				Cluster: c, Namespace: req.Namespace, Workload: workload, Image: image,
				Owner: owner.Name, Key: owner.Key, Progress: progress, Logger: logger,
			})
		}
		if ctx.Err() != nil {
			return ctx.Err()
		}
		errs = append(errs, err) // the others are reset all the same
	}
	return errors.Join(errs...)
}

// resetImage is what the agent that gives the order is made of: the image that was asked for, else that of an agent which is
// there, as its node could pull it.
func resetImage(ctx context.Context, c *cluster.Cluster, req api.ResetRequest, workload string) (string, error) {
	if req.Image != config.Default().Image {
		return req.Image, nil
	}
	w, err := c.Workload(ctx, req.Namespace, workload)
	if err != nil {
		return "", err
	}
	o := metav1.ListOptions{FieldSelector: "metadata.name=" + w.Name} // a Pod
	if w.Selector != nil {
		o = metav1.ListOptions{LabelSelector: w.Selector.String()}
	}
	pods, err := c.Kube().CoreV1().Pods(req.Namespace).List(ctx, o)
	if err != nil {
		return "", c.Explain(fmt.Errorf("listing the pods of %s: %w", w, err))
	}
	for _, p := range pods.Items {
		if image := imageOfAgent(&p.Spec); image != "" {
			return image, nil
		}
	}
	return req.Image, nil // nothing will have to be added
}

// imageOfAgent is the image of the newest agent in a pod, or "".
func imageOfAgent(spec *corev1.PodSpec) (image string) {
	for _, c := range spec.Containers {
		if strings.HasPrefix(c.Name, api.AgentPrefix) {
			image = c.Image
		}
	}
	for _, c := range spec.EphemeralContainers {
		if strings.HasPrefix(c.Name, api.AgentPrefix) {
			image = c.Image
		}
	}
	return image
}
