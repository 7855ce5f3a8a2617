package guest

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

func TestLoadModuleInsertsWhatItNeeds(t *testing.T) {
	dir := t.TempDir()
	for name, text := range map[string]string{
		"modules.dep": "kernel/ip_vs.ko: kernel/nf_conntrack.ko kernel/nf_defrag.ko\nkernel/nf_conntrack.ko: kernel/nf_defrag.ko\n" +
			"kernel/nf_defrag.ko:\nkernel/xt-set.ko.xz:\nkernel/hash-ip.ko: kernel/nf_defrag.ko\nbroken\n",
		"modules.alias":   "# Aliases\nalias ipt_SET xt-set\nalias ip_set_hash:* hash-ip\nalias net-pf-[ broken\nalias gone nowhere\nalias twice xt_set\nalias twice hash_ip\n",
		"modules.builtin": "kernel/unix.ko\n",
	} {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	for _, test := range []struct {
		name string
		want []string
		fail string
	}{
		{"ip_vs", []string{"kernel/nf_defrag.ko", "kernel/nf_conntrack.ko", "kernel/ip_vs.ko"}, ""},
		{"ip-vs", []string{"kernel/nf_defrag.ko", "kernel/nf_conntrack.ko", "kernel/ip_vs.ko"}, ""},
		{"xt_set", []string{"kernel/xt-set.ko.xz"}, ""},
		{"ipt_SET", []string{"kernel/xt-set.ko.xz"}, ""},
		{"ip_set_hash:ip,port", []string{"kernel/nf_defrag.ko", "kernel/hash-ip.ko"}, ""},
		{"twice", []string{"kernel/xt-set.ko.xz", "kernel/nf_defrag.ko", "kernel/hash-ip.ko"}, ""},
		{"unix", nil, ""},
		{"gone", nil, "the kernel has no module gone"},
		{"nothing", nil, "the kernel has no module nothing"},
	} {
		t.Run(strings.NewReplacer(":", "-", ",", "-").Replace(test.name), func(t *testing.T) {
			var got []string
			err := loadModule(dir, test.name, func(file string) error {
				name, err := filepath.Rel(dir, file)
				got = append(got, name)
				return err
			})
			if text := message(err); text != test.fail {
				t.Errorf("failed with %q, want %q", text, test.fail)
			}
			if diff := cmp.Diff(test.want, got); diff != "" {
				t.Errorf("(-want +got):\n%s", diff)
			}
		})
	}
	refused := errors.New("refused")
	if err := loadModule(dir, "nf_defrag", func(string) error { return refused }); !errors.Is(err, refused) || message(err) != "loading kernel/nf_defrag.ko: refused" {
		t.Errorf("a refused module: %v", err)
	}
	if err := loadModule(t.TempDir(), "ip_vs", nil); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("no list of modules: %v", err)
	}
}

func message(err error) string {
	if err == nil {
		return ""
	}
	return err.Error()
}
