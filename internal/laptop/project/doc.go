// Package project reads kubevpn.yaml, and keeps what it lists running.
//
//	kubevpn.yaml ──┐ file.go                    set.go                    unit.go
//	kubevpn.local  ├─▶ nodes ─▶ Project ─▶ Set: differences ─▶ a process per entry: `kubevpn proxy ...`
//	environment ───┘ values.go              ▲                               its events and output ─▶ console.go
//	                                        │
//	              another `kubevpn up`, `down`, `status` ─▶ socket: control.go
//
// Each entry is a command of kubevpn with its flags, so what a key means is what the flag means. The process of an entry
// holds what it made, and cleans up when it is asked to end or when the process of the Set disappears.
package project
