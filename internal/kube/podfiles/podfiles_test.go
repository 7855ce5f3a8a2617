package podfiles

import (
	"encoding/json"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	"sigs.k8s.io/yaml"
)

// The far end has the user and the capabilities of its target, and no more.
func TestSecurityIsThatOfTheTarget(t *testing.T) {
	const restricted = `{allowPrivilegeEscalation: false, readOnlyRootFilesystem: true, runAsNonRoot: true, runAsUser: %U, runAsGroup: %G,
capabilities: {drop: [ALL]}, seccompProfile: {type: RuntimeDefault}}`
	const root = `readOnlyRootFilesystem: true, runAsNonRoot: false, runAsUser: 0, runAsGroup: 0, seccompProfile: {type: RuntimeDefault}`
	for _, tt := range []struct{ name, pod, want string }{
		{"user of the pod", `{spec: {securityContext: {runAsUser: 5, runAsGroup: 6}, containers: [{name: web}]}}`,
			strings.NewReplacer("%U", "5", "%G", "6").Replace(restricted)},
		{"user of the container", `{spec: {securityContext: {runAsUser: 5, runAsGroup: 6}, containers: [{name: web, securityContext: {runAsUser: 7}}]}}`,
			strings.NewReplacer("%U", "7", "%G", "6").Replace(restricted)},
		{"what the kubelet reports", `{spec: {containers: [{name: web, securityContext: {runAsUser: 7}}]}, status: {containerStatuses: [{name: web, user: {linux: {uid: 8, gid: 9}}}]}}`,
			strings.NewReplacer("%U", "8", "%G", "9").Replace(restricted)},
		{"a sidecar", `{spec: {initContainers: [{name: web, securityContext: {runAsUser: 3, runAsGroup: 4}}]}}`,
			strings.NewReplacer("%U", "3", "%G", "4").Replace(restricted)},
		{"that of the image", `{spec: {containers: [{name: web}]}}`, "{" + root + "}"},
		{"root", `{spec: {containers: [{name: other, securityContext: {privileged: true}}, {name: web, securityContext: {runAsUser: 0}}]}}`, "{" + root + "}"},
		{"more capabilities", `{spec: {containers: [{name: web, securityContext: {capabilities: {add: [SYS_ADMIN], drop: [ALL]}}}]}}`,
			"{" + root + ", capabilities: {add: [SYS_ADMIN]}}"},
		{"all capabilities", `{spec: {containers: [{name: web, securityContext: {privileged: true}}]}}`, "{" + root + ", privileged: true}"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			var pod corev1.Pod
			var want corev1.SecurityContext
			if err := yaml.UnmarshalStrict([]byte(tt.pod), &pod); err != nil {
				t.Fatal(err)
			}
			if err := yaml.UnmarshalStrict([]byte(tt.want), &want); err != nil {
				t.Fatal(err)
			}
			got := Source{Pod: &pod, Container: "web"}.security()
			if diff := cmp.Diff(&want, got); diff != "" {
				raw, _ := json.Marshal(got)
				t.Errorf("%s\n-want +got\n%s", raw, diff)
			}
		})
	}
}
