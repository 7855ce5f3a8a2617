package dev

import (
	"slices"
	"strings"
)

// kept are the variables that keep this machine's values: a pod's values would decide which code the programs of this
// machine execute, or whose files they use. A name that ends in * stands for all names that begin so, in upper or lower
// case: npm reads both. docs/dev.md has the same table.
var kept = []struct{ names, why string }{
	{"PATH PWD OLDPWD CDPATH", "programs and directories are found there"},
	{"HOME XDG_*", "programs read their configuration and keys there"},
	{"LD_* GCONV_PATH GETCONF_DIR GLIBC_TUNABLES LOCPATH NLSPATH",
		"the loader and the C library load code and data from there"},
	{"SHELL BASH_ENV ENV BASH_FUNC_* ZDOTDIR FPATH INPUTRC IFS", "they name a shell, or decide how one starts"},
	{"PROMPT_COMMAND PS0 PS1 PS2 PS4 SHELLOPTS BASHOPTS",
		"bash executes the commands in them, or sets the options that they name"},
	{"BROWSER EDITOR FCEDIT LESS LESSCLOSE LESSOPEN MANPAGER PAGER SSH_ASKPASS SUDO_ASKPASS VISUAL EXINIT VIMINIT",
		"other programs execute what they name"},
	{"GIT_ASKPASS GIT_COMMON_DIR GIT_CONFIG* GIT_DIR GIT_EDITOR GIT_EXEC_PATH GIT_EXTERNAL_DIFF GIT_PAGER " +
		"GIT_PROXY_COMMAND " +
		"GIT_SEQUENCE_EDITOR GIT_SSH GIT_SSH_COMMAND GIT_TEMPLATE_DIR",
		"git executes them, or hooks and commands that it finds there"},
	{"CURL_HOME RSYNC_RSH SVN_SSH TAR_OPTIONS WGETRC", "options of tools, which can name commands"},
	{"NODE_OPTIONS NODE_PATH BUN_OPTIONS NPM_CONFIG_* YARN_*",
		"Node.js, Bun and their package managers load code that they name"},
	{"PYTHONBREAKPOINT PYTHONHOME PYTHONINSPECT PYTHONPATH PYTHONPLATLIBDIR PYTHONPYCACHEPREFIX PYTHONSTARTUP " +
		"PYTHONUSERBASE " +
		"PYTHONWARNINGS PIP_*", "Python imports what they name, pip installs it"},
	{"PERL5DB PERL5LIB PERL5OPT PERLLIB", "Perl loads the modules that they name"},
	{"RUBYLIB RUBYOPT BUNDLE_GEMFILE BUNDLE_PATH GEM_HOME GEM_PATH", "Ruby loads the libraries that they name"},
	{"JAVA_TOOL_OPTIONS JDK_JAVA_OPTIONS _JAVA_OPTIONS JAVA_OPTS CATALINA_OPTS GRADLE_OPTS MAVEN_ARGS MAVEN_OPTS " +
		"SBT_OPTS",
		"options of Java, which can name agents and commands"},
	{"CLASSPATH GRADLE_USER_HOME JAVA_HOME", "Java and its build tools load code from there"},
	{"ASPNETCORE_HOSTINGSTARTUPASSEMBLIES CORECLR_PROFILER* DOTNET_ADDITIONAL_DEPS DOTNET_ROOT DOTNET_STARTUP_HOOKS",
		".NET loads the assemblies and profilers that they name"},
	{"PHPRC PHP_INI_SCAN_DIR", "PHP reads its settings there, which can name code"},
	{"ELIXIR_ERL_OPTIONS ERL_AFLAGS ERL_FLAGS ERL_LIBS ERL_ZFLAGS JULIA_DEPOT_PATH JULIA_LOAD_PATH LUA_CPATH* " +
		"LUA_INIT* LUA_PATH* " +
		"R_ENVIRON R_ENVIRON_USER R_LIBS R_LIBS_USER R_PROFILE R_PROFILE_USER",
		"Erlang, Julia, Lua and R load or execute what they name"},
	{"GOAUTH GOBIN GOCACHE GOCACHEPROG GOENV GOFLAGS GOINSECURE GOMODCACHE GONOSUMDB GOPATH GOPRIVATE GOPROXY GOROOT " +
		"GOSUMDB " +
		"GOTOOLCHAIN GOVCS GOWORK", "go executes commands that they name, and builds what it finds there"},
	{"CC CXX CGO_* COMPILER_PATH GCC_EXEC_PREFIX LD MAKEFILES MAKEFLAGS GNUMAKEFLAGS PKG_CONFIG",
		"builds execute what they name"},
	{"CARGO_* RUSTC RUSTC_WORKSPACE_WRAPPER RUSTC_WRAPPER RUSTDOC RUSTFLAGS RUSTUP_HOME RUSTUP_TOOLCHAIN",
		"cargo executes what they name"},
	{"OPENSSL_CONF OPENSSL_ENGINES OPENSSL_MODULES", "OpenSSL loads libraries that they name"},
	{"AWS_CONFIG_FILE AWS_SHARED_CREDENTIALS_FILE DOCKER_CONFIG GOOGLE_EXTERNAL_ACCOUNT_ALLOW_EXECUTABLES KUBECONFIG",
		"credentials come from commands that these files name"},
	{"DBUS_SESSION_BUS_ADDRESS DBUS_SYSTEM_BUS_ADDRESS", "an address of D-Bus can name a command"},
}

// isKept reports whether a variable keeps this machine's value.
func isKept(name string) bool {
	// An API server should not accept a name with "=". It would set the variable before the "=".
	name, _, _ = strings.Cut(name, "=")
	for _, k := range kept {
		if slices.ContainsFunc(strings.Fields(k.names), func(pattern string) bool {
			start, prefix := strings.CutSuffix(pattern, "*")
			return name == pattern || prefix && len(name) >= len(start) && strings.EqualFold(name[:len(start)], start)
		}) {
			return true
		}
	}
	return false
}
