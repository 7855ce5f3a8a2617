package helper

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"net/netip"
	"os"
	"os/signal"
	"runtime"
	"syscall"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"kubevpn/internal/api"
)

func wanted() api.NetworkState {
	return api.NetworkState{
		Links: []api.Link{goodLink()},
		Resolver: &api.Resolver{
			Listen4: netip.MustParseAddrPort("127.0.0.1:5399"), Listen6: netip.MustParseAddrPort("[::1]:5399"),
		},
	}
}

// serveRole is a helper without Main: its socket is descriptor 3.
func serveRole() error {
	if os.Getenv("NO_NFTABLES") != "" {
		if err := forbidNFTables(); err != nil {
			return err
		}
	}
	signal.Ignore(syscall.SIGHUP)
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM)
	defer stop()
	cfg := LocalConfig{UID: 1000}
	if _, err := Recover(cfg); err != nil {
		return err
	}
	return Serve(ctx, os.NewFile(3, "socket"), cfg)
}

// daemonRole is a small daemon, whose end of the socket of the helper is descriptor 3. It configures the network,
// prints the result, and then executes the command in its input: close or hold.
func daemonRole() error {
	c, err := NewClient(os.NewFile(3, "socket"), nil)
	if err != nil {
		return err
	}
	ctx := context.Background()
	tun, err := c.CreateTUN(ctx, "kubevpn0", 1500)
	if err != nil {
		return err
	}
	applied, err := c.Apply(ctx, wanted())
	if err != nil {
		return err
	}
	fmt.Printf("%s %v\n", applied.ResolverMode, applied.Upstreams)
	if line, _ := bufio.NewReader(os.Stdin).ReadString('\n'); line == "close\n" {
		if err := c.Close(); err != nil {
			return err
		}
		return tun.Close()
	}
	<-c.Done() // the helper was killed: a daemon closes its devices then
	return tun.Close()
}

// connectRole is `kubevpn connect` on a terminal: it starts the helper by sudo, sets everything up, and lives on
// when the terminal goes, like the daemon. Every line of its report goes to descriptor 3, for the terminal
// shows sudo's prompt. Descriptor 4 tells it to end.
func connectRole() error {
	report := os.NewFile(3, "report")
	signal.Ignore(syscall.SIGHUP)
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	cfg := StartConfig{Executable: os.Getenv("HELPER_EXE"), Stderr: os.Stderr}
	if cfg.Service = os.Getenv("HELPER_SERVICE"); cfg.Service != "" {
		cfg.Announce = func(line string) { fmt.Fprintln(report, "announced", line) }
	}
	socket, err := Start(ctx, cfg)
	if err != nil {
		e := api.AsError(err)
		fmt.Fprintf(report, "error %d: %s; %s\n", e.Code, e.Message, e.Hint)
		return nil
	}
	c, err := NewClient(socket, nil)
	if err != nil {
		return err
	}
	tun, err := c.CreateTUN(ctx, "kubevpn0", 1500)
	if err != nil {
		fmt.Fprintf(report, "error: %v\n", err)
		return err
	}
	defer tun.Close()
	applied, err := c.Apply(ctx, wanted())
	if err != nil {
		fmt.Fprintf(report, "error: %v\n", err)
		return err
	}
	fmt.Fprintf(report, "connected as %d: %s %v\n", os.Getuid(), applied.ResolverMode, applied.Upstreams)
	in := bufio.NewReader(os.NewFile(4, "orders"))
	for {
		line, err := in.ReadString('\n')
		switch {
		case errors.Is(err, io.EOF):
			return nil // and with it the helper's socket ends
		case err != nil:
			return err
		case line == "socket\n":
			f, err := c.MarkedSocket(ctx, "udp4")
			if err != nil {
				fmt.Fprintf(report, "error: %v\n", err)
				continue
			}
			mark, err := unix.GetsockoptInt(int(f.Fd()), unix.SOL_SOCKET, unix.SO_MARK)
			fmt.Fprintf(report, "a socket with mark %#x, %v\n", mark, err)
			f.Close()
		}
	}
}

// forbidNFTables makes this process live on a kernel without nf_tables: sockets of that kind cannot be made.
func forbidNFTables() error {
	const (
		load, equal, ret   = unix.BPF_LD | unix.BPF_W | unix.BPF_ABS, unix.BPF_JMP | unix.BPF_JEQ | unix.BPF_K, unix.BPF_RET | unix.BPF_K
		number, arg0, arg2 = 0, 16, 32 // struct seccomp_data, little endian
	)
	filter := []unix.SockFilter{
		{Code: load, K: number}, {Code: equal, K: unix.SYS_SOCKET, Jf: 5},
		{Code: load, K: arg0}, {Code: equal, K: unix.AF_NETLINK, Jf: 3},
		{Code: load, K: arg2}, {Code: equal, K: unix.NETLINK_NETFILTER, Jf: 1},
		{Code: ret, K: unix.SECCOMP_RET_ERRNO | uint32(unix.EPROTONOSUPPORT)},
		{Code: ret, K: unix.SECCOMP_RET_ALLOW},
	}
	runtime.LockOSThread()
	if err := unix.Prctl(unix.PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0); err != nil {
		return err
	}
	prog := unix.SockFprog{Len: uint16(len(filter)), Filter: &filter[0]}
	_, _, errno := unix.Syscall(unix.SYS_SECCOMP, unix.SECCOMP_SET_MODE_FILTER, unix.SECCOMP_FILTER_FLAG_TSYNC, uintptr(unsafe.Pointer(&prog)))
	if errno != 0 {
		return fmt.Errorf("seccomp: %w", errno)
	}
	return nil
}
