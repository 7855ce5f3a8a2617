// Package docker runs the containers of a pod with the Docker Engine of this machine. They have the pod's images,
// commands, environment and files, and a network that leads to the cluster. The package uses the docker command.
//
//	kubevpn ─┬─ docker run ─▶ network container: our binary in the pod's image, root with NET_ADMIN
//	         │                 │ eth0: the engine's, for published ports    tun0: everything else
//	         │◀── TUN ─────────┤ sandbox.Serve
//	         │─── files ──────▶│ which writes volumes as root, like the kubelet
//	         │
//	         └─ docker run ─▶ each of the pod's containers, --network container:NETWORK
//	              │            our binary, PID 1 ─ fork ─▶ the program
//	              └─ command, environment, signals ─▶ │
//	              ◀─ started, exit code ──────────────┘
//
// The engine bind-mounts our binary into each container, and a directory with a socket. The socket accepts one
// connection: that of PID 1, before the program runs. Command and environment cross it, so the engine's configuration,
// which it keeps on disk, and its command lines contain no secret. Files are in a tmpfs: an anonymous volume of the
// network container, from which the engine mounts them into the others.
//
// # Ends
//
// When a socket closes for any reason, PID 1 at its other end exits, and the kernel kills every process of that
// container. All containers are --rm, and the engine removes the tmpfs with the network container. So nothing is left,
// whichever process is killed. If the engine itself ends, an empty volume may stay, which the next run removes.
//
// # Signals
//
// Only kubevpn forwards signals, over the socket of PID 1. Every docker command has --sig-proxy=false and its own
// process group, so that a terminal's Ctrl-C reaches kubevpn only. With -it, docker must be in the foreground to read
// the terminal; it makes the terminal raw, so the terminal sends no signals. A SIGTERM to kubevpn's whole process group
// also ends that docker command: the program's later output is lost.
//
// # Why the docker command
//
// It parses the flags of `docker run` behind --, logs in to registries, and knows contexts.
package docker
