package config

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	"go.yaml.in/yaml/v3"

	"kubevpn/internal/api"
)

// Load returns the configuration without flags: the defaults, the YAML file at path, which need not exist, and the
// environment that lookup reads, such as os.LookupEnv. Errors are *api.Error with ExitUsage and name the line of the
// file or the variable.
func Load(path string, lookup func(string) (string, bool)) (Config, error) {
	c := Default()
	text, err := os.ReadFile(path)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return Config{}, api.Errorf(api.ExitUsage, "cannot read the configuration: %w", err)
	}
	if err := c.apply(filepath.Base(path), text); err != nil {
		return Config{}, api.Errorf(api.ExitUsage, "%w", err).WithHint("the file is %s", path)
	}
	for _, s := range settings() {
		value, _ := lookup(s.env)
		if value == "" {
			continue
		}
		values := []string{value}
		if s.list {
			values = fields(value)
		}
		if err := s.set(&c, values); err != nil {
			return Config{}, api.Errorf(api.ExitUsage, "%s: %w", s.env, err)
		}
	}
	return c, nil
}

// fields splits a comma-separated list.
func fields(s string) []string {
	return strings.FieldsFunc(s, func(r rune) bool { return r == ',' || r == ' ' })
}

// apply applies the settings of a YAML text. Errors contain name.
func (c *Config) apply(name string, text []byte) error {
	var doc yaml.Node
	if err := yaml.Unmarshal(text, &doc); err != nil {
		return fmt.Errorf("%s: %w", name, err)
	}
	if len(doc.Content) == 0 {
		return nil // empty, or only comments
	}
	root := doc.Content[0]
	if root.Kind != yaml.MappingNode {
		return fmt.Errorf("%s:%d: expected a list of `key: value` lines", name, root.Line)
	}
	seen := map[string]int{}
	for i := 0; i+1 < len(root.Content); i += 2 {
		key, value := root.Content[i], root.Content[i+1]
		if line, twice := seen[key.Value]; twice {
			return fmt.Errorf("%s:%d: %s is already set on line %d", name, key.Line, key.Value, line)
		}
		seen[key.Value] = key.Line
		if err := c.applyKey(key, value); err != nil {
			return fmt.Errorf("%s:%d: %w", name, key.Line, err)
		}
	}
	return nil
}

func (c *Config) applyKey(key, value *yaml.Node) error {
	s, ok := find(Key(key.Value))
	if !ok {
		return fmt.Errorf("unknown key %q: must be one of %s", key.Value, strings.Join(keyNames(), ", "))
	}
	values, err := strs(value, s.list)
	if err != nil {
		return fmt.Errorf("%s: %w", s.key, err)
	}
	if len(values) == 0 {
		return nil // `key:` without a value
	}
	if err := s.set(c, values); err != nil {
		return fmt.Errorf("%s: %w", s.key, err)
	}
	return nil
}

// strs returns the value of a scalar or, if list is set, the values of a list.
func strs(n *yaml.Node, list bool) ([]string, error) {
	switch {
	case n.Kind == yaml.ScalarNode:
		if n.Value == "" || n.Tag == "!!null" {
			return nil, nil
		}
		return []string{n.Value}, nil
	case n.Kind == yaml.SequenceNode && list:
		var values []string
		for _, item := range n.Content {
			if item.Kind != yaml.ScalarNode {
				return nil, fmt.Errorf("line %d must be a single value", item.Line)
			}
			values = append(values, item.Value)
		}
		return values, nil
	case list:
		return nil, errors.New("must be a list")
	}
	return nil, errors.New("must be a single value")
}

func keyNames() []string {
	var names []string
	for _, s := range settings() {
		names = append(names, string(s.key))
	}
	return names
}
