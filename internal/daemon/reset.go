package daemon

import (
	"context"
	"errors"
	"log/slog"

	"kubevpn/internal/api"
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
		errs = append(errs, err) // the others are reset all the same
	}
	return errors.Join(errs...)
}
