package workload

import (
	"fmt"
	"runtime"
	"testing"

	"kubevpn/internal/api"
)

func TestCpTakesOnePathOfEachEnd(t *testing.T) {
	for _, test := range []struct {
		from, to, workload, path, local string
		upload                          bool
	}{
		{"web-0:/a", "b", "pod/web-0", "/a", "b", false},
		{"deploy/web:a:b", ".", "deploy/web", "a:b", ".", false},
		{"./a:b", "web-0:/", "pod/web-0", "/", "./a:b", true},
		{"~/a:b", "sts/db:.", "sts/db", ".", "~/a:b", true},
		{"/x/y:z", "web-0:x", "pod/web-0", "x", "/x/y:z", true},
		{`C:\x`, "web-0:x", "pod/web-0", "x", `C:\x`, true},
	} {
		t.Run(fmt.Sprint(test.from, " ", test.to), func(t *testing.T) {
			if test.from[1] == ':' && runtime.GOOS != "windows" {
				t.Skip("a pod may have that name")
			}
			var o cpOptions
			if err := o.parse([]string{test.from, test.to}); err != nil {
				t.Fatal(err)
			}
			if o.workload != test.workload || o.copy.Path != test.path || o.copy.Local != test.local ||
				o.copy.Upload != test.upload {
				t.Errorf("%+v", o)
			}
		})
	}
	for _, args := range [][]string{{}, {"web-0:/a"}, {"a", "b"}, {"web-0:a", "web-1:b"}, {"web-0:", "b"}, {"web-0:a", ""}} {
		if err := new(cpOptions).parse(args); api.AsError(err).Code != api.ExitUsage {
			t.Errorf("%q: %v", args, err)
		}
	}
}
