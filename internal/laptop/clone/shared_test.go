package clone

import (
	"fmt"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"kubevpn/internal/api"
)

// Each volume is mounted at /NAME of the container, writable, unless mounts say otherwise.
func sharedSource(t *testing.T, volume, mounts string) original {
	t.Helper()
	if mounts == "" {
		mounts = "[{name: v, mountPath: /data}]"
	}
	return sourceOf(t, fmt.Sprintf(`
spec:
  volumes: [{name: own, emptyDir: {}}, {name: v, %s}]
  containers:
  - {name: side, volumeMounts: [{name: v, mountPath: /elsewhere, readOnly: true}]}
  - {name: app, image: "web:1", volumeMounts: %s}
`, volume, mounts))
}

func syncTo(remote string) api.CloneSpec {
	return api.CloneSpec{Sync: []api.SyncPair{{Local: "/home/ann/web", Remote: remote}}}
}

const manyNodes = "persistentVolumeClaim: {claimName: many}"

func TestSyncToSharedVolumeIsRejected(t *testing.T) {
	for _, tt := range []struct {
		name, volume, mounts, remote string
		what                         string // what the others write to; "": nobody else writes
	}{
		{"claim", manyNodes, "", "/data", "PersistentVolumeClaim many"},
		{"host path", "hostPath: {path: /srv/web}", "", "/data", "the node's /srv/web (hostPath)"},
		{"NFS", "nfs: {server: filer, path: /export}", "", "/data", "nfs"},
		{"CephFS", "cephfs: {monitors: [a]}", "", "/data", "cephfs"},
		{"a driver's inline volume", "csi: {driver: nfs.csi.k8s.io}", "", "/data", "csi"},
		{"below the mount", manyNodes, "", "/data/app", "PersistentVolumeClaim many"},
		{"above the mount", manyNodes, "[{name: v, mountPath: /app/data}]", "/app", "PersistentVolumeClaim many"},
		{"the root", manyNodes, "", "/", "PersistentVolumeClaim many"},
		{"a path that is not clean", manyNodes, "[{name: v, mountPath: /srv/../data/}]", "/data/./x", "PersistentVolumeClaim many"},
		{"a relative mount path", manyNodes, "[{name: v, mountPath: data}]", "/data", "PersistentVolumeClaim many"},
		{"a part of the volume", manyNodes, "[{name: v, mountPath: /data, subPath: web}]", "/data", "PersistentVolumeClaim many"},
		{"beside the mount", manyNodes, "", "/database", ""},
		{"read-only mount", manyNodes, "[{name: v, mountPath: /data, readOnly: true}]", "/data", ""},
		{"read-only claim", "persistentVolumeClaim: {claimName: many, readOnly: true}", "", "/data", ""},
		{"read-only NFS", "nfs: {server: filer, path: /export, readOnly: true}", "", "/data", ""},
		{"a directory of the pod in the volume", manyNodes, "[{name: v, mountPath: /data}, {name: own, mountPath: /data/tmp}]", "/data/tmp/app", ""},
		{"the volume in a directory of the pod", manyNodes, "[{name: own, mountPath: /work}, {name: v, mountPath: /work/data}]", "/work/data", "PersistentVolumeClaim many"},
		{"empty directory", "emptyDir: {}", "", "/data", ""},
		{"ConfigMap", "configMap: {name: settings}", "", "/data", ""},
		{"generic ephemeral volume", "ephemeral: {volumeClaimTemplate: {spec: {}}}", "", "/data", ""},
	} {
		t.Run(tt.name, func(t *testing.T) {
			s := sharedSource(t, tt.volume, tt.mounts)
			_, _, err := s.job(syncTo(tt.remote), "ann@laptop", "hash")
			if tt.what == "" {
				if err != nil {
					t.Fatal(err)
				}
				return
			}
			checkError(t, err, api.ExitUsage, "--sync "+tt.remote+" would change files that others use: volume v is "+tt.what)
			meant := syncTo(tt.remote)
			meant.SyncShared = true
			if _, _, err := s.job(meant, "ann@laptop", "hash"); err != nil {
				t.Errorf("with --sync-shared: %v", err)
			}
			empty := syncTo(tt.remote)
			empty.Volumes = map[string]string{"v": api.VolumeEmpty}
			job, _, err := s.job(empty, "ann@laptop", "hash")
			if err != nil {
				t.Fatalf("with --volume v=empty: %v", err)
			}
			if v := job.Spec.Template.Spec.Volumes[1]; v.EmptyDir == nil || v.HostPath != nil || v.PersistentVolumeClaim != nil {
				t.Errorf("with --volume v=empty the clone has %+v", v)
			}
		})
	}
}

func TestSharedWritableVolumesAreReported(t *testing.T) {
	for _, tt := range []struct {
		name, volume, mounts string
		want                 []string
	}{
		{"claim", manyNodes, "", []string{"volume v is shared: the clone writes to PersistentVolumeClaim many as the workload does; --volume v=empty gives it an empty directory"}},
		{"read-only mount", manyNodes, "[{name: v, mountPath: /data, readOnly: true}]", nil},
		{"not mounted", manyNodes, "[]", nil},
		{"of the pod", "emptyDir: {}", "", nil},
	} {
		t.Run(tt.name, func(t *testing.T) {
			_, notes, err := sharedSource(t, tt.volume, tt.mounts).job(api.CloneSpec{}, "ann@laptop", "hash")
			if err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff(tt.want, notes); diff != "" {
				t.Errorf("notes: -want +got\n%s", diff)
			}
		})
	}
	t.Run("once, if it was asked for", func(t *testing.T) {
		s := sharedSource(t, "persistentVolumeClaim: {claimName: once}", "")
		s.claims = map[string]exclusive{"once": {mode: "ReadWriteOnce", node: "node-1"}}
		_, notes, err := s.job(api.CloneSpec{Volumes: map[string]string{"v": api.VolumeShare}}, "ann@laptop", "hash")
		if err != nil || len(notes) != 1 || !strings.Contains(notes[0], "both write to PersistentVolumeClaim once") {
			t.Errorf("notes = %q, %v", notes, err)
		}
	})
}

func TestSyncToRequestedClaimIsRejected(t *testing.T) {
	s := sharedSource(t, "persistentVolumeClaim: {claimName: once}", "")
	s.claims = map[string]exclusive{"once": {mode: "ReadWriteOnce", node: "node-1"}}
	spec := syncTo("/data")
	if _, _, err := s.job(spec, "ann@laptop", "hash"); err != nil {
		t.Errorf("the clone has an empty directory: %v", err)
	}
	spec.Volumes = map[string]string{"v": api.VolumeShare}
	_, _, err := s.job(spec, "ann@laptop", "hash")
	checkError(t, err, api.ExitUsage, "--sync /data would change files that others use: volume v is PersistentVolumeClaim once")
}
