// Package unixsocket uses what the kernel adds to a unix socket: it identifies the peer, and sends and receives files
// with bytes or with a message in JSON. It also creates pairs of sockets, and duplicates descriptors, so that no child
// process inherits them.
//
// The daemon, the helper, the sandbox, the agents and the manager pass descriptors this way, and decide by the peer's
// user whom they trust. All functions may be called concurrently.
package unixsocket
