// Package docker runs the containers of a pod with the Docker Engine of this machine: the pod's images, commands,
// environment and files, and a network of which everything goes to the cluster. It speaks to the engine by the docker
// command.
//
//	kubevpn ─┬─ docker run ─▶ network container: our binary in the pod's image, root with NET_ADMIN
//	         │                 │ eth0: the engine's, for published ports    tun0: everything else
//	         │◀── TUN ─────────┤ sandbox.Serve
//	         │─── files ──────▶│ writes volumes: root's, as the kubelet's are
//	         │
//	         └─ docker run ─▶ each of the pod's containers, --network container:NETWORK
//	              │            our binary, PID 1 ─ fork ─▶ the program
//	              └─ command, environment, signals ─▶ │
//	              ◀─ started, exit code ──────────────┘
//
// Our binary is bind-mounted, and so is a directory with a socket for each container, which takes one connection: that
// of PID 1, before there is a program. By it come command and environment, so that the engine's configuration, which it
// keeps on disk, and its command lines have no secret; files are in a tmpfs: an anonymous volume of the network
// container, from where the engine mounts them into the others.
//
// # Ends
//
// A socket that ends, however, ends what is at its other end: PID 1 of a container, and with that every process of it.
// All containers are --rm, and the engine removes the tmpfs with the network container. So nothing is left, whoever is
// killed. An engine that ends itself may leave the volume, empty, which the next run removes.
//
// # Signals
//
// Kubevpn alone forwards signals, over the socket of PID 1. Every docker command has --sig-proxy=false and a process
// group of its own, so that a terminal's Ctrl-C reaches kubevpn only. With -it, docker has to be in the foreground to
// read the terminal; it makes the terminal raw, which sends no signals. A SIGTERM to kubevpn's whole process group ends
// that docker, too: what the program writes after it is lost.
//
// # Why the docker command
//
// It parses the flags of `docker run` behind --, logs in to registries, and knows contexts.
package docker
