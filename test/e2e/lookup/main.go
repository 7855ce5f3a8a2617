// Lookup prints the first IPv4 address of a name, by Go's own resolver.
package main

import (
	"context"
	"fmt"
	"net"
	"os"
)

func main() {
	r := net.Resolver{PreferGo: true}
	addrs, err := r.LookupNetIP(context.Background(), "ip4", os.Args[1])
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	fmt.Println(addrs[0])
}
