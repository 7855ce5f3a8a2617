// Package ownertable makes nftables tables that end with their maker: the kernel removes such a table when the socket that
// made it closes, which it does however a process ends, and lets nobody else change it. It needs Linux 5.12 and CAP_NET_ADMIN.
package ownertable
