package install

import (
	"slices"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	"sigs.k8s.io/yaml"

	"kubevpn/internal/api"
	"kubevpn/internal/process/version"
)

// The module test compares the objects with those of the Helm chart.
func TestManifestHasTheOptions(t *testing.T) {
	for _, name := range []string{"tools", "123", "true", `"a`, "a\n---\nb"} {
		o := Options{Namespace: name, Image: "registry.example/" + name, Expose: ExposeLoadBalancer,
			ExposeRanges: []string{"203.0.113.0/24"}, APIServers: []string{"10.0.0.2:6443", "10.0.0.1:6443"}}
		text, err := Manifest(o)
		if err != nil {
			t.Fatal(err)
		}
		if strings.Contains(string(text), "manager-namespace") || strings.Contains(string(text), "manager-image") ||
			strings.Contains(string(text), "manager-version") {
			t.Errorf("%q: the manifest has placeholders:\n%s", name, text)
		}
		var n corev1.Namespace
		first, _, _ := strings.Cut(string(text), "\n---\napiVersion")
		if err := yaml.UnmarshalStrict([]byte(first), &n); err != nil || n.Name != name {
			t.Errorf("the namespace is %q, %v; want %q", n.Name, err, name)
		}
		d := deployment(o)
		c := d.Spec.Template.Spec.Containers[0]
		if d.Namespace != name || c.Image != o.Image || d.Labels[labelVersion] != labelValue(version.String()) {
			t.Errorf("the Deployment is in %q with image %q and labels %v", d.Namespace, c.Image, d.Labels)
		}
		if last := c.Env[len(c.Env)-1]; last.Name != "KUBEVPN_APISERVERS" || last.Value != "10.0.0.1:6443,10.0.0.2:6443" {
			t.Errorf("the last variable is %v", last)
		}
		s := directObjects(o)[0].(*corev1.Service)
		if s.Spec.Type != corev1.ServiceTypeLoadBalancer || !slices.Equal(s.Spec.LoadBalancerSourceRanges, o.ExposeRanges) {
			t.Errorf("the Service is %v", s.Spec)
		}
	}
}

func TestPortsAreThoseOfTheManager(t *testing.T) {
	var ports []int32
	for _, p := range deployment(Options{}).Spec.Template.Spec.Containers[0].Ports {
		ports = append(ports, p.ContainerPort)
	}
	if want := []int32{api.HealthPort, api.ProxyPort}; !slices.Equal(ports, want) {
		t.Errorf("got %v, want %v", ports, want)
	}
	if s := directObjects(Options{Expose: ExposeNodePort})[0].(*corev1.Service); s.Spec.Ports[0].Port != api.ProxyPort {
		t.Errorf("the Service has port %d", s.Spec.Ports[0].Port)
	}
}

func TestLabelValueReplacesInvalidCharacters(t *testing.T) {
	for _, tt := range []struct{ in, want string }{
		{"0.1.0-dev", "0.1.0-dev"}, {"1.0+build/7", "1.0-build-7"}, {"-x-", "x"}, {"", ""},
		{"aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa", "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa"},
	} {
		if got := labelValue(tt.in); got != tt.want {
			t.Errorf("%q: %q, want %q", tt.in, got, tt.want)
		}
	}
}
