// Package release tests what a release consists of: install.sh and, with the build tag release, the files that `make
// release-snapshot` writes into bin/dist.
package release
