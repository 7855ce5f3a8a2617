package main

import (
	"context"
	"crypto/sha256"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"syscall"
	"time"
)

// looking says where look looks.
type looking struct {
	Dirs  []string // whose files it reads
	Names []string // that it resolves
	Dial  []string // addresses, HOST:PORT
	Echo  string   // URL of the lab's echo server
}

const (
	tokenFile = "/var/run/secrets/kubernetes.io/serviceaccount/token"
	lookTime  = 5 * time.Second
)

// look writes what a program sees of its surroundings to w, as JSON: an object with one field for each kind.
func look(w io.Writer, arg string) error {
	var at looking
	if err := json.Unmarshal([]byte(arg), &at); err != nil {
		return err
	}
	host, _ := os.Hostname()
	dir, _ := os.Getwd()
	groups, _ := os.Getgroups()
	seen := map[string]any{
		"environment": environment(), "host name": host, "working directory": dir, "token": token(),
		"user": []any{os.Getuid(), os.Getgid(), groups}, "limits": limits(), "signals": signals(),
		"resolv.conf": words("/etc/resolv.conf"), "hosts": hosts(host), "identity": identity(at.Echo),
	}
	files, names, dials := map[string]string{}, map[string]string{}, map[string]string{}
	for _, d := range at.Dirs {
		if err := read(d, files); err != nil {
			return err
		}
	}
	for _, name := range at.Names {
		names[name] = resolve(name)
	}
	for _, address := range at.Dial {
		dials[address] = dial(address)
	}
	seen["files"], seen["names"], seen["connections"] = files, names, dials
	return json.NewEncoder(w).Encode(seen)
}

func environment() map[string]string {
	all := map[string]string{}
	for _, e := range os.Environ() {
		name, value, _ := strings.Cut(e, "=")
		all[name] = value
	}
	return all
}

// read records the files of a directory: mode and content. Tokens differ each time.
func read(dir string, into map[string]string) error {
	return filepath.WalkDir(dir, func(path string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		info, err := os.Stat(path) // follows the links of volumes
		if err != nil || info.IsDir() {
			return err
		}
		text, err := os.ReadFile(path)
		if err != nil {
			return err
		}
		if path == tokenFile || strings.Contains(path, "/..") { // to which the links of a volume lead
			return nil
		}
		into[path] = fmt.Sprintf("%x", sha256.Sum256(text))
		return nil
	})
}

// token returns for whom the service account's token is.
func token() any {
	raw, err := os.ReadFile(tokenFile)
	parts := strings.Split(string(raw), ".")
	if err != nil || len(parts) != 3 {
		return fmt.Sprint("no token: ", err)
	}
	claims, err := base64.RawURLEncoding.DecodeString(parts[1])
	var of struct {
		Subject  string   `json:"sub"`
		Audience []string `json:"aud"`
	}
	if err = errors.Join(err, json.Unmarshal(claims, &of)); err != nil {
		return err.Error()
	}
	return of
}

// limits returns those of setrlimit(2). Those of cgroups, which docs/dev.md names, are not in force in the lab.
func limits() map[string]syscall.Rlimit {
	all := map[string]syscall.Rlimit{}
	for name, what := range map[string]int{
		"open files": syscall.RLIMIT_NOFILE, "memory": syscall.RLIMIT_AS, "core": syscall.RLIMIT_CORE,
	} {
		var limit syscall.Rlimit
		if err := syscall.Getrlimit(what, &limit); err == nil {
			all[name] = limit
		}
	}
	return all
}

// signals returns the signals that the program's parent made it ignore or block. /proc/self is the first thread, in
// which Go's runtime blocks all signals while it starts another thread.
func signals() (all []string) {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	for _, line := range words("/proc/thread-self/status") {
		if strings.HasPrefix(line, "SigIgn:") || strings.HasPrefix(line, "SigBlk:") {
			all = append(all, line)
		}
	}
	return all
}

// words returns the lines of a file, sorted, with one space between words.
func words(path string) (lines []string) {
	text, err := os.ReadFile(path)
	if err != nil {
		return []string{err.Error()}
	}
	for line := range strings.Lines(string(text)) {
		if f := strings.Fields(line); len(f) > 0 && !strings.HasPrefix(f[0], "#") {
			lines = append(lines, strings.Join(f, " "))
		}
	}
	slices.Sort(lines)
	return lines
}

// hosts returns the lines of the hosts file, the own ones without addresses.
func hosts(own string) (lines []string) {
	for _, line := range words("/etc/hosts") {
		if address, name, _ := strings.Cut(line, " "); name == own && address != "127.0.0.1" {
			line = name
		}
		lines = append(lines, line)
	}
	slices.Sort(lines)
	return slices.Compact(lines)
}

// identity returns the address that a peer in the cluster sees.
func identity(url string) string {
	client := http.Client{Timeout: lookTime}
	resp, err := client.Get(url)
	if err != nil {
		return err.Error()
	}
	defer resp.Body.Close()
	var said struct{ Remote string }
	if err := json.NewDecoder(resp.Body).Decode(&said); err != nil {
		return err.Error()
	}
	host, _, _ := net.SplitHostPort(said.Remote)
	return host
}

func resolve(name string) string {
	ctx, cancel := context.WithTimeout(context.Background(), lookTime)
	defer cancel()
	found, err := net.DefaultResolver.LookupHost(ctx, name)
	if unknown := (*net.DNSError)(nil); errors.As(err, &unknown) && unknown.IsNotFound {
		return "unknown"
	}
	if err != nil {
		return err.Error()
	}
	slices.Sort(found)
	return strings.Join(found, " ")
}

func dial(address string) string {
	conn, err := net.DialTimeout("tcp", address, lookTime)
	if err == nil {
		conn.Close()
		return "connected"
	}
	if errno := syscall.Errno(0); errors.As(err, &errno) {
		return errno.Error()
	}
	return "no answer"
}
