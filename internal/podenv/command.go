package podenv

import (
	"slices"

	corev1 "k8s.io/api/core/v1"
)

// Command gives a container's command and args, with the values of its variables in the place of $(NAME).
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

// Program is what runs in a container of a pod that says command and args, from an image with that entrypoint and cmd: the pod's
// command takes the place of both of the image's, and its args that of cmd.
func Program(command, args, entrypoint, cmd []string) []string {
	switch {
	case len(command) > 0:
		return slices.Concat(command, args)
	case len(args) > 0:
		return slices.Concat(entrypoint, args)
	}
	return slices.Concat(entrypoint, cmd)
}
