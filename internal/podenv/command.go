package podenv

import corev1 "k8s.io/api/core/v1"

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
