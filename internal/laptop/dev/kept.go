package dev

import (
	"path"
	"strings"
)

// kept are the variables that a program does not take from the pod: the values would decide which code the programs of
// this machine execute, or whose files they use. A * stands for any text, and then upper and lower case are the same:
// npm reads both. No list can be complete, so the patterns also catch variables of applications, which
// --env-from-pod brings back. docs/dev.md has the same table.
var kept = []struct{ names, why string }{
	{"PATH PWD OLDPWD CDPATH", "programs and directories are found there"},
	{"HOME *_HOME XDG_* *RC",
		"programs read their configuration, keys and code there"},
	{"*PLUGIN* *_STARTUP* *_MODULE_PATH *_MODULES_PATH *_PRELOAD", "programs load what they name"},
	{"*PAGER *EDITOR *BROWSER *_ASKPASS *_COMMAND *_SHELL *_WRAPPER *_LAUNCHER FCEDIT VISUAL",
		"programs execute what they name"},
	{"*OPTS *OPTIONS *_CMD_ARGS", "options of programs can name code"},
	{"LD_* DYLD_* GCONV_PATH GETCONF_DIR GLIBC_TUNABLES LOCPATH NLSPATH TERMCAP TERMINFO*",
		"the loader and the C library load code and data from there"},
	{"SHELL BASH* ENV ZDOTDIR FPATH IFS PS0 PS1 PS2 PS4 SHELLOPTS",
		"they decide how a shell starts, or what it executes"},
	{"EXINIT VIM* NVIM* EMACS* FZF_* LESS LESSOPEN LESSCLOSE LESSKEY* RIPGREP_* BAT_* TMUX*",
		"editors and tools of the terminal execute what they name"},
	{"GIT_COMMON_DIR GIT_CONFIG* GIT_DIR GIT_EXEC* GIT_EXTERNAL* GIT_OBJECT* GIT_PROXY* GIT_SSH* GIT_TEMPLATE* " +
		"GIT_WORK_TREE SSH_* SUDO_* HGRC* HGMERGE SVN_* CVS_* RSYNC_* CURL_* GNUPG*",
		"they name commands, hooks and keys"},
	{"NODE_PATH NODE_REPL_* TS_NODE_* BUN_* DENO_* NPM_* YARN_* PNPM_* COREPACK_*",
		"JavaScript runtimes and their package managers load code that they name"},
	{"PYTHONBREAKPOINT PYTHONINSPECT PYTHONPATH PYTHONPLATLIBDIR PYTHONPYCACHEPREFIX PYTHONSTARTUP PYTHONUSERBASE " +
		"PYTHONHOME PYTHONWARNINGS PIP_* PIPX_* UV_* POETRY_* CONDA_* PYTEST_* IPYTHON* JUPYTER_* MPL*",
		"Python and its tools import or install what they name"},
	{"PERL* RUBYLIB RUBYOPT BUNDLE_* GEM_* R_ENVIRON* R_LIBS* R_PROFILE* LUA_* JULIA_* TCL* ERL_* ELIXIR_* " +
		"COMPOSER_* PHP_INI_SCAN_DIR",
		"languages load the libraries and settings that they name"},
	{"CLASSPATH JAVACMD GRADLE_* MAVEN_* MVN_* SBT_*", "Java and its build tools load code from there"},
	{"ASPNETCORE_HOSTINGSTARTUPASSEMBLIES COR_* CORECLR_* COMPLUS_* DOTNET_ADDITIONAL_DEPS DOTNET_ROOT* " +
		"DOTNET_SHARED_STORE", ".NET loads the assemblies and profilers that they name"},
	{"GOAUTH GOBIN GOCACHE* GOENV GOFLAGS GOINSECURE GOMODCACHE GONOSUMDB GOPATH GOPRIVATE GOPROXY GOROOT GOSUMDB " +
		"GOTOOLCHAIN GOVCS GOWORK", "go executes commands that they name, and builds what it finds there"},
	{"AR AS CC CPP CXX LD NM RANLIB STRIP *CFLAGS *CPPFLAGS *CXXFLAGS *LDFLAGS *MAKEFLAGS MAKEFILES CGO_* CMAKE_* " +
		"CCACHE_* DISTCC_* COMPILER_PATH GCC_* PKG_CONFIG* CARGO_* RUSTC* RUSTDOC* RUSTFLAGS RUSTUP_*",
		"builds execute what they name"},
	{"OPENSSL_* SASL_* KRB5* PGSYSCONFDIR PGSERVICEFILE LIBMYSQL_* GIO_* GTK_* QT_* GST_* MAGICK_* HDF5_* GDAL_*",
		"libraries load modules and settings that they name"},
	{"ANSIBLE_* HELM_* TF_* TERRAFORM_* VAGRANT_* PACKER_* CLOUDSDK_* AZURE_CONFIG_DIR AWS_CONFIG_FILE " +
		"AWS_SHARED_CREDENTIALS_FILE GOOGLE_EXTERNAL_ACCOUNT_ALLOW_EXECUTABLES KUBECONFIG KUBECTL_* DOCKER_* " +
		"CONTAINERS_*",
		"tools execute commands that they, or the files that they name, contain"},
	{"DBUS_*", "an address of D-Bus can name a command"},
}

// isKept reports whether a variable is not taken from the pod.
func isKept(name string) bool {
	// An API server should not accept a name with "=". It would set the variable before the "=".
	name, _, _ = strings.Cut(name, "=")
	for _, k := range kept {
		for pattern := range strings.FieldsSeq(k.names) {
			// The only special character of a pattern is *, which stands for text without a slash. No program looks
			// for a variable that has one in its name.
			is, _ := path.Match(pattern, strings.ToUpper(name))
			if is && strings.Contains(pattern, "*") || name == pattern {
				return true
			}
		}
	}
	return false
}
