package install

import (
	"slices"
	"strings"
	"testing"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/runtime"

	"kubevpn/internal/api"
)

func TestInspectSeesWhatEnsureWouldUse(t *testing.T) {
	scaled := installed("kubevpn", image)
	for _, o := range scaled {
		if d, is := o.(*appsv1.Deployment); is {
			d.Spec.Replicas = new(int32(0))
		}
	}
	team := &corev1.Namespace{}
	team.Name = "team"
	for _, tt := range []struct {
		name, deny string
		image      string // in Options
		objects    []runtime.Object
		want       Inspection
		lacking    string
		problem    api.ExitCode
	}{
		{"ready", "", image, installed("kubevpn", image), Inspection{Namespace: "kubevpn", Installed: true, Pod: "manager-pod", Image: image}, "", 0},
		{"none", "", image, nil, Inspection{Namespace: "kubevpn"}, "", 0},
		{"none, and no image", "", "", nil, Inspection{Namespace: "kubevpn"}, "", api.ExitInstall},
		{"in the own namespace", developer, image, installed("team", image), Inspection{Namespace: "team", Installed: true, Pod: "manager-pod", Image: image}, "", 0},
		{"to be installed there", developer, image, []runtime.Object{team}, Inspection{Namespace: "team"}, "", 0},
		{"no right to use it", "create:pods/portforward@*", image, installed("kubevpn", image), Inspection{Namespace: "kubevpn", Installed: true, Pod: "manager-pod", Image: image}, "create pods/portforward in namespace kubevpn", 0},
		{"no right at all", "*:*@*", image, installed("kubevpn", image), Inspection{Namespace: "kubevpn"}, "get deployments in namespace kubevpn", 0},
		{"scaled to zero", "", image, scaled, Inspection{Namespace: "kubevpn", Installed: true, Image: image}, "", api.ExitNotReady},
		{"no pod", "", image, without[*corev1.Pod](installed("kubevpn", image)), Inspection{Namespace: "kubevpn", Installed: true, Image: image}, "", api.ExitNotReady},
	} {
		t.Run(tt.name, func(t *testing.T) {
			w := newWorld(tt.deny, "", tt.objects...)
			got, err := Inspect(t.Context(), w, Options{FallbackNamespace: "team", Image: tt.image})
			if err != nil {
				t.Fatal(err)
			}
			if got.Namespace != tt.want.Namespace || got.Installed != tt.want.Installed || got.Pod != tt.want.Pod ||
				got.Image != tt.want.Image {
				t.Errorf("got %+v\nwant %+v", got, tt.want)
			}
			var missing []string
			for _, p := range got.Lacking {
				missing = append(missing, p.String())
			}
			if (len(missing) > 0) != (tt.lacking != "") || tt.lacking != "" && !slices.Contains(missing, tt.lacking) {
				t.Errorf("lacking %q, want %q", missing, tt.lacking)
			}
			if (got.Ask != "") != (tt.lacking != "") {
				t.Errorf("ask an admin: %q", got.Ask)
			}
			if got.Starting != (tt.name == "no pod") {
				t.Errorf("starting: %v, %v", got.Starting, got.Problem)
			}
			if code := codeOf(got.Problem); code != tt.problem {
				t.Errorf("problem %v, want code %d", got.Problem, tt.problem)
			}
			if len(w.changes) > 0 {
				t.Errorf("it changed something: %q", w.changes)
			}
		})
	}
}

func codeOf(e *api.Error) api.ExitCode {
	if e == nil {
		return 0
	}
	return e.Code
}

func TestCheckNamesMissingRights(t *testing.T) {
	w := newWorld("create:pods/exec@team patch:clusterroles@", "")
	for _, r := range Check(t.Context(), w, RightsTable("kubevpn", "team")) {
		want := ""
		switch {
		case strings.Contains(r.Gives, "files, dev"), strings.Contains(r.Gives, "why --from"):
			want = "create pods/exec in namespace team"
		case strings.Contains(r.Gives, "its rights"):
			want = "patch clusterroles in the whole cluster"
		}
		if api.Join(r.Missing) != want {
			t.Errorf("%+v, want %q", r, want)
		}
	}
}
