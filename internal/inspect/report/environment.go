package report

import (
	"net/netip"
	"net/url"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
)

// wordMost is the length of a value that is no secret, unless its name says so: a word, such as "xterm" or "C.UTF-8".
const wordMost = 7

var (
	secretName = regexp.MustCompile(`(?i)TOKEN|KEY|SECRET|PASS|PWD$|CRED|AUTH|COOKIE|PROXY`)
	plainName  = regexp.MustCompile(`^(KUBEVPN|XDG|LC)_|` +
		`^(HOME|PWD|KUBECONFIG|USER|LOGNAME|LANG|TERM|HOSTNAME|TZ|DISPLAY|DEBIAN_FRONTEND)$`)
)

// Environment returns the values of variables that may be secret, and the passwords of URLs in them. Most variables
// are not: paths, addresses, words, settings of kubevpn.
func Environment(environ []string) (values []string) {
	for _, variable := range environ {
		name, value, _ := strings.Cut(variable, "=")
		_, notAddress := netip.ParseAddr(value)
		if !secretName.MatchString(name) &&
			(len(value) <= wordMost || plainName.MatchString(name) || isPath(value) || notAddress == nil) {
			continue
		}
		values = append(values, value)
		if u, err := url.Parse(value); err == nil && u.User != nil {
			password, _ := u.User.Password()
			values = append(values, password)
		}
	}
	return values
}

// isPath reports whether the value names a file that exists, or is a list of absolute paths.
func isPath(value string) bool {
	if _, err := os.Stat(value); err == nil {
		return true
	}
	list := filepath.SplitList(value)
	return len(list) > 1 && !slices.ContainsFunc(list, func(path string) bool { return !filepath.IsAbs(path) })
}
