// Package release tests the parts of a release: install.sh and, with the build tag release, the files that `make
// release-snapshot` writes into bin/dist.
package release
