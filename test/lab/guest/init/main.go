//go:build linux

// Init is the first process of a guest, the server in it, its modprobe, and the stand-in on the machine for a program
// in it.
// See package kubevpn/test/lab/guest.
//
//	init                                 as process 1
//	init serve ADDRESS:PORT BITS
//	init run [-alone NAME] ADDRESS:PORT PROGRAM ARGUMENTS...
//	modprobe [-FLAGS] NAMES...
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"kubevpn/test/lab/guest"
)

func main() {
	switch {
	case filepath.Base(os.Args[0]) == "modprobe":
		os.Exit(report(modprobe(os.Args[1:])))
	case os.Getpid() == 1:
		guest.Boot(os.Getenv(guest.Variable))
	case len(os.Args) == 4 && os.Args[1] == "serve":
		os.Exit(report(serve(os.Args[2], os.Args[3])))
	case len(os.Args) > 1 && os.Args[1] == "run":
		code, err := run(os.Args[2:])
		if err != nil {
			code = report(err)
		}
		os.Exit(code)
	default:
		os.Exit(report(errors.New("want serve or run, or to be process 1")))
	}
}

// report prints an error and returns the exit code, as env and nohup do: one for a missing program, another for all
// other errors.
func report(err error) int {
	if err == nil {
		return 0
	}
	fmt.Fprintln(os.Stderr, filepath.Base(os.Args[0])+":", err)
	if errors.Is(err, os.ErrNotExist) {
		return 127
	}
	return 125
}

func modprobe(args []string) error {
	var errs []error
	for _, a := range args {
		if !strings.HasPrefix(a, "-") {
			errs = append(errs, guest.Modprobe(a))
		}
	}
	return errors.Join(errs...)
}

func serve(address, bits string) error {
	a, err := netip.ParseAddrPort(address)
	if err != nil {
		return err
	}
	n, err := strconv.Atoi(bits)
	if err != nil {
		return err
	}
	return guest.Serve(a, n)
}

func run(args []string) (int, error) {
	flags := flag.NewFlagSet("run", flag.ContinueOnError)
	alone := flags.String("alone", "", "start after the previous program of this `NAME` has ended")
	if err := flags.Parse(args); err != nil {
		return 0, err
	}
	if flags.NArg() < 2 {
		return 0, errors.New("run: want an address and a program")
	}
	address := flags.Arg(0)
	client := guest.Client{Connect: func(ctx context.Context) (net.Conn, error) {
		return (&net.Dialer{Timeout: 10 * time.Second}).DialContext(ctx, "tcp", address)
	}}
	return client.Run(context.Background(), guest.Program{
		Argv: flags.Args()[1:], Env: os.Environ(), Alone: *alone,
		Input: os.Stdin, Output: os.Stdout, Errors: os.Stderr,
	})
}
