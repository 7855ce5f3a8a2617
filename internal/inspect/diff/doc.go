// Package diff compares the answers of a workload with those of a program of this machine. It sends each request that
// an intercept recorded to the program again:
//
//	exchange ─ Offer ─▶ queue ─▶ workers ─ send ─▶ the program
//	             full: dropped, and counted  └─ Compare ─▶ groups: by route and place
//
// Two answers of the same version show which places vary from request to request. These are ignored. What the exchanges
// contain comes from the cluster, and may be anything. All memory is bounded.
package diff
