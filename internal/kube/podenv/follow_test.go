package podenv

import (
	"context"
	"errors"
	"fmt"
	"net/url"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"
	authenticationv1 "k8s.io/api/authentication/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/kubernetes/fake"
	clienttesting "k8s.io/client-go/testing"
	"sigs.k8s.io/yaml"
)

const followed = `
metadata: {name: web-1, namespace: shop, uid: u-1, labels: {app: web}}
spec:
  serviceAccountName: robot
  volumes:
  - {name: settings, configMap: {name: settings, items: [{key: color, path: color}]}}
  - {name: lost, configMap: {name: none}}
  - {name: scratch, emptyDir: {}}
  - {name: down, downwardAPI: {items: [{path: labels, fieldRef: {fieldPath: metadata.labels}}, {path: uid, fieldRef: {fieldPath: metadata.uid}}]}}
  - name: access
    projected: {sources: [{serviceAccountToken: {path: token}}, {configMap: {name: settings, items: [{key: color, path: ca.crt}]}}, {configMap: {name: never}}]}
  containers:
  - name: app
    volumeMounts: [{name: settings, mountPath: /s}, {name: lost, mountPath: /l}, {name: scratch, mountPath: /x}, {name: down, mountPath: /d}, {name: access, mountPath: /a}]
  - {name: beside, volumeMounts: [{name: access, mountPath: /a}, {name: settings, mountPath: /t}]}
status: {phase: Running}
`

func podOf(t *testing.T, manifest string) *corev1.Pod {
	t.Helper()
	var pod corev1.Pod
	if err := yaml.UnmarshalStrict([]byte(manifest), &pod); err != nil {
		t.Fatal(err)
	}
	return &pod
}

// following is a Follow that runs.
type following struct {
	t      *testing.T
	kube   *fake.Clientset
	fail   func(verb, resource, name string) error // the error of a request; nil: none fails
	other  *corev1.Pod                             // the result of Running
	unable error                                   // the error of Show
	tick   chan time.Time

	shown, warned []string
}

// follow runs Follow for two containers of a pod, and test, with a clock of their own.
func follow(t *testing.T, test func(t *testing.T, f *following)) {
	synctest.Test(t, func(t *testing.T) {
		pod := podOf(t, followed)
		f := &following{t: t, tick: make(chan time.Time), kube: fake.NewClientset(append(objectsOf(t, manifests), pod.DeepCopy())...)}
		issued := 0
		f.kube.PrependReactor("create", "serviceaccounts", func(a clienttesting.Action) (bool, runtime.Object, error) {
			r := a.(clienttesting.CreateActionImpl).GetObject().(*authenticationv1.TokenRequest)
			issued++
			bound := "none"
			if b := r.Spec.BoundObjectRef; b != nil {
				bound = b.Name + " " + string(b.UID)
			}
			r.Status = authenticationv1.TokenRequestStatus{Token: fmt.Sprintf("%d, bound to %s", issued, bound), ExpirationTimestamp: metav1.NewTime(time.Now().Add(time.Hour))}
			return true, r, nil
		})
		f.kube.PrependReactor("*", "*", func(a clienttesting.Action) (bool, runtime.Object, error) {
			if f.fail == nil {
				return false, nil, nil
			}
			name := ""
			if get, ok := a.(clienttesting.GetAction); ok {
				name = get.GetName()
			}
			err := f.fail(a.GetVerb(), a.GetResource().Resource, name)
			return err != nil, nil, err
		})
		var readers []*Reader
		for _, c := range pod.Spec.Containers {
			r, err := New(f.kube, pod, c.Name)
			if err != nil {
				t.Fatal(err)
			}
			readers = append(readers, r)
		}
		mounts, volumes, problems := Volumes(t.Context(), readers...)
		if len(mounts["app"]) != 4 || len(mounts["beside"]) != 2 || len(volumes) != 4 || issued != 1 {
			t.Fatalf("%v, %v, %d tokens", mounts, volumes, issued)
		}
		if diff := cmp.Diff([]string{`volume lost at /l: configmaps "none" not found`, `volume access: configmaps "never" not found`}, messages(problems)); diff != "" {
			t.Fatalf("problems: -want +got\n%s", diff)
		}
		ctx, cancel := context.WithCancel(t.Context())
		defer cancel()
		go Follow(ctx, Following{
			Readers: readers, Volumes: volumes, Problems: problems, Tick: f.tick,
			Running: func(context.Context) (*corev1.Pod, error) { return f.other, nil },
			Show: func(_ context.Context, v Volume) error {
				for _, file := range v.Files {
					f.shown = append(f.shown, v.Name+" "+file.Path+": "+string(file.Data))
				}
				return f.unable
			},
			Warn: func(s string) { f.warned = append(f.warned, s) },
		})
		synctest.Wait()
		f.minute(nil, nil)
		test(t, f)
	})
}

// minute lets a minute pass, and checks what Follow shows and which warnings it gives.
func (f *following) minute(shown, warned []string) {
	f.t.Helper()
	f.after(time.Minute, shown, warned)
}

func (f *following) after(d time.Duration, shown, warned []string) {
	f.t.Helper()
	time.Sleep(d)
	f.tick <- time.Now()
	synctest.Wait()
	if diff := cmp.Diff(shown, f.shown); diff != "" {
		f.t.Errorf("shown: -want +got\n%s", diff)
	}
	if diff := cmp.Diff(warned, f.warned); diff != "" {
		f.t.Errorf("warned: -want +got\n%s", diff)
	}
	f.shown, f.warned = nil, nil
}

func (f *following) paint(color string) {
	f.t.Helper()
	m, err := f.kube.CoreV1().ConfigMaps("shop").Get(f.t.Context(), "settings", metav1.GetOptions{})
	if err == nil {
		m.Data["color"] = color
		_, err = f.kube.CoreV1().ConfigMaps("shop").Update(f.t.Context(), m, metav1.UpdateOptions{})
	}
	if err != nil {
		f.t.Fatal(err)
	}
}

// set changes the pod in the cluster.
func (f *following) set(change func(*corev1.Pod)) {
	f.t.Helper()
	pod := podOf(f.t, followed)
	change(pod)
	if _, err := f.kube.CoreV1().Pods("shop").Update(f.t.Context(), pod, metav1.UpdateOptions{}); err != nil {
		f.t.Fatal(err)
	}
}

// replace deletes the first pod, and creates one of that name in its place, or none.
func (f *following) replace(name string) {
	f.t.Helper()
	if err := f.kube.CoreV1().Pods("shop").Delete(f.t.Context(), "web-1", metav1.DeleteOptions{}); err != nil {
		f.t.Fatal(err)
	}
	if name == "" {
		return
	}
	f.other = podOf(f.t, followed)
	f.other.Name, f.other.UID = name, "u-2"
	f.other.Spec.Volumes[0].ConfigMap.Name = "settings-of-another-release"
	f.other.Spec.Volumes[4].Name = "access-of-" + name // the API server gives it another name in each pod
	if _, err := f.kube.CoreV1().Pods("shop").Create(f.t.Context(), f.other, metav1.CreateOptions{}); err != nil {
		f.t.Fatal(err)
	}
}

func TestFollowShowsChanges(t *testing.T) {
	for _, tt := range []struct {
		name string
		test func(t *testing.T, f *following)
	}{
		{"another_value", func(t *testing.T, f *following) {
			f.paint("green")
			f.minute([]string{"access ca.crt: green", "access token: 1, bound to web-1 u-1", "settings color: green"}, nil)
			f.minute(nil, nil)
		}},
		{"soon", func(t *testing.T, f *following) { // changes of the pod; others come after a minute
			f.paint("green")
			f.after(10*time.Second, nil, nil)
			f.set(func(p *corev1.Pod) { p.Labels["tier"] = "back" })
			f.after(10*time.Second, []string{"access ca.crt: green", "access token: 1, bound to web-1 u-1", "down labels: app=\"web\"\ntier=\"back\"", "down uid: u-1", "settings color: green"}, nil)
			f.paint("red")
			f.after(10*time.Second, nil, nil)
			f.after(50*time.Second, []string{"access ca.crt: red", "access token: 1, bound to web-1 u-1", "settings color: red"}, nil)
		}},
		{"another_label", func(t *testing.T, f *following) {
			f.set(func(p *corev1.Pod) { p.Labels["tier"] = "back" })
			f.minute([]string{"down labels: app=\"web\"\ntier=\"back\"", "down uid: u-1"}, nil)
		}},
		{"one_source_is_not_read", func(t *testing.T, f *following) {
			f.fail = func(verb, resource, name string) error {
				if name == "settings" {
					return fmt.Errorf("reading: %w", context.DeadlineExceeded)
				}
				return nil
			}
			once := []string{"volume settings at /s: reading: context deadline exceeded", "volume access: reading: context deadline exceeded", "volume settings at /t: reading: context deadline exceeded"}
			f.minute(nil, once)
			f.minute(nil, nil)
			f.fail = nil
			f.minute(nil, nil)
			f.fail = func(_, _, name string) error {
				if name == "settings" {
					return apierrors.NewForbidden(corev1.Resource("configmaps"), "settings", errors.New("no more"))
				}
				return nil
			}
			const no = `configmaps "settings" is forbidden: no more`
			f.minute(nil, []string{"volume settings at /s: " + no, "volume access: " + no, "volume settings at /t: " + no})
			time.Sleep(time.Hour) // a token is renewed although other sources of its volume are unreadable
			f.minute([]string{"access ca.crt: blue", "access token: 2, bound to web-1 u-1"}, nil)
		}},
		{"nothing_is_answered", func(t *testing.T, f *following) {
			n := 0
			f.fail = func(string, string, string) error {
				n++
				return &url.Error{Op: "Get", URL: "https://10.0.0.1", Err: fmt.Errorf("read tcp 10.0.0.2:%d: connection reset by peer", n)}
			}
			f.minute(nil, []string{`updating volumes: Get "https://10.0.0.1": read tcp 10.0.0.2:1: connection reset by peer`})
			f.minute(nil, nil)
			if n != 2 {
				t.Errorf("it asked %d times", n)
			}
			f.fail = nil
			f.paint("green")
			f.minute([]string{"access ca.crt: green", "access token: 1, bound to web-1 u-1", "settings color: green"}, nil)
		}},
		{"another_pod_in_its_place", func(t *testing.T, f *following) {
			f.replace("web-2")
			f.minute([]string{"access ca.crt: blue", "access token: 2, bound to web-2 u-2", "down labels: app=\"web\"", "down uid: u-2"}, nil)
			f.minute(nil, nil)
		}},
		{"another_pod_of_its_name", func(t *testing.T, f *following) {
			f.replace("web-1")
			f.minute([]string{"access ca.crt: blue", "access token: 2, bound to web-1 u-2", "down labels: app=\"web\"", "down uid: u-2"}, nil)
		}},
		{"another_one_before_it_goes", func(t *testing.T, f *following) {
			f.set(func(p *corev1.Pod) { p.DeletionTimestamp, p.Finalizers = new(metav1.Now()), []string{"x/y"} })
			f.minute(nil, nil) // there is no other pod
			f.other = podOf(t, followed)
			f.other.Name, f.other.UID = "web-2", "u-2"
			f.minute([]string{"access ca.crt: blue", "access token: 2, bound to web-2 u-2", "down labels: app=\"web\"", "down uid: u-2"}, nil)
		}},
		{"none_in_its_place_for_a_while", func(t *testing.T, f *following) {
			f.replace("")
			f.minute([]string{"access ca.crt: blue", "access token: 2, bound to none"}, nil)
			f.minute(nil, nil)
			f.other = podOf(t, followed)
			f.other.Name, f.other.UID = "web-2", "u-2"
			if _, err := f.kube.CoreV1().Pods("shop").Create(t.Context(), f.other, metav1.CreateOptions{}); err != nil {
				t.Fatal(err)
			}
			f.minute([]string{"access ca.crt: blue", "access token: 3, bound to web-2 u-2", "down labels: app=\"web\"", "down uid: u-2"}, nil)
		}},
		{"it_may_not_be_read", func(t *testing.T, f *following) {
			f.fail = func(_, resource, _ string) error {
				if resource == "pods" {
					return apierrors.NewForbidden(corev1.Resource("pods"), "web-1", errors.New("no"))
				}
				return nil
			}
			f.paint("green")
			f.minute([]string{"access ca.crt: green", "access token: 1, bound to web-1 u-1", "settings color: green"}, []string{`pod web-1: pods "web-1" is forbidden: no`})
			f.minute(nil, nil)
		}},
		{"it_cannot_be_shown", func(t *testing.T, f *following) {
			f.paint("green")
			f.unable = errors.New("no room")
			shown := []string{"access ca.crt: green", "access token: 1, bound to web-1 u-1", "settings color: green"}
			f.minute(shown, []string{"volume access: its content is not updated: no room", "volume settings: its content is not updated: no room"})
			f.minute(shown, nil)
			f.unable = nil
			f.minute(shown, nil)
			f.minute(nil, nil)
		}},
	} {
		t.Run(tt.name, func(t *testing.T) { follow(t, tt.test) })
	}
}
