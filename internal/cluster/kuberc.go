package cluster

import (
	"bufio"
	"bytes"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"

	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/util/yaml"
	"k8s.io/client-go/plugin/pkg/client/auth/exec"
	clientcmdapi "k8s.io/client-go/tools/clientcmd/api"
	"k8s.io/client-go/util/homedir"
	"k8s.io/kubectl/pkg/config"
	"k8s.io/kubectl/pkg/config/scheme"

	"kubevpn/internal/api"
)

// pluginPolicy is the policy for credential plugins in kubectl's preferences (KEP-3104). The zero value allows all.
type pluginPolicy struct {
	clientcmdapi.PluginPolicy
	file string // that contains it
}

// readPluginPolicy reads the policy of the file that kubectl would use in this environment: $KUBERC, unless that is
// "off", else ~/.kube/kuberc. Like kubectl, it only warns if the latter cannot be used, or has unknown fields.
func readPluginPolicy(env map[string]string) (policy pluginPolicy, warning string, err *api.Error) {
	file, explicit := env["KUBERC"], env["KUBERC"] != ""
	if file == "off" {
		return policy, "", nil
	}
	if !explicit {
		file = filepath.Join(homedir.HomeDir(), ".kube", "kuberc")
	}
	preference, fault := readPreference(file)
	switch {
	case fault == nil, !explicit && errors.Is(fault, os.ErrNotExist):
	case !explicit, runtime.IsStrictDecodingError(fault):
		warning = api.OneLine(fmt.Sprintf("kubectl's preferences %s: %v", file, fault))
	default:
		return policy, "", api.Errorf(api.ExitExecPlugin, "kubectl's preferences %s: %w", file, fault).
			WithHint("Correct the file that $KUBERC names. KUBERC=off ignores it.")
	}
	if preference == nil {
		return policy, warning, nil
	}
	policy.file, policy.PolicyType = file, clientcmdapi.PolicyType(preference.CredentialPluginPolicy)
	for _, entry := range preference.CredentialPluginAllowlist {
		policy.Allowlist = append(policy.Allowlist, clientcmdapi.AllowlistEntry(entry))
	}
	if preference.CredentialPluginAllowlist != nil && policy.Allowlist == nil {
		policy.Allowlist = []clientcmdapi.AllowlistEntry{}
	}
	if invalid := exec.ValidatePluginPolicy(policy.PluginPolicy); invalid != nil {
		return policy, warning, api.Errorf(api.ExitExecPlugin, "kubectl's preferences %s: %w", file, invalid).
			WithHint("`kubectl` fails the same way. Correct the file.")
	}
	return policy, warning, nil
}

// readPreference returns the first Preference in a file that kubectl knows, as kubectl does; nil: the file is empty.
// With a strict decoding error it returns both.
func readPreference(file string) (*config.Preference, error) {
	text, err := os.ReadFile(file)
	if err != nil {
		return nil, errors.Unwrap(err) // without the path
	}
	empty := true
	for reader := yaml.NewYAMLReader(bufio.NewReader(bytes.NewReader(text))); ; {
		document, err := reader.Read()
		switch {
		case errors.Is(err, io.EOF) && empty:
			return nil, nil
		case errors.Is(err, io.EOF):
			return nil, errors.New("it contains no valid Preference")
		case err != nil:
			return nil, err
		case len(bytes.TrimSpace(document)) == 0:
			continue
		}
		empty = false
		object, _, strict := scheme.StrictCodecs.UniversalDecoder().Decode(document, nil, nil)
		if strict != nil {
			object, _, _ = scheme.LenientCodecs.UniversalDecoder().Decode(document, nil, nil)
		}
		if preference, ok := object.(*config.Preference); ok {
			return preference, strict
		}
	}
}

// refusal returns why the policy does not allow a plugin, or "". command is what the kubeconfig names, path the program
// that this is in the folders of searchPath. The rules are those of client-go: the list contains one of them, or the
// name of the program.
func (p pluginPolicy) refusal(command, path, searchPath string) string {
	allowed := func(entry clientcmdapi.AllowlistEntry) bool {
		if entry.Command == filepath.Clean(command) || entry.Command == path {
			return true
		}
		found, err := lookPath(entry.Command, searchPath)
		return err == nil && filepath.Base(entry.Command) == filepath.Base(path) && found == path
	}
	switch {
	case p.PolicyType == clientcmdapi.PluginPolicyDenyAll:
		return fmt.Sprintf("is not allowed: credentialPluginPolicy is DenyAll in %s", p.file)
	case p.PolicyType == clientcmdapi.PluginPolicyAllowlist && !slices.ContainsFunc(p.Allowlist, allowed):
		return fmt.Sprintf("is not allowed: credentialPluginAllowlist of %s does not contain it", p.file)
	}
	return ""
}
