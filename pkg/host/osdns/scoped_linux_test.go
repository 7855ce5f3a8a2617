package osdns

import (
	"bufio"
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"net/url"
	"os"
	"os/signal"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"

	"kubevpn/internal/testenv"
)

// storeVariable names the directory in which the scutil of these tests keeps its keys.
const storeVariable = "KUBEVPN_TEST_STORE"

// scutilRole acts as scutil(8) with a directory as dynamic store. A key is a file, and exists as long as the process
// that wrote it. SIGUSR1 makes scutilRole report a change.
func scutilRole() int {
	store := fakeStore(os.Getenv(storeVariable))
	if slices.Contains(os.Args, "--dns") {
		b, err := os.ReadFile(filepath.Join(string(store), "dns"))
		fmt.Print(string(b))
		return exitCode(err)
	}
	changes := make(chan os.Signal, 1)
	signal.Notify(changes, syscall.SIGUSR1)
	go func() {
		for range changes {
			fmt.Printf("notification callback (store address = 0x1).\n  15:04:05.000 changedKey [0] = %s\n", dnsKey)
		}
	}()
	dict := map[string]string{}
	for lines := bufio.NewScanner(os.Stdin); lines.Scan(); {
		command := strings.Fields(lines.Text())
		switch command[0] {
		case "d.init":
			clear(dict)
		case "d.add":
			dict[command[1]] = strings.Join(command[3:], " ") // after * or #
		case "d.show":
			fmt.Println(showDict(dict))
		case "add":
			if _, err := os.Stat(filepath.Join(string(store), "readonly")); err == nil {
				fmt.Println("  Permission denied")
			} else if len(command) != 3 || command[2] != "temporary" {
				fmt.Println("  not temporary")
			} else if err := store.add(command[1], dict); err != nil {
				fmt.Println("  " + err.Error())
			}
		case "remove":
			if err := os.Remove(store.file(command[1])); err != nil {
				fmt.Println("  No such key")
			}
		case "list":
			keys := slices.DeleteFunc(slices.Sorted(maps.Keys(store.keys())), func(key string) bool {
				return !regexp.MustCompile("^" + command[1] + "$").MatchString(key)
			})
			for i, key := range keys {
				fmt.Printf("  subKey [%d] = %s\n", i, key)
			}
			if len(keys) == 0 {
				fmt.Println("  no keys.")
			}
		}
	}
	return 0
}

func exitCode(err error) int {
	if err != nil {
		return 1
	}
	return 0
}

func showDict(dict map[string]string) string {
	out := "<dictionary> {\n"
	for _, k := range slices.Sorted(maps.Keys(dict)) {
		out += "  " + k + " : " + dict[k] + "\n"
	}
	return out + "}"
}

type fakeStore string

func (s fakeStore) file(key string) string {
	return filepath.Join(string(s), "key-"+url.PathEscape(key))
}

func (s fakeStore) add(key string, dict map[string]string) error {
	if _, ok := s.keys()[key]; ok {
		return errors.New("Key already defined")
	}
	return os.WriteFile(s.file(key), fmt.Appendf(nil, "%d\n%s", os.Getpid(), showDict(dict)), 0o600)
}

// keys returns the keys whose processes exist, with their values.
func (s fakeStore) keys() map[string]string {
	out := map[string]string{}
	files, _ := filepath.Glob(filepath.Join(string(s), "key-*"))
	for _, file := range files {
		b, err := os.ReadFile(file)
		pid, value, _ := strings.Cut(string(b), "\n")
		owner, _ := strconv.Atoi(pid)
		if err == nil && owner > 0 && !errors.Is(unix.Kill(owner, 0), unix.ESRCH) {
			key, _ := url.PathUnescape(strings.TrimPrefix(filepath.Base(file), "key-"))
			out[key] = value
		}
	}
	return out
}

func (s fakeStore) state() string {
	var b strings.Builder
	for _, key := range slices.Sorted(maps.Keys(s.keys())) {
		fmt.Fprintln(&b, key, s.keys()[key])
	}
	return b.String()
}

// nameserver sets the nameserver of the machine.
func (s fakeStore) nameserver(t *testing.T, addr string) {
	t.Helper()
	text := "DNS configuration\n\nresolver #1\n  nameserver[0] : " + addr + "\n"
	if err := os.WriteFile(filepath.Join(string(s), "dns"), []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
}

// scopedMachine returns a Configurator of macOS with the scutil of these tests, its store, and the reported changes.
func scopedMachine(t *testing.T) (*scoped, fakeStore, chan Applied) {
	t.Helper()
	store := fakeStore(t.TempDir())
	store.nameserver(t, "192.0.2.1")
	t.Setenv(roleVariable, "scutil")
	t.Setenv(storeVariable, string(store))
	name, value, _ := strings.Cut(testenv.EndAtOnce(), "=")
	t.Setenv(name, value)
	reports := make(chan Applied, 16)
	opt := Options{OnChange: func(a Applied) { reports <- a }}.withDefaults()
	return &scoped{
		opt: opt, program: []string{"/proc/self/exe"}, owner: "kubevpn-42", retry: pollInterval / 100,
		changed: make(chan struct{}, 1),
	}, store, reports
}

func TestScopedKeepsTheContract(t *testing.T) {
	keepsTheContract(t, ModeDarwin, func(t *testing.T) machine {
		c, store, _ := scopedMachine(t)
		return machine{c, resolvedConfig(), store.state}
	})
}

func TestScopedFollowsChanges(t *testing.T) {
	c, store, reports := scopedMachine(t)
	m := machine{c, resolvedConfig(), store.state}
	applied := m.sets(t, ModeDarwin)
	if want := netip.MustParseAddrPort("192.0.2.1:53"); !slices.Equal(applied.Upstreams, []netip.AddrPort{want}) {
		t.Errorf("upstreams %v", applied.Upstreams)
	}
	during := store.state()

	store.nameserver(t, "192.0.2.2")
	signalChild(t, c, syscall.SIGUSR1)
	if got := <-reports; !slices.Equal(got.Upstreams, []netip.AddrPort{netip.MustParseAddrPort("192.0.2.2:53")}) {
		t.Errorf("reported %+v", got)
	}
	for key := range store.keys() { // configd has restarted
		if err := os.Remove(store.file(key)); err != nil {
			t.Fatal(err)
		}
	}
	signalChild(t, c, syscall.SIGUSR1)
	testenv.Until(t, "the keys are back", func() bool { return store.state() == during })

	signalChild(t, c, syscall.SIGKILL)
	testenv.Until(t, "another session has the keys", func() bool { return store.state() == during })
	if err := c.Close(); err != nil {
		t.Error(err)
	}
	m.is(t, "")
	if len(reports) > 0 {
		t.Errorf("reported %+v, although nothing changed for the user", <-reports)
	}
}

// signalChild sends a signal to scutil.
func signalChild(t *testing.T, c *scoped, s syscall.Signal) {
	t.Helper()
	c.mu.Lock()
	defer c.mu.Unlock()
	if err := c.session.cmd.Process.Signal(s); err != nil {
		t.Fatal(err)
	}
}

func TestScopedFailsCompletely(t *testing.T) {
	c, store, _ := scopedMachine(t)
	m := machine{c, resolvedConfig(), store.state}
	readonly := filepath.Join(string(store), "readonly")
	if err := os.WriteFile(readonly, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := c.Set(m.cfg); err == nil || !strings.Contains(err.Error(), "Permission denied") {
		t.Errorf("Set: %v", err)
	}
	m.is(t, "")
	if err := os.Remove(readonly); err != nil {
		t.Fatal(err)
	}
	m.sets(t, ModeDarwin)
	c.mu.Lock()
	c.program = []string{"/nonexistent/scutil"}
	c.mu.Unlock()
	if _, err := c.Set(m.cfg); err == nil { // Set cannot read the nameservers
		t.Error("Set succeeded without scutil")
	}
	m.is(t, "")
	if err := c.Close(); err != nil {
		t.Error(err)
	}
}
