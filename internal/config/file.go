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

// Load is the configuration without flags: the defaults, then the YAML file at path (which need not exist),
// then the environment as lookup knows it (os.LookupEnv). Errors are *api.Error with ExitUsage and name the
// file's line or the variable.
func Load(path string, lookup func(string) (string, bool)) (Config, error) {
	c := Default()
	text, err := os.ReadFile(path)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return Config{}, api.Errorf(api.ExitUsage, "reading the configuration: %w", err)
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

// apply sets what the YAML text settles. name is what errors call it.
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
		return fmt.Errorf("%s:%d: this is not a list of `key: value` lines", name, root.Line)
	}
	seen := map[string]int{}
	for i := 0; i+1 < len(root.Content); i += 2 {
		key, value := root.Content[i], root.Content[i+1]
		if line, twice := seen[key.Value]; twice {
			return fmt.Errorf("%s:%d: %s is set on line %d already", name, key.Line, key.Value, line)
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
		return fmt.Errorf("unknown key %q: there are %s", key.Value, strings.Join(keyNames(), ", "))
	}
	values, err := strs(value, s.list)
	if err != nil {
		return fmt.Errorf("%s: %w", s.key, err)
	}
	if len(values) == 0 {
		return nil // `key:` with nothing behind it settles nothing
	}
	if err := s.set(c, values); err != nil {
		return fmt.Errorf("%s: %w", s.key, err)
	}
	return nil
}

// strs reads a scalar, or a list of them where list says so.
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
				return nil, fmt.Errorf("line %d is not a single value", item.Line)
			}
			values = append(values, item.Value)
		}
		return values, nil
	case list:
		return nil, errors.New("this is not a list")
	}
	return nil, errors.New("this is not a single value")
}

func keyNames() []string {
	var names []string
	for _, s := range settings() {
		names = append(names, string(s.key))
	}
	return names
}
