// Package sshjump opens TCP connections from an SSH jump host, with the installed ssh program. The user's SSH
// configuration, agent, keys and known hosts apply.
//
//	DialContext ── socket ── ssh -W HOST:PORT ─┐
//	DialContext ── socket ── ssh -W HOST:PORT ─┼─ control socket ─ ssh -f -N (the master) ═══ jump host ── HOST:PORT
//	Client ───────── holds ────────────────────┘
//
// All clients of a user with the same hosts share one master, in all processes. A master ends a few seconds after the
// last process that holds it, however that process ends: the kernel closes its connection to the control socket.
package sshjump

import (
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"path/filepath"
	"slices"
	"strings"
	"time"
)

// Config configures New.
type Config struct {
	Hosts   Hosts
	Program string   // path of ssh
	Env     []string // of ssh
	// Dir contains the control socket. Only the user may have access to it, and its path must be short: 75 bytes fit
	// on every system.
	Dir string
}

// control returns the path of the control socket.
func (c *Config) control() string {
	sum := sha256.Sum256([]byte(c.Hosts.String()))
	return filepath.Join(c.Dir, "ssh-"+hex.EncodeToString(sum[:4]))
}

const (
	persist        = 5 * time.Second // the life of a master that nobody holds
	connectTimeout = 10 * time.Second
	// The master notices within aliveInterval*(aliveCount+1) that its jump host is gone.
	aliveInterval = 5 * time.Second
	aliveCount    = 2
)

// masterArguments returns the arguments that open the master. It forks after the login. Without batch, ssh may ask the
// user.
func (c *Config) masterArguments(batch bool) []string {
	args := []string{"-f", "-N", "-T", "-a", "-x", "-S", escape(c.control())}
	options := []string{
		"ControlMaster=auto", fmt.Sprintf("ControlPersist=%.0f", persist.Seconds()), "ClearAllForwardings=yes",
		"PermitLocalCommand=no", fmt.Sprintf("ConnectTimeout=%.0f", connectTimeout.Seconds()),
		fmt.Sprintf("ServerAliveInterval=%.0f", aliveInterval.Seconds()),
		fmt.Sprintf("ServerAliveCountMax=%d", aliveCount),
	}
	if batch {
		options = append(options, "BatchMode=yes")
	}
	for _, o := range options {
		args = append(args, "-o", o)
	}
	return append(args, c.Hosts.Arguments()...)
}

// channelArguments returns the arguments that connect standard input and output to the address through the master.
// They name no host, so that ssh fails without a master.
func (c *Config) channelArguments(address string) []string {
	return []string{"-F", "none", "-S", escape(c.control()), "-o", "ControlMaster=no", "-o", "ProxyCommand=false",
		"-W", address, "--", "master"}
}

// escape protects a path from the expansion of tokens.
func escape(path string) string { return strings.ReplaceAll(path, "%", "%%") }

// Error is a failure of ssh.
type Error struct {
	Hosts Hosts
	// To is the address to which the last host cannot connect. Empty: the login to the hosts failed.
	To   string
	Said string // the last line of ssh's messages, or how it ended
}

func (e *Error) Error() string {
	if e.To != "" {
		return fmt.Sprintf("the jump host %s cannot connect to %s: %s", e.Hosts, e.To, e.Said)
	}
	return fmt.Sprintf("cannot use the jump host %s: %s", e.Hosts, e.Said)
}

// rejected reports whether another attempt without the user would fail too, and count as an attack.
func (e *Error) rejected() bool {
	return slices.ContainsFunc([]string{"Permission denied", "Host key verification failed", "Too many authentication"},
		func(text string) bool { return strings.Contains(e.Said, text) })
}

// lastLine returns the last line that is not empty.
func lastLine(text string) string {
	lines := strings.Split(strings.TrimSpace(text), "\n")
	return strings.TrimSpace(lines[len(lines)-1])
}

// settings parses the output of `ssh -G`. It omits settings with the value none.
func settings(text string) map[string]string {
	all := map[string]string{}
	for line := range strings.Lines(text) {
		key, value, _ := strings.Cut(strings.TrimSpace(line), " ")
		if value != "none" {
			all[key] = value
		}
	}
	return all
}
