//go:build linux

// Demo shows kubevpn on a real cluster: it connects, fetches a page and disconnects. `make demo` builds the programs
// and the image, and then runs Demo in the folder test with the image's name. The cluster keeps running until `make
// demo-down`.
//
// With -picture, Demo records a user's first minute in a terminal instead, and writes it as an animated SVG. With
// -check too, it compares the recording with the file.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"path/filepath"
	"strings"

	"kubevpn/test/lab"
)

const (
	name    = "demo"
	image   = "../bin/kubevpn-image.tar"
	program = "../bin/kubevpn"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt)
	defer stop()
	picture := flag.String("picture", "", "record the first minute into this SVG `file`")
	check := flag.Bool("check", false, "fail if the file of -picture shows something else, instead of writing it")
	flag.Parse()
	if err := run(ctx, *picture, *check, flag.Args()); err != nil {
		fmt.Fprintln(os.Stderr, "demo:", err)
		os.Exit(1)
	}
}

type demo struct {
	*lab.Lab
	kubevpn string
	home    string // of the user
	env     []string
}

func run(ctx context.Context, picture string, check bool, args []string) error {
	if len(args) != 1 {
		return errors.New("no image given; run `make demo`, which builds the image and passes its name")
	}
	d, err := prepare(ctx, args[0])
	if err != nil {
		return err
	}
	before, err := d.traces(ctx)
	if err != nil {
		return err
	}
	if picture != "" {
		err = d.picture(ctx, picture, check)
	} else {
		err = d.show(ctx)
	}
	title("Disconnect")
	err = errors.Join(err, d.laptop(context.WithoutCancel(ctx), d.kubevpn, "quit"))
	if err != nil {
		return err
	}
	after, err := d.traces(ctx)
	if err != nil {
		return err
	}
	if after != before {
		return fmt.Errorf("disconnect has not restored the laptop.\nbefore:\n%s\nafter:\n%s", before, after)
	}
	fmt.Print(after)
	fmt.Println("Links, routes, rules, firewall and resolv.conf are as they were before connect.")
	title("The cluster is still up")
	fmt.Printf("  bin/lab --name %s exec laptop -- bash     a shell on the laptop (KUBECONFIG=%s)\n", name,
		d.env[0][len("KUBECONFIG="):])
	fmt.Printf("  bin/lab --name %s kubectl get pods -A\n  make demo-down\n", name)
	return nil
}

// prepare brings the cluster up and loads the image, which is called ref.
func prepare(ctx context.Context, ref string) (*demo, error) {
	if os.Geteuid() != 0 {
		return nil, errors.New("root is needed: the demo makes network namespaces and runs a cluster in them")
	}
	kubevpn, err := filepath.Abs(program)
	if err != nil {
		return nil, err
	}
	title("A real Kubernetes cluster: two nodes, a laptop beside it, a router between them")
	l := lab.New(lab.Config{Name: name, Progress: os.Stdout})
	if err := l.Up(ctx); err != nil {
		return nil, err
	}
	if err := l.Load(ctx, image); err != nil {
		return nil, err
	}
	kubeconfig, err := l.Kubeconfig(lab.Admin)
	if err != nil {
		return nil, err
	}
	home := filepath.Join(l.Dir(), "laptop")
	if err := os.MkdirAll(home, 0o700); err != nil {
		return nil, err
	}
	return &demo{l, kubevpn, home, []string{
		"KUBECONFIG=" + kubeconfig, "KUBEVPN_IMAGE=" + ref, "HOME=" + home,
		"XDG_RUNTIME_DIR=" + home, "XDG_STATE_HOME=" + home, "XDG_CONFIG_HOME=" + home,
	}}, nil
}

// show connects and fetches the same page in three ways.
func (d *demo) show(ctx context.Context) error {
	title("kubevpn connect")
	if err := d.laptop(ctx, d.kubevpn, "connect"); err != nil {
		return err
	}
	title("kubevpn status")
	if err := d.laptop(ctx, d.kubevpn, "status", "-o", "wide"); err != nil {
		return err
	}
	vip, err := d.ask(ctx, "get", "service", "web", "-o", "jsonpath={.spec.clusterIP}")
	if err != nil {
		return err
	}
	pod, err := d.ask(ctx, "get", "pods", "-l", "app=web", "-o", "jsonpath={.items[0].status.podIP}")
	if err != nil {
		return err
	}
	for _, page := range [][2]string{
		{"by the Service's name", "http://web.default/"},
		{"by its ClusterIP", "http://" + vip + "/"},
		{"by a pod's IP", "http://" + pod + ":8080/"},
	} {
		title("A page " + page[0] + ": curl " + page[1])
		if err := d.laptop(ctx, "curl", "-sS", "--max-time", "10", page[1]); err != nil {
			return err
		}
	}
	return nil
}

// laptop runs a command on the laptop and shows what it prints.
func (d *demo) laptop(ctx context.Context, argv ...string) error {
	cmd, err := d.Command(ctx, "laptop", append(append([]string{"env"}, d.env...), argv...)...)
	if err != nil {
		return err
	}
	cmd.Stdout, cmd.Stderr = os.Stdout, os.Stderr
	if err := cmd.Run(); err != nil {
		return fmt.Errorf("%s: %w", strings.Join(argv, " "), err)
	}
	return nil
}

func (d *demo) ask(ctx context.Context, args ...string) (string, error) {
	cmd, err := d.Kubectl(ctx, lab.Admin, args...)
	if err != nil {
		return "", err
	}
	out, err := cmd.Output()
	if err != nil {
		return "", fmt.Errorf("kubectl %s: %w", strings.Join(args, " "), err)
	}
	return strings.TrimSpace(string(out)), nil
}

// traces returns the parts of the laptop's state that a VPN could change.
func (d *demo) traces(ctx context.Context) (string, error) {
	cmd, err := d.Command(ctx, "laptop", "sh", "-c",
		"ip -brief link; ip rule; ip route show table all; nft list ruleset; cat /etc/resolv.conf")
	if err != nil {
		return "", err
	}
	out, err := cmd.CombinedOutput()
	if err != nil {
		return "", fmt.Errorf("looking at the laptop: %w: %s", err, out)
	}
	return string(out), nil
}

func title(s string) { fmt.Printf("\n── %s\n", s) }
