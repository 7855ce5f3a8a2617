// Package unixsocket uses what the kernel adds to a unix socket: it identifies the peer, and sends and receives files
// with a message.
//
// The daemon, the helper, the sandbox, the agents and the manager pass descriptors this way, and decide by the peer's
// user whom they trust. All functions may be called concurrently.
package unixsocket
