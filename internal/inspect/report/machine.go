package report

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"runtime"
	"strings"
	"time"

	"kubevpn/internal/api"
)

// commandTimeout limits a program that prints a part.
const commandTimeout = 5 * time.Second

// looks returns the parts about a machine that commands print. Commands have no quotes: their fields are the arguments.
func looks(system string) []look {
	switch system {
	case "linux":
		return []look{
			{"machine.txt", "the kernel and the distribution", []string{"uname -srvm", "cat /etc/os-release"}},
			{"routes.txt", "addresses, routes and routing rules", []string{"ip -brief address", "ip -4 rule",
				"ip -6 rule", "ip -4 route show table all", "ip -6 route show table all"}},
			{"rules.txt", "nftables rules, without the content of sets",
				[]string{"nft --stateless --terse list ruleset"}},
			{"resolver.txt", "name resolution", []string{"resolvectl --no-pager status", "cat /etc/resolv.conf",
				"cat /etc/nsswitch.conf"}},
		}
	case "windows":
		return []look{
			{"machine.txt", "the version of Windows", []string{"cmd /c ver"}},
			{"routes.txt", "interfaces and routes", []string{"route print"}},
			{"resolver.txt", "name resolution", []string{"netsh interface ip show dnsservers",
				"netsh namespace show effectivepolicy"}},
		}
	}
	return []look{
		{"machine.txt", "the kernel", []string{"uname -srvm"}},
		{"routes.txt", "interfaces and routes", []string{"ifconfig -a", "netstat -rn"}},
		{"rules.txt", "packet filter rules", []string{"pfctl -s rules"}},
		{"resolver.txt", "name resolution", []string{"scutil --dns", "cat /etc/resolv.conf"}},
	}
}

type look struct {
	name, about string
	commands    []string
}

// Machine collects the parts about this machine.
func Machine(ctx context.Context) (parts []Part) {
	for _, l := range looks(runtime.GOOS) {
		p := Part{Name: l.name, About: l.about}
		for _, command := range l.commands {
			text, err := run(ctx, strings.Fields(command))
			if err != nil {
				p.Err = errors.Join(p.Err, fmt.Errorf("%s: %w", command, err))
				continue
			}
			p.Text += fmt.Sprintf("$ %s\n%s\n", command, text)
		}
		parts = append(parts, p)
	}
	return parts
}

// run returns the standard output of a program.
func run(ctx context.Context, args []string) (string, error) {
	ctx, cancel := context.WithTimeout(ctx, commandTimeout)
	defer cancel()
	var out, said limited
	cmd := exec.CommandContext(ctx, args[0], args[1:]...)
	cmd.Stdout, cmd.Stderr, cmd.WaitDelay = &out, &said, time.Second
	cmd.Env = append(os.Environ(), "LC_ALL=C")
	err := cmd.Run()
	switch {
	case ctx.Err() != nil:
		return "", fmt.Errorf("it did not end within %v", commandTimeout)
	case errors.Is(err, exec.ErrNotFound):
		return "", errors.New("this machine does not have the program")
	case err != nil:
		return "", fmt.Errorf("%w: %s", err, api.OneLine(said.String()))
	}
	return out.String(), nil
}

// limited keeps the first bytes, up to partMost, and discards the rest.
type limited struct{ bytes.Buffer }

func (l *limited) Write(p []byte) (int, error) {
	l.Buffer.Write(p[:min(len(p), partMost-l.Len())])
	return len(p), nil
}

// File returns a part with the end of a file.
func File(name, about, path string) Part {
	f, err := os.Open(path)
	if err != nil {
		return Part{Name: name, About: about, Err: err}
	}
	defer f.Close()
	size, unsized := f.Seek(0, io.SeekEnd)
	text, err := io.ReadAll(io.NewSectionReader(f, max(0, size-partMost-1), partMost+1))
	return Part{Name: name, About: about, Text: string(text), Err: errors.Join(unsized, err)}
}
