package daemon

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"errors"
	"fmt"
	"log/slog"

	apierrors "k8s.io/apimachinery/pkg/api/errors"

	"kubevpn/internal/api"
	"kubevpn/internal/kube/client"
	"kubevpn/internal/kube/install"
	"kubevpn/internal/laptop/clone"
	"kubevpn/internal/laptop/intercept"
)

// Reset removes every intercept and every clone of the workloads, of all owners or, if Mine is set in the request, of
// the owner, who has the rights of c. It requires neither a daemon nor a connection.
func Reset(ctx context.Context, c *client.Cluster, req api.ResetRequest, owner Owner, progress func(api.Event),
	logger *slog.Logger) error {
	if !req.Mine { // with another key, the agents also report the reset to the intercepts of the owner
		key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
		if err != nil {
			return fmt.Errorf("cannot create a key: %w", err)
		}
		owner.Key = key
	}
	image := func(ctx context.Context) (string, error) {
		if asked := agentImage(req.Image); asked != "" {
			return asked, nil
		}
		return install.Find(ctx, c, req.ManagerNamespace, req.Namespace, req.Consent)
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
		if e := api.AsError(err); e != nil && e.Code == api.ExitConsent {
			return e // nothing was changed, and the CLI asks the user
		}
		removed, left := removeClones(ctx, c, req, owner, workload, progress)
		if e := api.AsError(err); removed && req.Mine && e != nil && e.Code == api.ExitWorkload {
			err = nil // only a clone was left
		}
		if err != nil && left != nil && api.AsError(err).Message == api.AsError(left).Message {
			left = nil // both failed to find the workload
		}
		errs = append(errs, err, left) // continue with the others
	}
	return errors.Join(errs...)
}

// removeClones deletes the clones of a workload, after the intercepts that send requests to them: those of all owners,
// or those that earlier daemons of the owner left. It reports whether there were any.
func removeClones(ctx context.Context, c *client.Cluster, req api.ResetRequest, owner Owner, workload string,
	progress func(api.Event)) (bool, error) {
	name, err := workloadName(ctx, req.Namespace, workload, func() (*client.Cluster, error) { return c, nil })
	if err != nil {
		return false, err
	}
	key := ""
	if req.Mine {
		if key, err = owner.keyHash(); err != nil {
			return false, err
		}
	}
	removed, err := clone.RemoveLeft(ctx, c.Kube(), req.Namespace, name, key)
	for _, job := range removed {
		progress(api.Event{Step: "Deleting the clone " + job, Done: true})
	}
	if err != nil && len(removed) == 0 && apierrors.IsForbidden(err) {
		return false, nil // a user who may not list Jobs cannot have created a clone
	}
	if err != nil {
		return len(removed) > 0, c.Explain(err)
	}
	return len(removed) > 0, nil
}
