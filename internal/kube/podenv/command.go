package podenv

import (
	"slices"

	corev1 "k8s.io/api/core/v1"
)

// Command returns a container's command and args, with $(NAME) replaced by the values of its variables.
func Command(c *corev1.Container, variables []Variable) (command, args []string) {
	values := make(map[string]string, len(variables))
	for _, v := range variables {
		values[v.Name] = v.Value
	}
	all := func(words []string) []string {
		var out []string
		for _, word := range words {
			out = append(out, expand(word, func(name string) string {
				if value, ok := values[name]; ok {
					return value
				}
				return "$(" + name + ")"
			}))
		}
		return out
	}
	return all(c.Command), all(c.Args)
}

// Program returns the command line of a container, given command and args of the pod, entrypoint and cmd of the
// image: the pod's command replaces both of the image's, and its args replace cmd.
func Program(command, args, entrypoint, cmd []string) []string {
	switch {
	case len(command) > 0:
		return slices.Concat(command, args)
	case len(args) > 0:
		return slices.Concat(entrypoint, args)
	}
	return slices.Concat(entrypoint, cmd)
}
