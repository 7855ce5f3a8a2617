package workloads

import (
	"context"
	"fmt"
	"strings"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"kubevpn/internal/api"
)

// checkKernel returns an *api.Error if the kernel of the pod's node is known to lack what an ephemeral agent needs:
// nftables tables with an owner, Linux 5.12. A user who may not read the node learns it from the agent.
func (c Client) checkKernel(ctx context.Context, p *corev1.Pod) error {
	node, err := c.Kube().CoreV1().Nodes().Get(ctx, p.Spec.NodeName, metav1.GetOptions{})
	if err != nil {
		return nil
	}
	release := node.Status.NodeInfo.KernelVersion
	if !kernelTooOld(release) {
		return nil
	}
	return api.Errorf(api.ExitInject,
		"cannot redirect in the pod %s: its node %s runs Linux %s, and --mode ephemeral needs 5.12 or newer",
		p.Name, node.Name, release).WithHint("Use --mode sidecar, which needs nothing from the kernel.")
}

// kernelTooOld reports whether a release such as "5.10.0-28-amd64" is before Linux 5.12. Kernels of Red Hat's family
// ("4.18.0-553.el8_10.x86_64") have features of later ones, so kernelTooOld returns false; the agent finds out.
func kernelTooOld(release string) bool {
	var major, minor int
	if n, err := fmt.Sscanf(release, "%d.%d", &major, &minor); n < 2 || err != nil || strings.Contains(release, ".el") {
		return false
	}
	return major < 5 || major == 5 && minor < 12
}
