// Package unixsocket reads what the kernel adds to a unix socket: who the peer is, and the files that came with a
// message.
//
// The daemon, the helper, the sandbox, the agents and the manager pass descriptors this way, and decide by the peer's
// user whom they trust. All functions may be called concurrently.
package unixsocket
