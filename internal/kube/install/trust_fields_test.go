package install

import (
	"reflect"
	"slices"
	"testing"

	corev1 "k8s.io/api/core/v1"
)

// filled returns a value of the type with all its fields set.
func filled(t reflect.Type) reflect.Value {
	v := reflect.New(t).Elem()
	switch t.Kind() {
	case reflect.Struct:
		for i := range t.NumField() {
			if t.Field(i).IsExported() {
				v.Field(i).Set(filled(t.Field(i).Type))
			}
		}
		return v
	case reflect.Interface: // of a resource.Quantity
		return v
	}
	return changed(v)
}

// changed returns another value than v, of its type.
func changed(v reflect.Value) reflect.Value {
	c := reflect.New(v.Type()).Elem()
	switch v.Kind() {
	case reflect.Bool:
		c.SetBool(!v.Bool())
	case reflect.String:
		c.SetString(v.String() + "x")
	case reflect.Int, reflect.Int8, reflect.Int32, reflect.Int64:
		c.SetInt(v.Int() + 1)
	case reflect.Uint8:
		c.SetUint(v.Uint() + 1)
	case reflect.Pointer:
		c.Set(reflect.New(v.Type().Elem()))
		if v.IsNil() {
			c.Elem().Set(filled(v.Type().Elem()))
		} else {
			c.Elem().Set(changed(v.Elem()))
		}
	case reflect.Slice:
		c.Set(reflect.Append(v, filled(v.Type().Elem())))
	case reflect.Map:
		c.Set(reflect.MakeMap(v.Type()))
		c.SetMapIndex(filled(v.Type().Key()), filled(v.Type().Elem()))
	case reflect.Struct:
		c.Set(filled(v.Type()))
	default:
		panic("a field is a " + v.Kind().String())
	}
	return c
}

// A field that a later Kubernetes adds is in this test without an edit.
func TestEveryOtherFieldOfTheManagerIsCompared(t *testing.T) {
	free := map[string][]string{
		"pod": {"NodeSelector", "Affinity", "SchedulerName", "Tolerations", "PriorityClassName", "Priority", "Overhead",
			"RuntimeClassName", "PreemptionPolicy", "TopologySpreadConstraints", "ImagePullSecrets", "Resources",
			"TerminationGracePeriodSeconds"},
		"pod's securityContext": {"RunAsUser", "RunAsGroup"},
		"container":             {"Image", "ImagePullPolicy", "Resources", "ResizePolicy", "TerminationMessagePolicy"},
		"securityContext":       {"RunAsUser", "RunAsGroup", "RunAsNonRoot"}, // false is in another test
		"probe": {"InitialDelaySeconds", "TimeoutSeconds", "PeriodSeconds", "SuccessThreshold", "FailureThreshold",
			"TerminationGracePeriodSeconds"},
		"port":     {"Name", "ContainerPort", "Protocol"},
		"variable": {"Name"}, // the variables of another version
	}
	for what, part := range map[string]func(*corev1.PodSpec) any{
		"pod":                   func(s *corev1.PodSpec) any { return s },
		"pod's securityContext": func(s *corev1.PodSpec) any { return s.SecurityContext },
		"container":             func(s *corev1.PodSpec) any { return &s.Containers[0] },
		"securityContext":       func(s *corev1.PodSpec) any { return s.Containers[0].SecurityContext },
		"probe":                 func(s *corev1.PodSpec) any { return s.Containers[0].ReadinessProbe },
		"port":                  func(s *corev1.PodSpec) any { return &s.Containers[0].Ports[0] },
		"variable":              func(s *corev1.PodSpec) any { return &s.Containers[0].Env[0] },
	} {
		fields := reflect.TypeOf(part(new(deployment(Options{Image: image}).Spec.Template.Spec))).Elem()
		for i := range fields.NumField() {
			s := deployment(Options{Image: image}).Spec.Template.Spec
			field := reflect.ValueOf(part(&s)).Elem().Field(i)
			field.Set(changed(field))
			name := fields.Field(i).Name
			differs := podDifferences(s)
			if may := slices.Contains(free[what], name); may == (len(differs) > 0) {
				t.Errorf("%s: changed %s: %q", what, name, differs)
			}
		}
	}
}

func TestArgumentsOfTheManager(t *testing.T) {
	for _, ok := range [][]string{{}, {"--log-level=debug"}, {"--log-level", "debug"}, {"--proxy-listen", ""},
		{"--proxy-listen="}, {"--watch-namespaces=a,b", "--metrics-listen=:10803"},
		{"--allow-cidr", "10.0.0.0/8", "--deny-cidr=10.1.0.0/16", "--allow-namespaces=shop"}, {"--authorize"}, {"--authorize", "--log-level=info"}} {
		s := deployment(Options{Image: image}).Spec.Template.Spec
		s.Containers[0].Args = append(s.Containers[0].Args, ok...)
		if differs := podDifferences(s); len(differs) > 0 {
			t.Errorf("%q: %q", ok, differs)
		}
	}
	for _, bad := range [][]string{{"--listen=:10800"}, {"--listen", ":10800"}, {"--log-level", "--listen=:10800"},
		{"-listen=:1"}, {"--authorize", "$(GOMEMLIMIT)"}, {"--authorize", "true", "x"}, {"x"},
		{"--service-account=/tmp"}, {"--resolv-conf=/tmp/x"}, {"--pod-ip=10.0.0.1"}, {"--"}} {
		s := deployment(Options{Image: image}).Spec.Template.Spec
		s.Containers[0].Args = append(s.Containers[0].Args, bad...)
		if differs := podDifferences(s); len(differs) == 0 {
			t.Errorf("%q are accepted", bad)
		}
	}
}
