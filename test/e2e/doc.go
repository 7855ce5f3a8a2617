// Package e2e proves the product on a real cluster: black-box suites that run the kubevpn binary from a laptop's
// network namespace of test/lab, with the tools a developer would use (curl, dig, nc, ping). Everything is behind
// the build tag e2e; `make test` runs it.
//
//	harness_test.go   a cluster, the product's image in it, a laptop with its own home
//	*_test.go         what is promised, one file a promise
//	build             the product, for all of them and for the benchmarks
package e2e
