// Package docker runs the containers of a pod with the Docker Engine of this machine: the pod's images, commands, environment
// and files, and a network of which everything goes to the cluster. It speaks to the engine by the docker command.
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
// Our binary is bind-mounted, and so is a directory with a socket for each container, which takes one connection: that of PID
// 1, before there is a program. By it come command and environment, so that the engine's configuration, which it keeps on
// disk, and its command lines have no secret; files are in a tmpfs, in a directory of the user's alone.
//
// # Ends
//
// A socket that ends, however, ends what is at its other end: PID 1 of a container, and with that every process of it. The
// network container removes the files then. All containers are --rm. So no file is left by a kubevpn that was killed; what a
// killed network container leaves, kubevpn removes, and what both leave, the next one, which sees it by a lock. The last run removes
// the directory of all.
package docker
