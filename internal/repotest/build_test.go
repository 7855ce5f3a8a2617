package repotest

import (
	"os"
	"strings"
	"testing"

	goload "golang.org/x/tools/go/packages"
)

// Every package of the product and its tests type-check on every system that kubevpn is for, also packages that only
// return an error there. Type-checking the source, dependencies included, takes a tenth of what compiling takes from
// an empty cache; `make elsewhere`, which CI runs, vets and compiles. The lab and the end-to-end suites, in the module
// test, run on Linux alone.
func TestTypeChecksElsewhere(t *testing.T) {
	if testing.Short() {
		t.Skip("SKIPPED: -short; it type-checks all dependencies for two systems")
	}
	for _, system := range []string{"darwin/arm64", "windows/amd64"} {
		t.Run(strings.ReplaceAll(system, "/", "-"), func(t *testing.T) {
			goos, goarch, _ := strings.Cut(system, "/")
			checked, err := goload.Load(&goload.Config{
				Mode: goload.NeedName | goload.NeedFiles | goload.NeedCompiledGoFiles | goload.NeedImports |
					goload.NeedDeps | goload.NeedTypes | goload.NeedSyntax | goload.NeedTypesSizes,
				Dir:   root(t),
				Tests: true,
				Env:   append(os.Environ(), "GOOS="+goos, "GOARCH="+goarch, "CGO_ENABLED=0"),
			}, "./...")
			if err != nil {
				t.Fatal(err)
			}
			if len(checked) < 40 {
				t.Errorf("%d packages: this test lists them wrongly", len(checked))
			}
			goload.Visit(checked, nil, func(p *goload.Package) {
				for _, err := range p.Errors {
					t.Errorf("%s: %v", p.PkgPath, err)
				}
			})
		})
	}
}
