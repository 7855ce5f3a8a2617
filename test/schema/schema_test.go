// Package schema_test checks the JSON schema of the objects that commands print: it matches the Go types, stored
// documents comply with it, and no field vanishes or changes its type.
package schema_test

import (
	"bytes"
	"encoding"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/invopop/jsonschema"
	validator "github.com/santhosh-tekuri/jsonschema/v6"

	"kubevpn/internal/api"
	"kubevpn/internal/config"
)

var update = flag.Bool("update", false, "write the schema")

const schemaFile = "docs/reference/objects.schema.json"

// objects returns a value of each kind.
func objects() map[string]any {
	return map[string]any{
		api.KindStatus: api.Status{}, api.KindEvent: api.Event{}, api.KindConnection: api.Connection{},
		api.KindIntercept: api.Intercept{}, api.KindInterceptList: api.InterceptList{}, api.KindVersion: api.Version{},
		api.KindWorkloadList: api.WorkloadList{}, api.KindSettingList: api.SettingList{},
		api.KindTrustedClusters: map[string]config.Trusted{}, api.KindHelperService: api.HelperService{},
		api.KindFlowList:  api.FlowList{},
		api.KindDiagnosis: api.Diagnosis{},
		api.KindRecord:    api.Record{},
		api.KindDiff:      api.Diff{},
		api.KindReport:    api.Report{}, api.KindDNSQueryList: api.DNSQueryList{}, api.KindDNSQuery: api.DNSQuery{},
		api.KindPage: api.Page{},
	}
}

// generate returns the schema of all kinds.
func generate(t *testing.T) map[string]any {
	t.Helper()
	text := reflect.TypeFor[encoding.TextMarshaler]()
	r := &jsonschema.Reflector{
		AllowAdditionalProperties: true, // later versions add fields
		Mapper: func(t reflect.Type) *jsonschema.Schema {
			if t != reflect.TypeFor[time.Time]() && t.Implements(text) {
				return &jsonschema.Schema{Type: "string"}
			}
			return nil
		},
	}
	for _, dir := range []string{"./internal/api", "./internal/config"} {
		if err := r.AddGoComments("kubevpn", dir); err != nil {
			t.Fatal(err)
		}
	}
	all := map[string]any{}
	var kinds []any
	for kind, object := range objects() {
		reflected := r.Reflect(object)
		data, err := json.Marshal(reflected)
		if err != nil {
			t.Fatal(err)
		}
		var s map[string]any
		if err := json.Unmarshal(data, &s); err != nil {
			t.Fatal(err)
		}
		defs, _ := s["$defs"].(map[string]any)
		for name, d := range defs {
			all[name] = d
		}
		if kind == api.KindTrustedClusters { // the IDs of the clusters are fields
			s["properties"] = map[string]any{"kind": map[string]any{"type": "string"}, "apiVersion": map[string]any{"type": "string"}}
			delete(s, "$defs")
			delete(s, "$schema")
			all[kind] = s
		}
		kinds = append(kinds, map[string]any{"$ref": "#/$defs/" + kind, "required": []any{"kind", "apiVersion"}, "properties": map[string]any{
			"kind": map[string]any{"const": kind}, "apiVersion": map[string]any{"const": api.ObjectVersion}}})
	}
	slices.SortFunc(kinds, func(a, b any) int {
		return strings.Compare(a.(map[string]any)["$ref"].(string), b.(map[string]any)["$ref"].(string))
	})
	for _, d := range all {
		allowNull(d.(map[string]any))
	}
	all["Version"].(map[string]any)["properties"].(map[string]any)["daemon"].(map[string]any)["type"] = []any{"string", "null"}
	return map[string]any{"$schema": "https://json-schema.org/draft/2020-12/schema", "title": "Objects of kubevpn, " + api.ObjectVersion,
		"oneOf": kinds, "$defs": all}
}

// allowNull allows null for required lists: Go writes an empty list as null.
func allowNull(definition map[string]any) {
	required, _ := definition["required"].([]any)
	properties, _ := definition["properties"].(map[string]any)
	for name, p := range properties {
		if p := p.(map[string]any); p["type"] == "array" && slices.Contains(required, any(name)) {
			p["type"] = []any{"array", "null"}
		}
	}
}

func TestSchemaIsGeneratedFromTypes(t *testing.T) {
	t.Chdir("../..")
	data, err := json.MarshalIndent(generate(t), "", "  ")
	if err != nil {
		t.Fatal(err)
	}
	data = append(data, '\n')
	stored, err := os.ReadFile(schemaFile)
	if err != nil && !(*update && errors.Is(err, fs.ErrNotExist)) {
		t.Fatal(err)
	}
	if len(stored) > 0 {
		if lost := incompatible(decode(t, stored), decode(t, data), "", ""); len(lost) > 0 {
			t.Fatalf("scripts that read these fields would break:\n%s", strings.Join(lost, "\n"))
		}
	}
	if *update {
		if err := os.WriteFile(schemaFile, data, 0o644); err != nil {
			t.Fatal(err)
		}
		return
	}
	if d := cmp.Diff(string(stored), string(data)); d != "" {
		t.Errorf("%s differs from the types; run `make docs` (-stored +types):\n%s", schemaFile, d)
	}
}

func decode(t *testing.T, data []byte) any {
	t.Helper()
	var v any
	if err := json.Unmarshal(data, &v); err != nil {
		t.Fatal(err)
	}
	return v
}

// incompatible lists what a reader of old documents could miss in new ones: a definition, a field, the type of a field,
// or a field that was always present.
func incompatible(before, after any, path, key string) []string {
	switch b := before.(type) {
	case map[string]any:
		a, is := after.(map[string]any)
		if !is {
			return []string{path + " is gone"}
		}
		var lost []string
		for k, v := range b {
			if k == "description" && key != "properties" {
				continue
			}
			if _, there := a[k]; !there {
				lost = append(lost, path+"/"+k+" is gone")
				continue
			}
			lost = append(lost, incompatible(v, a[k], path+"/"+k, k)...)
		}
		return lost
	case []any:
		a, is := after.([]any)
		var lost []string
		for _, v := range b {
			if !is || !slices.ContainsFunc(a, func(o any) bool { return cmp.Equal(o, v) }) {
				lost = append(lost, fmt.Sprintf("%s: %v is gone", path, v))
			}
		}
		if is && key == "type" && len(a) > len(b) {
			lost = append(lost, path+" has more types")
		}
		return lost
	}
	if !cmp.Equal(before, after) {
		return []string{fmt.Sprintf("%s was %v and is %v", path, before, after)}
	}
	return nil
}

func TestIncompatibleFindsLostFields(t *testing.T) {
	parse := func(text string) any { return decode(t, []byte(text)) }
	const before = `{"$defs":{"A":{"properties":{"x":{"type":"string","description":"d"},"description":{"type":"string"}},"required":["x"]}}}`
	for after, want := range map[string]int{
		before:                                   0,
		strings.Replace(before, `"d"`, `"e"`, 1): 0,
		strings.Replace(before, `"required"`, `"more":1,"required"`, 1):                                 0,
		strings.Replace(before, `"x":{"type":"string","description":"d"}`, `"x":{"type":"integer"}`, 1): 1,
		strings.Replace(before, `"x":{`, `"y":{`, 1):                                                    1,
		strings.Replace(before, `,"description":{"type":"string"}`, ``, 1):                              1,
		strings.Replace(before, `["x"]`, `[]`, 1):                                                       1,
		`{"$defs":{}}`: 1,
	} {
		if lost := incompatible(parse(before), parse(after), "", ""); len(lost) != want {
			t.Errorf("%s: %q, want %d", after, lost, want)
		}
	}
}

// TestStoredDocumentsComply checks the documents in testdata, which earlier versions printed. It also checks that the
// current types still have all of their fields.
func TestStoredDocumentsComply(t *testing.T) {
	compiler := validator.NewCompiler()
	schema, err := compiler.Compile("../../" + schemaFile)
	if err != nil {
		t.Fatal(err)
	}
	paths, err := filepath.Glob("testdata/*.json")
	if err != nil || len(paths) < len(objects()) {
		t.Fatalf("%v, %v", paths, err)
	}
	for _, path := range paths {
		data, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		document, err := validator.UnmarshalJSON(bytes.NewReader(data))
		if err != nil {
			t.Fatal(err)
		}
		if err := schema.Validate(document); err != nil {
			t.Errorf("%s: %v", path, err)
		}
		object := document.(map[string]any)
		kind, _ := object["kind"].(string)
		if kind == api.KindTrustedClusters {
			delete(object, "kind")
			delete(object, "apiVersion")
		}
		value := reflect.New(reflect.TypeOf(objects()[kind]))
		again, err := json.Marshal(object)
		if err != nil {
			t.Fatal(err)
		}
		decoder := json.NewDecoder(bytes.NewReader(again))
		decoder.DisallowUnknownFields()
		if err := decoder.Decode(value.Interface()); err != nil {
			t.Errorf("%s: %v", path, err)
			continue
		}
		printed, err := json.Marshal(value.Interface())
		if err != nil {
			t.Fatal(err)
		}
		if d := cmp.Diff(decode(t, again), decode(t, printed)); d != "" {
			t.Errorf("%s is printed differently (-stored +printed):\n%s", path, d)
		}
	}
}
