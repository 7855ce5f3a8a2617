package client

import (
	"bufio"
	"bytes"
	"cmp"
	"errors"
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

// pluginRefusal returns why kubectl's preferences (KEP-3104) do not allow a credential plugin, or "". command is what
// the kubeconfig names, path the program that this is in $PATH, or empty. The file is that of kubectl in this
// environment: $KUBERC, unless that is "off", else ~/.kube/kuberc. Like kubectl, it only warns if the latter cannot be
// used, or has unknown fields.
func pluginRefusal(command, path string, env map[string]string) (refusal, warning string, err *api.Error) {
	file, explicit := cmp.Or(env["KUBERC"], filepath.Join(homedir.HomeDir(), ".kube", "kuberc")), env["KUBERC"] != ""
	if file == "off" {
		return "", "", nil
	}
	policy, fault := readPluginPolicy(file)
	if !explicit || runtime.IsStrictDecodingError(fault) {
		if fault != nil && !errors.Is(fault, os.ErrNotExist) {
			warning = api.OneLine("kubectl's preferences " + file + ": " + fault.Error())
		}
		fault = nil
	}
	if fault = cmp.Or(fault, exec.ValidatePluginPolicy(policy)); fault != nil {
		return "", "", api.Errorf(api.ExitExecPlugin, "kubectl's preferences %s: %w", file, fault).
			WithHint("`kubectl` fails the same way. Correct the file.")
	}
	allowed := func(entry clientcmdapi.AllowlistEntry) bool { // the rules of client-go
		found, err := lookPath(entry.Command, env["PATH"])
		return entry.Command == filepath.Clean(command) ||
			err == nil && found == path && filepath.Base(entry.Command) == filepath.Base(path)
	}
	switch {
	case policy.PolicyType == clientcmdapi.PluginPolicyDenyAll:
		refusal = "is not allowed: credentialPluginPolicy is DenyAll in " + file
	case policy.PolicyType == clientcmdapi.PluginPolicyAllowlist && !slices.ContainsFunc(policy.Allowlist, allowed):
		refusal = "is not allowed: credentialPluginAllowlist of " + file + " does not contain it"
	}
	return refusal, warning, nil
}

// readPluginPolicy returns the policy of the first Preference in a file, as kubectl does. An empty file has the empty
// policy, which allows all. With a strict decoding error it returns both.
func readPluginPolicy(file string) (policy clientcmdapi.PluginPolicy, err error) {
	text, err := os.ReadFile(file)
	if err != nil {
		return policy, errors.Unwrap(err) // without the path
	}
	if len(bytes.TrimSpace(text)) == 0 {
		return policy, nil
	}
	for documents := yaml.NewYAMLReader(bufio.NewReader(bytes.NewReader(text))); ; {
		document, end := documents.Read()
		if end != nil {
			return policy, errors.New("it contains no valid Preference")
		}
		object, _, fault := scheme.StrictCodecs.UniversalDecoder().Decode(document, nil, nil)
		if preference, ok := object.(*config.Preference); ok {
			policy.PolicyType = clientcmdapi.PolicyType(preference.CredentialPluginPolicy)
			if list := preference.CredentialPluginAllowlist; list != nil {
				policy.Allowlist = make([]clientcmdapi.AllowlistEntry, len(list))
				for n := range list {
					policy.Allowlist[n] = clientcmdapi.AllowlistEntry(list[n])
				}
			}
			return policy, fault
		}
	}
}
