package project

import (
	"fmt"
	"os"
	"os/exec"
	"runtime"
	"strings"

	"go.yaml.in/yaml/v3"
)

// variables are what ${NAME} in values stands for.
type variables struct {
	dir    string // of the project
	values map[string]string
}

func (v *variables) add(environ []string) {
	for _, entry := range environ {
		name, value, _ := strings.Cut(entry, "=")
		v.values[name] = value
	}
}

// expand replaces $NAME, ${NAME} and ${NAME:-DEFAULT}, and $$ by $.
func (v *variables) expand(text string) (string, error) {
	var failed error
	if at := strings.LastIndex(text, "${"); at >= 0 && !strings.Contains(text[at:], "}") {
		return text, fmt.Errorf("%q has no }", text[at:])
	}
	out := os.Expand(text, func(name string) string {
		if name == "$" {
			return "$"
		}
		name, fallback, has := strings.Cut(name, ":-")
		if value := v.values[name]; value != "" {
			return value
		}
		if has {
			return fallback
		}
		value, set := v.values[name]
		if !set && name == "GIT_BRANCH" {
			value, failed = v.branch()
			v.values[name] = value
		} else if !set {
			failed = fmt.Errorf("the variable %s is not set: set it, or write ${%[1]s:-DEFAULT}; $$ is a dollar", name)
		}
		return value
	})
	return out, failed
}

// branch returns the branch that is checked out.
func (v *variables) branch() (string, error) {
	cmd := exec.Command("git", "symbolic-ref", "--short", "HEAD")
	cmd.Dir = v.dir
	out, err := cmd.Output()
	if err != nil {
		return "", fmt.Errorf("GIT_BRANCH is not set, and git knows no branch here: %w", err)
	}
	return strings.TrimSpace(string(out)), nil
}

// text returns a scalar with its variables replaced.
func (r *reader) text(n *yaml.Node) string {
	if n.Kind != yaml.ScalarNode {
		r.problem(n, "this must be one value")
		return ""
	}
	out, err := r.vars.expand(n.Value)
	if err != nil {
		r.problem(n, "%v", err)
	}
	return out
}

// texts returns the items of a list, or a scalar as its only item.
func (r *reader) texts(n *yaml.Node) (all []string) {
	if n.Kind != yaml.SequenceNode {
		return []string{r.text(n)}
	}
	for _, item := range n.Content {
		all = append(all, r.text(item))
	}
	return all
}

// command returns the words of a list, or the shell with a text.
func (r *reader) command(n *yaml.Node) []string {
	if n.Kind == yaml.SequenceNode {
		return r.texts(n)
	}
	return shell(r.text(n))
}

func shell(text string) []string {
	if runtime.GOOS == "windows" {
		return []string{"cmd", "/C", text}
	}
	return []string{"sh", "-c", text}
}
