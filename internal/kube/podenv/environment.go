package podenv

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"net"
	"slices"
	"strconv"
	"strings"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// Variable is an environment variable of the container.
type Variable struct {
	Name, Value string
	Secret      bool // the value comes, or may come, from a Secret and must not be shown
	// Image reports that a program in the container has the variable and no readable object defines it. It comes
	// from the image or, if Secret is also set, possibly from an object that this user cannot read.
	Image bool
}

// Environment returns the container's variables, sorted by name, each once. It omits a variable that it cannot read and
// returns a Problem for it: a container does not start without its ConfigMap, but a program here may still be useful.
func (r *Reader) Environment(ctx context.Context) ([]Variable, []Problem) {
	e := environment{Reader: r, objects: r.objects(ctx), known: map[string]Variable{}}
	e.serviceVariables()
	for _, from := range r.container.EnvFrom {
		e.addAll(from)
	}
	for _, v := range r.container.Env {
		e.add(v)
	}
	for name, value := range e.services {
		e.addMissing(Variable{Name: name, Value: value})
	}
	e.addSeen()
	if name := Hostname(e.pod); name != "" {
		// set by the container runtime, so $(HOSTNAME) does not expand to it
		e.addMissing(Variable{Name: "HOSTNAME", Value: name})
	}
	variables := slices.SortedFunc(maps.Values(e.known), func(a, b Variable) int {
		return strings.Compare(a.Name, b.Name)
	})
	variables = slices.DeleteFunc(variables, func(v Variable) bool {
		binary := strings.ContainsRune(v.Value, 0)
		if binary {
			e.problem("variable "+v.Name,
				errors.New("its value contains a NUL byte, which environment variables cannot contain"))
		}
		return binary
	})
	return variables, e.problems
}

type environment struct {
	*Reader
	*objects
	services map[string]string
	known    map[string]Variable
	problems []Problem
	unread   bool // an unreadable object defines some of the seen variables
}

func (e *environment) problem(what string, err error) {
	e.problems = append(e.problems, Problem{What: what, Err: err})
}

// nameless reports a problem with variables whose names are unknown. If the environment of a program in the
// container is known, it contains them, and there is no problem.
func (e *environment) nameless(what string, err error) {
	if e.seen != nil {
		e.unread = true
		return
	}
	e.problem(what, err)
}

func (e *environment) addMissing(v Variable) {
	if _, ok := e.known[v.Name]; !ok {
		e.known[v.Name] = v
	}
}

// addSeen adds the other variables of a program in the container: those of the image and of unreadable objects.
func (e *environment) addSeen() {
	for name, value := range e.seen {
		e.addMissing(Variable{Name: name, Value: value, Secret: e.unread, Image: name != "HOSTNAME"})
	}
}

// Hostname returns the host name that the kubelet gives the pod; "" for a pod without a name.
func Hostname(pod *corev1.Pod) string {
	if pod.Spec.Hostname != "" {
		return pod.Spec.Hostname
	}
	const maxLen = 63 // the limit of Linux
	if len(pod.Name) <= maxLen {
		return pod.Name
	}
	return strings.TrimRight(pod.Name[:maxLen], "-.")
}

func isTrue(b *bool) bool { return b != nil && *b }

// absent reports whether err says that an optional object does not exist.
func absent(err error, optional *bool) bool { return apierrors.IsNotFound(err) && isTrue(optional) }

func (e *environment) addAll(from corev1.EnvFromSource) {
	var kind, name string
	var optional *bool
	if r := from.ConfigMapRef; r != nil {
		kind, name, optional = KindConfigMap, r.Name, r.Optional
	} else if r := from.SecretRef; r != nil {
		kind, name, optional = KindSecret, r.Name, r.Optional
	} else {
		return
	}
	data, err := e.data(kind, name, false)
	if err != nil && !absent(err, optional) {
		e.nameless("variables of "+kind+" "+name, err)
	}
	for k, v := range data {
		k = from.Prefix + k
		e.known[k] = Variable{Name: k, Value: string(v), Secret: kind == KindSecret}
	}
}

func (e *environment) add(v corev1.EnvVar) {
	if v.Value != "" || v.ValueFrom == nil {
		value, secret := e.expand(v.Value)
		e.known[v.Name] = Variable{Name: v.Name, Value: value, Secret: secret}
		return
	}
	value, exists, err := e.from(v.ValueFrom)
	if err != nil {
		if value, exists = e.seen[v.Name]; !exists {
			e.problem("variable "+v.Name, err)
		}
	}
	if exists {
		e.known[v.Name] = Variable{Name: v.Name, Value: value, Secret: v.ValueFrom.SecretKeyRef != nil}
	}
}

// from reads a variable's source. exists is false without an error if the source is optional and missing.
func (e *environment) from(s *corev1.EnvVarSource) (value string, exists bool, err error) {
	switch {
	case s.FieldRef != nil:
		value, err = field(e.pod, s.FieldRef.FieldPath)
		return value, err == nil, err
	case s.ResourceFieldRef != nil:
		value, err = e.resource(s.ResourceFieldRef)
		return value, err == nil, err
	case s.ConfigMapKeyRef != nil:
		return e.key(KindConfigMap, s.ConfigMapKeyRef.Name, s.ConfigMapKeyRef.Key, s.ConfigMapKeyRef.Optional)
	case s.SecretKeyRef != nil:
		return e.key(KindSecret, s.SecretKeyRef.Name, s.SecretKeyRef.Key, s.SecretKeyRef.Optional)
	}
	return "", false, errors.New("only the node can resolve a source of this kind")
}

// key is from for a key of a ConfigMap or Secret.
func (e *environment) key(kind, name, key string, optional *bool) (value string, exists bool, err error) {
	data, err := e.data(kind, name, false)
	if err != nil {
		return "", false, unless(absent(err, optional), err)
	}
	text, exists := data[key]
	return string(text), exists, unless(exists || isTrue(optional), fmt.Errorf("%s %s has no key %q", kind, name, key))
}

// unless returns err unless ok is true.
func unless(ok bool, err error) error {
	if ok {
		return nil
	}
	return err
}

// expand replaces $(NAME) by the value of a variable known so far, and keeps unknown names. secret reports whether
// a value came from a Secret.
func (e *environment) expand(s string) (expanded string, secret bool) {
	expanded = expand(s, func(name string) string {
		if v, ok := e.known[name]; ok {
			secret = secret || v.Secret
			return v.Value
		}
		if v, ok := e.services[name]; ok {
			return v
		}
		if e.unread {
			if v, ok := e.seen[name]; ok {
				secret = true
				return v
			}
		}
		return "$(" + name + ")"
	})
	return expanded, secret
}

// expand replaces $(NAME) by the value of NAME, and "$$" by "$".
func expand(s string, value func(name string) string) string {
	var b strings.Builder
	for {
		before, rest, found := strings.Cut(s, "$")
		b.WriteString(before)
		if !found {
			return b.String()
		}
		name, after, closed := strings.Cut(strings.TrimPrefix(rest, "("), ")")
		switch {
		case strings.HasPrefix(rest, "$"):
			b.WriteByte('$')
			s = rest[1:]
		case strings.HasPrefix(rest, "(") && closed:
			b.WriteString(value(name))
			s = after
		default:
			b.WriteByte('$')
			s = rest
		}
	}
}

// serviceVariables computes the variables for the namespace's Services and the Service of the API server.
func (e *environment) serviceVariables() {
	e.services = map[string]string{}
	var services []corev1.Service
	if e.serviceLinks() {
		list, err := e.servicesBeside()
		if err != nil {
			e.nameless("variables of the namespace's Services", err)
		} else {
			services = slices.Clone(list.Items)
		}
	}
	if !slices.ContainsFunc(services, func(s corev1.Service) bool { return s.Name == "kubernetes" }) {
		s, err := e.apiServerService()
		if err != nil { // a user with rights in one namespace may not read it
			s = e.master()
		}
		services = append(services, *s)
	}
	for _, s := range services {
		if s.Spec.ClusterIP != "" && s.Spec.ClusterIP != corev1.ClusterIPNone && len(s.Spec.Ports) > 0 {
			maps.Copy(e.services, variablesOf(s))
		}
	}
}

// serviceLinks reports whether the container has variables for the Services of its namespace.
func (r *Reader) serviceLinks() bool {
	return r.pod.Spec.EnableServiceLinks == nil || *r.pod.Spec.EnableServiceLinks
}

// master returns the Service of the API server without reading it: with the address that a program in the container
// has, or its DNS name, which its certificate also contains.
func (e *environment) master() *corev1.Service {
	s := corev1.Service{ObjectMeta: metav1.ObjectMeta{Name: "kubernetes"}}
	s.Spec.ClusterIP = cmp.Or(e.seen["KUBERNETES_SERVICE_HOST"], "kubernetes.default.svc")
	port, err := strconv.ParseUint(e.seen["KUBERNETES_SERVICE_PORT"], 10, 16)
	if err != nil {
		port = 443
	}
	s.Spec.Ports = []corev1.ServicePort{{Name: "https", Port: int32(port)}}
	return &s
}

// variablesOf returns the variables of one Service with a ClusterIP, as pkg/kubelet/envvars.FromServices does.
func variablesOf(s corev1.Service) map[string]string {
	upper := func(name string) string { return strings.ToUpper(strings.ReplaceAll(name, "-", "_")) }
	prefix, ip := upper(s.Name), s.Spec.ClusterIP
	vars := map[string]string{
		prefix + "_SERVICE_HOST": ip,
		prefix + "_SERVICE_PORT": strconv.Itoa(int(s.Spec.Ports[0].Port)),
	}
	for n, p := range s.Spec.Ports {
		port, protocol := strconv.Itoa(int(p.Port)), cmp.Or(p.Protocol, corev1.ProtocolTCP)
		if p.Name != "" {
			vars[prefix+"_SERVICE_PORT_"+upper(p.Name)] = port
		}
		lower := strings.ToLower(string(protocol))
		url := lower + "://" + net.JoinHostPort(ip, port)
		if n == 0 {
			vars[prefix+"_PORT"] = url
		}
		one := prefix + "_PORT_" + port + "_" + strings.ToUpper(string(protocol))
		vars[one] = url
		vars[one+"_PROTO"] = lower
		vars[one+"_PORT"] = port
		vars[one+"_ADDR"] = ip
	}
	return vars
}
