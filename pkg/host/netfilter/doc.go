// Package netfilter keeps rules of a process in the kernel's netfilter: a Table of nf_tables that the kernel removes
// with its process. It also has parts of rules, and deletes conntrack entries. It is Linux only.
//
// pkg/host/redirect keeps the redirects of an intercepted pod in a Table, pkg/host/osdns those of DNS queries, and
// pkg/host/route the forwarding guard.
package netfilter
