// Package project reads kubevpn.yaml, and keeps what it lists running.
//
//	kubevpn.yaml ──┐ file.go, entry.go                   set.go              unit.go
//	kubevpn.local  ├─▶ nodes ─▶ Project ══▶ the daemon ─▶ Set: differences ─▶ a process per entry: `kubevpn proxy ...`
//	environment ───┘ values.go  (the CLI)                                     its events and its output
//
// Each entry is a command of kubevpn with its flags, so what a key means is what the flag means. The process of an
// entry holds what it made, and cleans up when it is asked to end or when the daemon is killed.
package project
