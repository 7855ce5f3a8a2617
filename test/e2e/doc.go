// Package e2e tests the product on a real cluster: black-box suites that run the kubevpn binary from a laptop's
// network namespace of test/lab, with the tools a developer would use (curl, dig, nc, ping). Everything is behind
// the build tag e2e; `make test` runs it.
//
//	harness_test.go   a cluster, the product's image in it, a laptop with its own home
//	*_test.go         the suites, one file for each promise of the documentation
//	build             builds the product for the suites and the benchmarks
package e2e
