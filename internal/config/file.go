package config

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
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
	if err := c.apply(path, text); err != nil {
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
		if err := c.assign(&s, values, origin{api.OriginEnvironment, s.env}); err != nil {
			return Config{}, api.Errorf(api.ExitUsage, "%s: %w", s.env, err)
		}
	}
	return c, nil
}

// fields splits a comma-separated list.
func fields(s string) []string {
	return strings.FieldsFunc(s, func(r rune) bool { return r == ',' || r == ' ' })
}

// apply applies the settings of the YAML file at path. Errors contain its name.
func (c *Config) apply(path string, text []byte) error {
	name := filepath.Base(path)
	entries, err := mapping(text)
	if err != nil {
		return fmt.Errorf("%s%w", name, err)
	}
	for _, e := range entries {
		if e.err == nil && e.values != nil {
			if e.err = c.assign(e.setting, e.values, origin{api.OriginFile, path}); e.err != nil {
				e.err = fmt.Errorf("%s: %w", e.key, e.err)
			}
		}
		if e.setting == nil {
			keys := api.Texts(settings(), func(s setting) string { return string(s.key) })
			e.err = fmt.Errorf("%w: must be one of %s", e.err, strings.Join(keys, ", "))
		}
		if e.err != nil {
			return fmt.Errorf("%s:%d: %w", name, e.line, e.err)
		}
	}
	return nil
}

// entry is one `key: value` of a YAML text.
type entry struct {
	key     string
	line    int
	setting *setting
	values  []string // nil: the value is missing
	err     error    // why the entry is unusable
}

// mapping parses a YAML text that contains only `key: value` entries. Errors begin with ": " or the line.
func mapping(text []byte) ([]entry, error) {
	var doc yaml.Node
	if err := yaml.Unmarshal(text, &doc); err != nil {
		return nil, fmt.Errorf(": %w", err)
	}
	if len(doc.Content) == 0 {
		return nil, nil // empty, or only comments
	}
	root := doc.Content[0]
	if root.Kind != yaml.MappingNode {
		return nil, fmt.Errorf(":%d: expected a list of `key: value` lines", root.Line)
	}
	var entries []entry
	for pair := range slices.Chunk(root.Content, 2) {
		e := entry{key: pair[0].Value, line: pair[0].Line, setting: find(Key(pair[0].Value))}
		switch first := api.Find(entries, func(o entry) bool { return o.key == e.key }); {
		case e.setting == nil:
			e.err = fmt.Errorf("unknown key %.*q", maxValue, e.key)
		case first != nil:
			e.err = fmt.Errorf("%s is already set on line %d", e.key, first.line)
		default:
			if e.values, e.err = strs(pair[1], e.setting.list); e.err != nil {
				e.err = fmt.Errorf("%s: %w", e.key, e.err)
			}
		}
		entries = append(entries, e)
	}
	return entries, nil
}

// strs returns the value of a scalar or, if list is set, the values of a list, which may be none. Nil: the value is
// missing.
func strs(n *yaml.Node, list bool) ([]string, error) {
	switch {
	case n.Kind == yaml.ScalarNode:
		if n.Value == "" || n.Tag == "!!null" {
			return nil, nil
		}
		return []string{n.Value}, nil
	case n.Kind == yaml.SequenceNode && list:
		values := []string{}
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
