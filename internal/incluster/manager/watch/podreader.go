package watch

import (
	"cmp"
	"context"
	"fmt"
	"iter"
	"log/slog"
	"maps"
	"net/netip"
	"slices"
	"sync"
	"time"

	"golang.org/x/sync/errgroup"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/validation"
	"k8s.io/client-go/kubernetes"

	"kubevpn/internal/incluster/access"
	"kubevpn/pkg/datapath/balancer"
	"kubevpn/pkg/datapath/routable"
	"kubevpn/pkg/wakeup"
)

const (
	readBatch    = 32               // pods
	readAtOnce   = 4                // requests
	readInterval = time.Second      // between batches
	readTimeout  = 10 * time.Second // of one request
	readFirst    = 2 * time.Second  // the first laptop's wait for the blocks
	disprovedFor = 5 * time.Minute  // until the next read of a pod that did not have the address
)

// podReader verifies which blocks of addresses belong to pods. Anyone with write access to EndpointSlices in one
// namespace can claim any address for a pod. The status of a pod, which the kubelet writes, proves it.
//
//	block that no Node states ─▶ get one of its pods ─┬─ has the address ────────────▶ the block is verified
//	                                ▲                 ├─ has not, or does not exist ─▶ another pod
//	                                └─────────────────┴─ forbidden ──────────────────▶ endpoints are routed one by one
//
// It does not read a disproved pod again within disprovedFor. Namespaces with fewer disproved pods come first.
type podReader struct {
	kube    kubernetes.Interface // nil: no API access
	cluster *cluster
	log     *slog.Logger
	poked   wakeup.Signal // there may be blocks of which no pod was read
}

func newPodReader(kube kubernetes.Interface, c *cluster, log *slog.Logger) *podReader {
	c.firstRoundDone = kube == nil
	return &podReader{kube: kube, cluster: c, log: log, poked: wakeup.NewSignal()}
}

// run reads pods until ctx ends. It begins with the first signal of poked.
func (r *podReader) run(ctx context.Context) error {
	var deadline time.Time // of the first round
	retry := retryFirst
	poked := r.poked
	var again <-chan time.Time
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-poked:
		case <-again:
		}
		if deadline.IsZero() {
			deadline = time.Now().Add(readFirst)
		}
		poked, again = nil, time.After(readInterval)
		refs := r.cluster.unread(time.Now())
		err := r.readAll(ctx, refs)
		switch {
		case apierrors.IsForbidden(err):
			again = time.After(rightsInterval)
		case err != nil && ctx.Err() == nil:
			r.log.Warn("cannot read pods", "err", err, "retry", retry)
			again = time.After(retry)
			retry = min(2*retry, retryMost)
		case len(refs) == 0:
			poked, again = r.poked, time.After(disprovedFor)
			retry = retryFirst
		}
		if err != nil || len(refs) == 0 || time.Now().After(deadline) {
			r.cluster.endFirstRound(err == nil && len(refs) == 0)
		}
	}
}

// readAll reads the pods and records the results. The error is Forbidden if the manager may not read pods.
func (r *podReader) readAll(ctx context.Context, refs []access.PodRef) error {
	var mu sync.Mutex
	results := make(map[access.PodRef]bool)
	g, ctx := errgroup.WithContext(ctx)
	g.SetLimit(readAtOnce)
	for _, ref := range refs {
		g.Go(func() error {
			has, err := HasAddress(ctx, r.kube, ref)
			if err != nil {
				return err
			}
			mu.Lock()
			results[ref] = has
			mu.Unlock()
			return nil
		})
	}
	err := g.Wait()
	for ref, has := range results {
		if !has {
			r.log.Warn("an EndpointSlice shows an address that its pod does not have", "address", ref.Addr, "namespace",
				ref.Namespace, "pod", ref.Name)
			break // one log line is enough
		}
	}
	r.cluster.recordRead(results, time.Now(), apierrors.IsForbidden(err))
	return err
}

// HasAddress asks the API server whether a pod has an address of its own. The status of a pod that has ended keeps
// addresses that other pods may have by now.
func HasAddress(ctx context.Context, kube kubernetes.Interface, ref access.PodRef) (bool, error) {
	if len(validation.IsDNS1123Subdomain(ref.Name)) > 0 {
		return false, nil // no pod has such a name, and it would become a part of the request's path
	}
	ctx, cancel := context.WithTimeout(ctx, readTimeout)
	defer cancel()
	pod, err := kube.CoreV1().Pods(ref.Namespace).Get(ctx, ref.Name, metav1.GetOptions{})
	switch {
	case apierrors.IsNotFound(err):
		return false, nil
	case err != nil:
		return false, fmt.Errorf("reading pod %s/%s: %w", ref.Namespace, ref.Name, err)
	}
	ended := pod.Status.Phase == corev1.PodSucceeded || pod.Status.Phase == corev1.PodFailed
	return !ended && !pod.Spec.HostNetwork && slices.ContainsFunc(pod.Status.PodIPs, func(ip corev1.PodIP) bool {
		addr, err := netip.ParseAddr(ip.IP)
		return err == nil && addr.Unmap() == ref.Addr
	}), nil
}

// unread returns pods to read, at most one of each block that is neither stated nor verified.
func (c *cluster) unread(now time.Time) []access.PodRef {
	c.mu.Lock()
	defer c.mu.Unlock()
	n := &c.networks
	maps.DeleteFunc(n.verified, func(block netip.Prefix, _ struct{}) bool { return n.pods[block] == nil })
	maps.DeleteFunc(c.disproved, func(_ access.PodRef, at time.Time) bool { return now.Sub(at) >= disprovedFor })
	failures := map[string]int{} // by namespace
	for ref := range c.disproved {
		failures[ref.Namespace]++
	}
	order := func(a, b access.PodRef) int {
		return cmp.Or(failures[a.Namespace]-failures[b.Namespace], a.Addr.Compare(b.Addr),
			cmp.Compare(a.Namespace, b.Namespace), cmp.Compare(a.Name, b.Name))
	}
	wanted := n.unverified()
	if len(wanted) == 0 {
		return nil
	}
	first := map[netip.Prefix]access.PodRef{}
	for service := range c.slices {
		for ref := range c.claims(service) {
			block := routable.PodBlock(ref.Addr)
			if _, ok := wanted[block]; !ok {
				continue
			}
			if _, ok := c.disproved[ref]; ok {
				continue
			}
			if before, ok := first[block]; !ok || order(ref, before) < 0 {
				first[block] = ref
			}
		}
	}
	refs := slices.SortedFunc(maps.Values(first), order)
	return refs[:min(len(refs), readBatch)]
}

// claims returns the pods that the EndpointSlices of a Service name. Call with mu held.
func (c *cluster) claims(service balancer.Name) iter.Seq[access.PodRef] {
	return func(yield func(access.PodRef) bool) {
		for _, s := range c.slices[service] {
			for i := range s.endpoints {
				e := &s.endpoints[i]
				if e.pod != "" && !yield(access.PodRef{Addr: e.addr, Namespace: service.Namespace, Name: e.pod}) {
					return
				}
			}
		}
	}
}

// unverified returns the blocks of pods that may be routed and are neither stated nor verified.
func (n *networks) unverified() map[netip.Prefix]struct{} {
	known, space := routable.Of(n.podCIDRs), routable.Space()
	blocks := map[netip.Prefix]struct{}{}
	for block := range n.pods {
		if _, ok := n.verified[block]; !ok && !known.ContainsPrefix(block) && space.ContainsPrefix(block) {
			blocks[block] = struct{}{}
		}
	}
	return blocks
}

// recordRead records which pods have the address that an EndpointSlice claims.
func (c *cluster) recordRead(results map[access.PodRef]bool, now time.Time, forbidden bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for ref, has := range results {
		if has {
			c.networks.verified[routable.PodBlock(ref.Addr)] = struct{}{}
		} else {
			c.disproved[ref] = now
		}
		c.needsCIDRs = true
	}
	if forbidden {
		c.needsCIDRs = c.needsCIDRs || !c.networks.mayNotRead
		c.networks.mayNotRead = true
	}
	if c.needsCIDRs {
		c.changed.Raise()
	}
}

// endFirstRound ends the wait of laptops for the podReader. complete reports that the podReader has read every pod, so
// the manager may read pods. Until then the cluster keeps the addresses that it routed without reading, so that no
// route disappears in between.
func (c *cluster) endFirstRound(complete bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if complete && c.networks.mayNotRead {
		c.networks.mayNotRead, c.needsCIDRs = false, true
		c.changed.Raise()
	}
	if !c.firstRoundDone {
		c.firstRoundDone = true
		c.changed.Raise()
	}
}
