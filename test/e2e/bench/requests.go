//go:build linux

package main

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"os/exec"
	"os/user"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"

	"kubevpn/internal/testenv"
)

// The measurements of requests: the load generators of three kinds of servers, each beside `kubectl port-forward` to
// the same pod. The servers run in the pod's network namespace. Debian's packages redis, wrk and postgresql have the
// programs.

// generator is one kind of server and its load generator.
type generator struct {
	row    string
	port   int
	client func(host, port string) []string
	figure *regexp.Regexp
}

const (
	redisPort    = 6379
	postgresPort = 5432
	postgresUser = "postgres" // of the machine, and of the database of the same name
	redisRow     = "`redis-benchmark -c 50`, GET"
)

var generators = []generator{
	{redisRow, redisPort, func(host, port string) []string {
		return []string{"redis-benchmark", "-h", host, "-p", port, "-c", "50", "-n", "40000", "-t", "get", "-q"}
	}, regexp.MustCompile(`GET: ([0-9.]+) requests per second`)},
	{"`pgbench -S -c 8`", postgresPort, func(host, port string) []string {
		return []string{"pgbench", "-S", "-n", "-c", "8", "-T", "3", "-h", host, "-p", port, "-U", postgresUser,
			postgresUser}
	}, regexp.MustCompile(`tps = ([0-9.]+)`)},
	{"`wrk -c 32`", httpPort, func(host, port string) []string {
		return []string{"wrk", "-c", "32", "-t", "1", "-d", "3", "http://" + host + ":" + port + "/"}
	}, wrkRate},
}

var wrkRate = regexp.MustCompile(`Requests/sec: +([0-9.]+)`)

// requestPaths are the columns of requests, besides the port-forward.
var requestPaths = []path{gvisorForward, systemForward, gvisorProxy, systemProxy, gvisorDirect, systemDirect}

// measureRequests runs all loads round by round. After the measurement of each path, it measures the port-forward.
func (b *bench) measureRequests(ctx context.Context, r *report) error {
	if err := b.expose(ctx); err != nil {
		return err
	}
	stop, err := b.serveLoads(ctx)
	if err != nil {
		return err
	}
	defer stop()
	unforward, err := b.forwardTo(ctx, redisPort, postgresPort, httpPort)
	if err != nil {
		return err
	}
	defer unforward()
	for round := range b.rounds {
		for _, s := range stages {
			if err := b.connectBy(ctx, s.netstack, s.transport); err != nil {
				return err
			}
			for _, l := range generators {
				var got [2]float64
				for i, p := range []path{s.path, portForward} {
					if got[i], err = b.loadBy(ctx, l, p); err != nil {
						return fmt.Errorf("%s, %s: %w", l.row, p, err)
					}
				}
				r.add(l.row, s.path, got[0])
				r.add(l.row, portForward, got[1])
				say("round %d of %d: %s, %s: %.0f/s, port-forward: %.0f/s", round+1, b.rounds, l.row, s.path, got[0],
					got[1])
			}
		}
	}
	return nil
}

// loadBy runs a load generator by one path.
func (b *bench) loadBy(ctx context.Context, l generator, p path) (float64, error) {
	target, err := netip.ParseAddrPort(b.target(p, l.port))
	if err != nil {
		return 0, err
	}
	ctx, cancel := context.WithTimeout(ctx, time.Minute)
	defer cancel()
	out, err := b.laptop(ctx, l.client(target.Addr().String(), strconv.Itoa(int(target.Port())))...).CombinedOutput()
	if err != nil {
		return 0, fmt.Errorf("%w: %s", err, out)
	}
	return figure(l.figure, out)
}

// figure returns the last number that pattern finds in a program's output.
func figure(pattern *regexp.Regexp, out []byte) (float64, error) {
	found := pattern.FindAllSubmatch(out, -1)
	if len(found) == 0 {
		return 0, fmt.Errorf("no figure in %q", out)
	}
	return strconv.ParseFloat(string(found[len(found)-1][1]), 64)
}

// serveLoads starts redis and PostgreSQL in the pod's network namespace.
func (b *bench) serveLoads(ctx context.Context) (stop func(), err error) {
	commands, err := b.loadServers(ctx)
	if err != nil {
		return nil, err
	}
	stop, err = runAll(ctx, func(ctx context.Context) (servers []*exec.Cmd) {
		for _, argv := range commands {
			servers = append(servers, b.inPod(ctx, b.pod, argv...))
		}
		return servers
	})
	if err != nil {
		return nil, err
	}
	err = testenv.Poll(30*time.Second, func() error {
		out, err := b.inPod(ctx, b.pod, "pgbench", "-i", "-q", "-h", "127.0.0.1", "-U", postgresUser,
			postgresUser).CombinedOutput()
		if err != nil {
			return fmt.Errorf("pgbench: %w: %s", err, out)
		}
		return nil
	})
	if err != nil {
		stop()
		return nil, err
	}
	return stop, nil
}

// loadServers returns the command lines of the servers, and makes PostgreSQL's database.
func (b *bench) loadServers(ctx context.Context) ([][]string, error) {
	found, err := filepath.Glob("/usr/lib/postgresql/*/bin")
	if err != nil || len(found) == 0 {
		return nil, errors.Join(errors.New("no PostgreSQL; run apt-get install postgresql redis wrk"), err)
	}
	bin, data := found[len(found)-1], filepath.Join(b.dir, "postgres")
	who, err := user.Lookup(postgresUser) // it does not run as root
	if err != nil {
		return nil, err
	}
	uid, err := strconv.Atoi(who.Uid)
	if err != nil {
		return nil, err
	}
	if err := errors.Join(os.Chmod(b.dir, 0o711), os.Mkdir(data, 0o700), os.Chown(data, uid, -1)); err != nil {
		return nil, err
	}
	as := []string{"setpriv", "--reuid", who.Uid, "--regid", who.Gid, "--clear-groups"}
	argv := append(slices.Clone(as), filepath.Join(bin, "initdb"), "-D", data, "-A", "trust", "-U", postgresUser)
	if out, err := exec.CommandContext(ctx, argv[0], argv[1:]...).CombinedOutput(); err != nil {
		return nil, fmt.Errorf("initdb: %w: %s", err, out)
	}
	access := filepath.Join(data, "pg_hba.conf")
	if err := os.WriteFile(access, []byte("host all all all trust\n"), 0o600); err != nil {
		return nil, err
	}
	if err := os.Chown(access, uid, -1); err != nil {
		return nil, err
	}
	return [][]string{
		{"redis-server", "--port", strconv.Itoa(redisPort), "--save", "", "--protected-mode", "no",
			"--bind", "0.0.0.0"},
		append(as, filepath.Join(bin, "postgres"), "-D", data, "-h", "0.0.0.0", "-k", data),
	}, nil
}

// renderRequests makes the table of requests.
func (r *report) renderRequests() string {
	var b strings.Builder
	fmt.Fprintf(&b, "Measured on %s.\n%s, in requests or transactions a second.\n\n", r.machine,
		medians(len(r.values[cell{redisRow, gvisorProxy}])))
	head := []string{"", string(portForward)}
	for _, p := range requestPaths {
		head = append(head, string(p))
	}
	header(&b, head)
	for _, l := range generators {
		cells := []string{l.row, r.shown("%.0f", l.row, portForward)}
		for _, p := range requestPaths {
			cells = append(cells, r.shown("%.0f", l.row, p))
		}
		tableLine(&b, cells)
	}
	return b.String()
}
