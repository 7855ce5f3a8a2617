package daemon

import (
	"context"
	"errors"
	"log/slog"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"

	"kubevpn/internal/api"
	"kubevpn/internal/clone"
	"kubevpn/internal/cluster"
	"kubevpn/internal/config"
	"kubevpn/internal/intercept"
)

// Reset removes every intercept and every clone of the workloads, whoever made it, with the rights of who asks. It needs no daemon
// and no connection, and makes none.
func Reset(ctx context.Context, req api.ResetRequest, progress func(api.Event), logger *slog.Logger) error {
	owner, err := NewOwner()
	if err != nil {
		return err
	}
	c, err := clusterOf(api.ConnectRequest{Kubeconfig: req.Kubeconfig}, logger)
	if err != nil {
		return err
	}
	image := req.Image
	if image == config.Default().Image {
		image = "" // not asked for: that of the agents which are there, as their nodes could pull it
	}
	var errs []error
	for _, workload := range req.Workloads {
		err := intercept.Reset(ctx, intercept.ResetConfig{
			Cluster: c, Namespace: req.Namespace, Workload: workload, Image: image,
			Owner: owner.Name, Mine: req.Mine, Key: owner.Key, Progress: progress, Logger: logger,
		})
		if ctx.Err() != nil {
			return ctx.Err()
		}
		removed, left := removeClones(ctx, c, req, workload, owner.Name, progress)
		if e := api.AsError(err); removed && req.Mine && e != nil && e.Code == api.ExitWorkload {
			err = nil // a clone is all that was left
		}
		errs = append(errs, err, left) // the others are reset all the same
	}
	return errors.Join(errs...)
}

// removeClones deletes the clones of a workload, after the intercepts that send requests to them: everybody's, or what earlier
// daemons of the owner's left.
func removeClones(ctx context.Context, c *cluster.Cluster, req api.ResetRequest, workload, owner string, progress func(api.Event)) (bool, error) {
	name, err := NewInterceptor().Resolve(ctx, api.ConnectRequest{Kubeconfig: req.Kubeconfig, Namespace: req.Namespace}, workload)
	if err != nil {
		return false, err
	}
	if !req.Mine {
		owner = ""
	}
	removed, err := clone.RemoveLeft(ctx, c.Kube(), req.Namespace, name, owner)
	for _, job := range removed {
		progress(api.Event{Time: time.Now(), Step: "Deleting the clone " + job, Done: true})
	}
	if err != nil && len(removed) == 0 && apierrors.IsForbidden(err) {
		return false, nil // who may not list Jobs has made none
	}
	if err != nil {
		return len(removed) > 0, c.Explain(err)
	}
	return len(removed) > 0, nil
}
