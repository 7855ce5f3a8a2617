package dev

import (
	"os"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

// docs/dev.md names every variable that is not taken from the pod, with the reason.
func TestKeptVariablesAreDocumented(t *testing.T) {
	var want strings.Builder
	for _, k := range kept {
		want.WriteString("| `" + strings.Join(strings.Fields(k.names), "` `") + "` | " + k.why + " |\n")
	}
	text, err := os.ReadFile("../../../docs/dev.md")
	if err != nil {
		t.Fatal(err)
	}
	_, table, _ := strings.Cut(string(text), "| variables that are not taken from the pod | because |\n|---|---|\n")
	table, _, _ = strings.Cut(table, "\n\n")
	if diff := cmp.Diff(want.String(), table+"\n"); diff != "" {
		t.Errorf("the table of docs/dev.md: -want +got\n%s\nwant:\n%s", diff, want.String())
	}
}

// Programs execute or load what these variables name, or read settings that can. Applications need the others.
func TestIsKept(t *testing.T) {
	for _, name := range strings.Fields(`PSQLRC PSQL_PAGER VIM VIMRUNTIME GUNICORN_CMD_ARGS PYTEST_ADDOPTS PYTEST_PLUGINS
		UV_INDEX_URL UV_PYTHON HELM_PLUGINS KUBE_EDITOR CLOUDSDK_PYTHON ANSIBLE_CONFIG TF_CLI_CONFIG_FILE
		RIPGREP_CONFIG_PATH DOTNET_ROOT_X64 IPYTHONDIR JUPYTER_CONFIG_DIR MPLBACKEND LIBMYSQL_PLUGINS MYSQL_HOME
		MAGICK_CONFIGURE_PATH JAVACMD JRE_HOME SSH_SK_PROVIDER COMPOSER_HOME DOCKER_HOST KRB5_CONFIG GNUPGHOME
		CCACHE_PREFIX CFLAGS LDFLAGS AR TCLLIBPATH BUNDLE_APP_CONFIG IRBRC TS_NODE_COMPILER DENO_DIR MIX_HOME SASL_PATH
		GIO_EXTRA_MODULES HDF5_PLUGIN_PATH KAFKA_OPTS LESSKEY_CONTENT AWS_PAGER BAT_PAGER SYSTEMD_EDITOR NEW_TOOL_PLUGINS
		MYVIMRC npm_config_script_shell ld_preload LD_PRELOAD=x _JAVA_OPTIONS CATALINA_OPTS GIT_SSH_COMMAND`) {
		if !isKept(name) {
			t.Errorf("%s is taken from the pod", name)
		}
	}
	for _, name := range strings.Fields(`PORT DATABASE_URL PGHOST PGPASSWORD REDIS_ADDR NODE_ENV RAILS_ENV MIX_ENV
		PYTHONUNBUFFERED RUST_LOG GOMAXPROCS GOMEMLIMIT AWS_REGION AWS_ACCESS_KEY_ID LOG_PATH APP_CONFIG_PATH
		FEATURE_FLAGS LESSONS HGVS_URL KUBE_NAMESPACE R_CPU SSL_CERT_FILE OTEL_EXPORTER_OTLP_ENDPOINT KUBERNETES_SERVICE_HOST ld env HTTP_PROXY
		ASPNETCORE_URLS DOTNET_RUNNING_IN_CONTAINER JAVA_VERSION GOOGLE_APPLICATION_CREDENTIALS`) {
		if isKept(name) {
			t.Errorf("%s is not taken from the pod", name)
		}
	}
}

func TestKeptVariablesAreNamedOnce(t *testing.T) {
	seen := map[string]bool{}
	for _, k := range kept {
		for _, name := range strings.Fields(k.names) {
			if seen[name] {
				t.Errorf("%s is in the list twice", name)
			}
			seen[name] = true
		}
	}
}
