//go:build e2e && linux

package e2e

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"kubevpn/test/lab"
)

// cloneClaimsSuite checks that a clone does not mount a ReadWriteOnce claim unless the user shares it, and never
// mounts the volume of another pod of a StatefulSet.
func cloneClaimsSuite(t *testing.T, w *world) {
	w.loadApp(t)
	disk := t.TempDir() // visible to the nodes
	if err := os.WriteFile(filepath.Join(disk, "page"), []byte("on the disk"), 0o644); err != nil {
		t.Fatal(err)
	}
	w.apply(t, strings.NewReplacer("DISK", disk, "CONTAINER", claimsContainer).Replace(claimsManifest))
	v := w.visitor(t)
	l := w.newLaptop(t, lab.Admin)
	l.connect(t)
	for _, tt := range []struct {
		workload string
		flags    []string
		note     string // that the command prints
		page     string // the file that the clone has at /data; empty: none
	}{
		{"deployment/keeper", nil, "volume data is empty: only one node can have PersistentVolumeClaim disk (ReadWriteOnce) at a time; " +
			"--volume data=share runs the clone on that node, where both write to it", ""},
		{"deployment/keeper", []string{"--volume", "data=share"}, "", "on the disk"},
		{"statefulset/each", nil, "volume data is empty: each pod of the workload has its own", ""},
	} {
		t.Run(strings.Join(append([]string{filepath.Base(tt.workload)}, tt.flags...), " "), func(t *testing.T) {
			s := &shop{world: w, namespace: "claims", workload: tt.workload}
			s.rolledOut(t)
			r := l.clone(t, s, append([]string{"--headers", mine + "=" + me, "--name", "copy"}, tt.flags...)...)
			if !strings.Contains(r.stdout+r.stderr, tt.note) {
				t.Errorf("%v, want %q", r, tt.note)
			}
			name := filepath.Base(tt.workload)
			service := "http://" + w.clusterIP(t, s.namespace, name) + "/"
			if text, _, err := v.content(service, "/data/page"); text != tt.page && tt.page != "" || (err == nil) != (tt.page != "") {
				t.Errorf("the clone's page: %q, %v", text, err)
			}
			if err := v.of(service, name+"-"); err != nil {
				t.Error(err)
			}
			if tt.page != "" {
				at := func(pod string) string {
					return s.kubectl(t, "-n", s.namespace, "get", "pods", "-l", pod, "-o", "jsonpath={.items[*].spec.nodeName}")
				}
				if clone, original := at("kubevpn.dev/clone=copy"), at("app="+name); clone != original {
					t.Errorf("the clone is on node %q, the pod that has the claim on %q", clone, original)
				}
			}
			l.leave(t, s)
			s.noClone(t)
		})
	}
	if b, err := os.ReadFile(filepath.Join(disk, "page")); err != nil || string(b) != "on the disk" {
		t.Errorf("after leave: %q, %v", b, err)
	}
	l.must(t, "kubevpn", "disconnect", "--all")
	w.kubectl(t, "delete", "namespace/claims", "pv/claims-shared", "pv/claims-each", "--wait=false")
}

// claimsContainer is the container of both workloads.
const claimsContainer = `terminationGracePeriodSeconds: 1
      containers:
      - name: app
        image: ` + appRef + `
        imagePullPolicy: Never
        ports: [{containerPort: 8080, name: http}]
        volumeMounts: [{name: data, mountPath: /data}]
        readinessProbe: {httpGet: {path: /, port: http}, periodSeconds: 1}`

// The class has no provisioner: claims bind to the volumes below.
const claimsManifest = `
apiVersion: v1
kind: Namespace
metadata: {name: claims}
---
apiVersion: v1
kind: PersistentVolume
metadata: {name: claims-shared}
spec:
  capacity: {storage: 1Mi}
  accessModes: [ReadWriteOnce]
  storageClassName: made
  claimRef: {namespace: claims, name: disk}
  hostPath: {path: DISK, type: Directory}
---
apiVersion: v1
kind: PersistentVolume
metadata: {name: claims-each}
spec:
  capacity: {storage: 1Mi}
  accessModes: [ReadWriteOnce]
  storageClassName: made
  claimRef: {namespace: claims, name: data-each-0}
  hostPath: {path: DISK, type: Directory}
---
apiVersion: v1
kind: PersistentVolumeClaim
metadata: {name: disk, namespace: claims}
spec: {accessModes: [ReadWriteOnce], storageClassName: made, resources: {requests: {storage: 1Mi}}}
---
apiVersion: apps/v1
kind: Deployment
metadata: {name: keeper, namespace: claims}
spec:
  selector: {matchLabels: {app: keeper}}
  template:
    metadata: {labels: {app: keeper}}
    spec:
      volumes: [{name: data, persistentVolumeClaim: {claimName: disk}}]
      CONTAINER
---
apiVersion: v1
kind: Service
metadata: {name: keeper, namespace: claims}
spec: {selector: {app: keeper}, ports: [{port: 80, targetPort: http}]}
---
apiVersion: apps/v1
kind: StatefulSet
metadata: {name: each, namespace: claims}
spec:
  serviceName: each
  selector: {matchLabels: {app: each}}
  volumeClaimTemplates:
  - metadata: {name: data}
    spec: {accessModes: [ReadWriteOnce], storageClassName: made, resources: {requests: {storage: 1Mi}}}
  template:
    metadata: {labels: {app: each}}
    spec:
      CONTAINER
---
apiVersion: v1
kind: Service
metadata: {name: each, namespace: claims}
spec: {selector: {app: each}, ports: [{port: 80, targetPort: http}]}
`
